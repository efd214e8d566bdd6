"""What the runtime asks of a transport: messages with tags between the ranks of one pipeline.

A message is a list of values: tensors, None, numbers, strings, and containers of them. Its tag is an integer that
both ends know; of one tag there is never more than one message under way, and messages of different tags overtake
each other freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Label", "Receiving", "Sending", "Transport"]

Label = Callable[[int], str]
"""Says what the message of a tag is, for errors."""


class Sending(Protocol):
    """A message that is under way; it keeps what it sends alive."""

    def wait(self) -> None:
        """Wait until the message has left.

        Raises:
            TransportError: it did not leave in time, or the other rank is gone.
            RankError: the other rank failed.
        """


class Receiving(Protocol):
    """A message that is expected."""

    def ready(self) -> bool:
        """Return whether `wait` would return at once, as far as is known; True where it is not known."""

    def wait(self) -> list[Any]:
        """Wait for the message.

        Returns:
            Its values. Tensors are new, of the strides that they had where they were sent, and leaves that require
            a gradient where the sender's did.

        Raises:
            TransportError: it did not come in time, or the other rank is gone.
            RankError: the other rank failed.
        """


class Transport(Protocol):
    """One rank's end of all its channels."""

    rank: int
    """Of this rank in the pipeline."""
    size: int
    """Ranks of the pipeline."""
    label: Label
    """What the message of a tag is; set by its user."""

    def send(self, dst: int, tag: int, values: Sequence[Any]) -> Sending:
        """Start to send; returns at once.

        Args:
            dst: rank that gets it.
            tag: of the message.
            values: what is sent; tensors are sent without their graphs.

        Raises:
            TransportError: a value cannot be sent.
        """

    def recv(self, src: int, tag: int) -> Receiving:
        """Start to receive; returns at once.

        Args:
            src: rank that sends it.
            tag: of the message.
        """

    def abort(self, error: str) -> None:
        """End all channels of this rank at once, so that ranks that wait for it stop with `error`.

        Args:
            error: what they are told; the first one of all ranks counts.
        """

    def close(self) -> None:
        """End all channels in peace, when nothing is under way."""
