"""Ranks that talk over a torch store (TCPStore and its like): groups that begin sessions, one for each save or load.

All members begin the same sessions in the same order, so counting them gives each the same name on all members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import RanksError
from .connection import link_to
from .session import Session

__all__ = ["StoreMembers"]


class StoreMembers:
    """The members of a group that has a store.

    Example:
        >>> from torch.distributed import HashStore
        >>> members = StoreMembers(HashStore(), rank=0, ranks=(0,), timeout=5.0)
        >>> with members.session("save") as session:
        ...     session.agree("step", b"7", lambda answers: b"".join(answers))
        b'7'
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        gone: Callable[[], bool] | None = None,
    ) -> None:
        """Take the store.

        Args:
            store: a `torch.distributed.Store` that all members share; for a group of its own or with a prefix, so
                that groups of the same ranks do not mix.
            rank: number of this member.
            ranks: global rank of each member.
            timeout: seconds to wait for other members, in each call.
            gone: tells whether the group was destroyed.
        """
        self.rank, self.world, self.ranks, self.timeout = rank, len(ranks), tuple(ranks), timeout
        self._store, self._gone = store, gone
        self._link = link_to(store, rank, self.ranks)
        self._group = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]

    def session(self, kind: str) -> Session:
        """Begin to talk about one thing; all members call this in the same order.

        Raises:
            RanksError: the group was destroyed, this process was forked from a member, or the store is gone.
        """
        self._link.check_process()
        if self._gone is not None and self._gone():
            raise RanksError(
                f"{kind}: the process group of ranks {list(self.ranks[:16])} was destroyed. Save and load before "
                f"destroy_process_group()."
            )
        while True:
            number = self._link.next_number()
            connection = self._link.connect(self._store, f"vescale_ckpt/{self._group}/{number}/")
            session = Session(connection, self.rank, self.ranks, kind, number, self.timeout)
            try:
                missed = session.missed()
            except BaseException as error:
                session.fail(error)
                session.close()
                raise
            if not missed:
                return session
            session.close()
