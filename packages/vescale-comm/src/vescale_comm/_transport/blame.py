"""Words of ranks for each other when a collective fails: each leaves in the group's store what it was at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from ..errors import TransportError
from .call import Call
from .running import Message

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Blame"]

GRACE = timedelta(seconds=1)
"""How long a failing rank waits for the word of another one, which fails at about the same time."""


class Blame:
    """Explains failures of one transport of one group."""

    def __init__(self, group: ProcessGroup, key: str, cut: Callable[[], None] | None = None) -> None:
        """Take the group.

        Args:
            group: whose store is used, where it has one.
            key: the same on all ranks, another one for every transport.
            cut: called when a collective failed and the word is there for the others: is to end what they wait for.
        """
        self._group, self._key, self._cut = group, f"vescale_comm/{key}", cut
        self.rank = group.rank()

    def explain(self, call: Call, number: int, message: Message | None, error: BaseException) -> TransportError:
        """Make the error of a collective, and tell the others.

        Args:
            call: what this rank asked for.
            number: how many collectives of this transport came before it.
            message: what failed, if it was a message.
            error: what happened.
        """
        at = f"collective {number}, {call}"
        self._publish(f"{at}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if self._cut is not None:
            self._cut()
        if not isinstance(error, RuntimeError):
            what = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            return TransportError(f"rank {self.rank}: {at} was interrupted by {what}.")
        if message is None or message.peer < 0:
            what = f"rank {self.rank}: {at}: {message.verb if message else 'its own part'} failed: {error}"
            return TransportError(what)
        peer = message.peer
        text = f"rank {self.rank}: {at}: {message.verb} rank {peer} failed: {error}"
        word = self._word_of(peer)
        if word:
            text += f"\nrank {peer} failed too, in {word}"
        elif "imed out" in str(error):
            text += (
                f"\nrank {peer} is stuck, much slower, or at another collective: every rank must call the same ones, "
                "in the same order, with buffers of the same size and dtype."
            )
        else:
            text += f"\nrank {peer} is gone: it failed before, was killed, or ended early."
        return TransportError(text)

    def _publish(self, text: str) -> None:
        # The store may have died with the rank that kept it; then there is nobody to tell.
        with suppress(RuntimeError, AttributeError):
            self._group.get_group_store().set(f"{self._key}/{self.rank}", text[:1000])

    def _word_of(self, peer: int) -> str:
        with suppress(RuntimeError, AttributeError):
            store, key = self._group.get_group_store(), f"{self._key}/{peer}"
            store.wait([key], GRACE)
            return str(store.get(key).decode())
        return ""
