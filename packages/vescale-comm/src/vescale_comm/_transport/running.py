"""Collectives that are written as generators: they yield the messages that have to be there before they go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import TransportError

__all__ = ["Explain", "Last", "Message", "Running", "Steps", "posted"]


@dataclass(slots=True)
class Message:
    """Something that the backend does."""

    work: Any
    """Of torch.distributed; None once it is finished, for gloo must not be asked twice."""
    verb: str
    """What is done, such as "sending to"."""
    peer: int = -1
    """The other rank, where there is one."""


class _Refused:
    """A call that the backend did not even take, such as a message to a rank that is gone."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise what the backend said."""
        raise self._error


def posted(post: Callable[[], Any], verb: str, peer: int = -1) -> Message:
    """Start something; if the backend refuses, that is told where it is waited for, like any other failure.

    Args:
        post: starts it, and returns a work of torch.distributed.
        verb: see `Message`.
        peer: see `Message`.
    """
    try:
        return Message(post(), verb, peer)
    except RuntimeError as error:
        return Message(_Refused(error), verb, peer)


class Last(list[Message]):
    """Messages after which a collective sends no more."""


Steps = Iterator[Sequence[Message]]
Explain = Callable[[Message | None, BaseException], TransportError]


class Running:
    """A collective under way."""

    def __init__(self, steps: Steps, explain: Explain, before: Sequence[Running] = (), begin: bool = True) -> None:
        """Start it.

        Args:
            steps: the collective; it runs up to its first messages now, and goes on in `wait`.
            explain: makes the error to raise from the message that failed, if it was one, and what happened.
            before: collectives that were started before and are to be finished before, for another rank may wait for
                the next messages of those, while it does not wait for this one yet.
            begin: whether it runs now; else somebody is to call `begin`, from any thread, and `wait` waits for
                `release`.
        """
        self._before = before
        self._steps: Steps | None = steps
        self._explain = explain
        self._lock = threading.Lock()
        self._error: TransportError | None = None
        self._messages: Sequence[Message] = ()
        self._released = None if begin else threading.Event()
        if begin:
            self._advance()

    def begin(self) -> None:
        """Run up to the first messages; a failure, of whatever kind, is told in `wait`."""
        with self._lock, suppress(BaseException):
            self._advance()

    def follow(self) -> None:
        """Run up to the last messages, and release it; a failure, of whatever kind, is told in `wait`."""
        try:
            with self._lock, suppress(BaseException):
                while self._steps is not None and not isinstance(self._messages, Last):
                    self._step()
        finally:
            self.release()

    def release(self) -> None:
        """Let `wait` go on."""
        if self._released is not None:
            self._released.set()

    def wait(self) -> None:
        """Finish it; from any thread, any number of times.

        Raises:
            TransportError: a message failed or did not come in time; each further call raises it again.
        """
        for earlier in self._before:
            earlier.wait()
        self._before = ()
        if self._released is not None:
            self._released.wait()
        with self._lock:
            if self._error is not None:
                raise self._error
            while self._steps is not None:
                self._step()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do, or nothing can be done any more."""
        return self._steps is None

    def _step(self) -> None:
        for message in self._messages:
            self._finish(message)
        self._advance()

    def _finish(self, message: Message) -> None:
        if message.work is None:
            return
        try:
            message.work.wait()
        except RuntimeError as error:
            raise self._fail(message, error) from error
        except BaseException as error:
            # Interrupted: which messages came is not known, so nobody may go on with the buffer.
            self._fail(message, error)
            raise
        message.work = None

    def _advance(self) -> None:
        assert self._steps is not None
        try:
            self._messages = next(self._steps)
        except StopIteration:
            self._steps = None  # and with it the buffers that it refers to
            self._messages = ()
        except RuntimeError as error:
            raise self._fail(None, error) from error
        except BaseException as error:
            self._fail(None, error)
            raise

    def _fail(self, message: Message | None, error: BaseException) -> TransportError:
        self._error = error if isinstance(error, TransportError) else self._explain(message, error)
        self._steps = None
        self._messages = ()
        return self._error
