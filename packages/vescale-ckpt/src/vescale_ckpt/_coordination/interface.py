"""What coordination offers, whoever the ranks are."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

__all__ = ["Coordinator", "Members"]


class Coordinator(Protocol):
    """The ranks of one save or one load. All of them make the same calls in the same order.

    One thread makes the calls; `fail` may come from any. As a context manager it tells the others of an error that
    ends the block, and closes.
    """

    @property
    def rank(self) -> int:
        """Number of this member, from 0."""

    @property
    def world(self) -> int:
        """Number of members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global rank of each member."""

    def __enter__(self) -> Coordinator: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...

    def gather(self, name: str, data: bytes) -> list[bytes] | None:
        """Return what every member gave, on member 0; None elsewhere, once member 0 has it all.

        Raises:
            RanksError: a member failed or did not answer in time; the message names it.
        """

    def broadcast(self, name: str, data: bytes | None) -> bytes:
        """Return what member 0 gave. Member 0 does not wait for the others.

        Raises:
            RanksError: a member failed, or member 0 did not answer in time.
        """

    def agree(self, name: str, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return what `decide` makes of what every member gave; it runs on member 0.

        Raises:
            RanksError: a member failed or did not answer in time.
            Exception: on member 0 what `decide` raised, which the others see as RanksError.
        """

    def fail(self, error: BaseException) -> None:
        """Let the calls of all members raise, those that wait and later ones. The first failure is the one told."""

    def close(self) -> None:
        """Say that this member makes no more calls. Never raises; member 0 waits a little for the others."""


class Members(Protocol):
    """The ranks that save and load together."""

    @property
    def rank(self) -> int:
        """Number of this member, from 0."""

    @property
    def world(self) -> int:
        """Number of members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global rank of each member."""

    def session(self, kind: str) -> Coordinator:
        """Begin to talk about one thing. All members call this in the same order.

        Args:
            kind: "save of step 7", "load", ...: what is the same on all members. Members that are at different kinds
                get an error instead of nonsense, and a member that missed a failed session of another kind passes
                over it.
        """
