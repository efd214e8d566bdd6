"""All ranks in one process: messages are copies put into boxes.

For tests, and to act out a pipeline of many ranks on one machine. Ranks may be threads that wait for each other, or
one thread that goes on with another rank where a message has not come (`ready`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import TransportError
from .failure import rank_error
from .interface import Label
from .message import local_copy

__all__ = ["LocalHub", "LocalTransport"]


class LocalHub:
    """The boxes of all ranks.

    Args:
        size: ranks.
        timeout: seconds that a rank waits for a message.

    Example:
        >>> hub = LocalHub(2)
        >>> sent = hub.transport(0).send(1, 7, [3, None])
        >>> hub.transport(1).recv(0, 7).wait()
        [3, None]
    """

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], list[Any]] = {}
        self.failure: tuple[int, str] | None = None

    def reset(self) -> None:
        """Forget all messages and failures."""
        with self.changed:
            self.boxes.clear()
            self.failure = None

    def transport(self, rank: int) -> LocalTransport:
        """Return the end of one rank."""
        return LocalTransport(self, rank)


class _Sent:
    __slots__ = ()

    def wait(self) -> None:
        """Boxes take everything at once."""


class _Expected:
    __slots__ = ("_key", "_owner")

    def __init__(self, owner: LocalTransport, key: tuple[int, int, int]) -> None:
        self._owner = owner
        self._key = key

    def ready(self) -> bool:
        hub = self._owner.hub
        return self._key in hub.boxes or hub.failure is not None

    def wait(self) -> list[Any]:
        return self._owner.take(self._key)


class LocalTransport:
    """One rank's end; see `Transport`.

    Args:
        hub: that all ranks share.
        rank: of this end.
    """

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = hub.size
        self.label: Label = str

    def send(self, dst: int, tag: int, values: Sequence[Any]) -> _Sent:
        """Put a copy into the box of `dst`; see `Transport.send`."""
        hub = self.hub
        key = (self.rank, dst, tag)
        message = local_copy(values)
        with hub.changed:
            if key in hub.boxes:
                raise TransportError(
                    f"rank {self.rank}: {self.label(tag)} was sent to rank {dst} twice before it was received; "
                    "a step ended before all of its messages were taken."
                )
            hub.boxes[key] = message
            hub.changed.notify_all()
        return _Sent()

    def recv(self, src: int, tag: int) -> _Expected:
        """Expect a message; see `Transport.recv`."""
        return _Expected(self, (src, self.rank, tag))

    def take(self, key: tuple[int, int, int]) -> list[Any]:
        """Wait for a message and take it out of its box."""
        hub = self.hub
        end = time.monotonic() + hub.timeout
        with hub.changed:
            while key not in hub.boxes:
                if hub.failure is not None:
                    rank, text = hub.failure
                    raise rank_error(rank, text, self.rank, self.label(key[2]))
                left = end - time.monotonic()
                if left <= 0:
                    raise TransportError(
                        f"rank {self.rank}: {self.label(key[2])} from rank {key[0]} did not come within "
                        f"{hub.timeout:g} s (timeout=)."
                    )
                hub.changed.wait(left)
            return hub.boxes.pop(key)

    def abort(self, error: str) -> None:
        """Let all ranks that wait stop; see `Transport.abort`."""
        with self.hub.changed:
            if self.hub.failure is None:
                self.hub.failure = (self.rank, error)
            self.hub.changed.notify_all()

    def close(self) -> None:
        """Nothing is open."""
