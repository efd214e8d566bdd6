"""One process that saves and loads alone."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

__all__ = ["Alone"]


class Alone:
    """A group of one, which always agrees.

    Example:
        >>> Alone().agree("step", b"7", lambda answers: answers[0])
        b'7'
    """

    world = 1

    def __init__(self, rank: int = 0) -> None:
        """Say who it is.

        Args:
            rank: global rank of this process.
        """
        self.rank = 0
        self.ranks = (rank,)

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def session(self, kind: str) -> Alone:
        """Return itself: nothing has to be told apart."""
        del kind
        return self

    def gather(self, name: str, data: bytes) -> list[bytes]:
        """Return what this process gave."""
        del name
        return [data]

    def broadcast(self, name: str, data: bytes | None) -> bytes:
        """Return what this process gave."""
        if data is None:
            raise ValueError(f"{name}: member 0 has to give data.")
        return data

    def agree(self, name: str, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return what `decide` makes of what this process gave."""
        del name
        return decide([data])

    def fail(self, error: BaseException) -> None:
        """Do nothing: the error is this process's own."""

    def close(self) -> None:
        """Do nothing."""
