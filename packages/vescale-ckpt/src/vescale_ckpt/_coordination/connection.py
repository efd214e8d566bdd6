"""A store as one group of ranks sees it: keys of its own, a connection of its own, failures told as RanksError.

No call here waits for another rank, so no lock of the store is held while training needs it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import RanksError

__all__ = ["Connection", "Link", "link_to"]

T = TypeVar("T")


class Connection:
    """The calls that coordination makes, on keys that begin with a prefix."""

    def __init__(self, store: Any, prefix: str, *, keep: Any = None) -> None:
        """Take the store.

        Args:
            store: what `torch.distributed.Store` is, with connections of its own where it has any.
            prefix: of all keys.
            keep: what must live as long as this, such as the store that serves the others.
        """
        self._store, self._prefix, self._keep = store, prefix, keep
        self._process = os.getpid()

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._do(lambda: self._store.check([self._prefix + key for key in keys])))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        """Return values that are there."""
        if not keys:
            return []
        values = self._do(lambda: self._store.multi_get([self._prefix + key for key in keys]))
        return [bytes(value) for value in values]

    def put(self, key: str, value: bytes) -> None:
        """Set a value."""
        self._do(lambda: self._store.set(self._prefix + key, value))

    def put_first(self, key: str, value: str) -> str:
        """Set a value unless there is one, and return the one that is there then."""
        return bytes(self._do(lambda: self._store.compare_set(self._prefix + key, "", value))).decode()

    def count(self, key: str) -> int:
        """Count one more and return how many there are."""
        return int(self._do(lambda: self._store.add(self._prefix + key, 1)))

    def remove(self, keys: Sequence[str]) -> None:
        """Delete keys; those that are not there are fine."""
        for key in keys:
            self._do(lambda key=key: self._store.delete_key(self._prefix + key))  # type: ignore[misc]

    def _do(self, call: Callable[[], T]) -> T:
        if os.getpid() != self._process:
            raise RanksError(
                f"this is process {os.getpid()}, forked from process {self._process}, whose connection to the other "
                f"ranks it cannot use: save and load in the process that joined the process group."
            )
        try:
            return call()
        except (RuntimeError, OSError) as error:
            raise RanksError(
                f"the store of the process group does not answer, so the process that serves it (rank 0 or the "
                f"launcher) is gone, or the group was destroyed during a save or a load: {error}"
            ) from error


class Link:
    """What the saves and loads of one member over one store share: a connection and a count."""

    def __init__(self, store: Any) -> None:
        # A clone has its own socket: a long wait of training on the store does not keep a save waiting.
        try:
            clone = store.clone()
        except (AttributeError, RuntimeError):  # not a store of torch, or one that cannot be cloned
            clone = None
        self._clone = None if clone is store else clone
        self._lock = threading.Lock()
        self._number = 0
        self._process = os.getpid()

    def check_process(self) -> None:
        """Raise in a forked child."""
        if os.getpid() != self._process:
            raise RanksError(
                f"this process, {os.getpid()}, was forked from process {self._process}, which joined the process "
                f"group: it is not a rank. Save and load in process {self._process}."
            )

    def next_number(self) -> int:
        """Number the next session."""
        with self._lock:
            self._number += 1
            return self._number

    def connect(self, store: Any, prefix: str) -> Connection:
        """Return a connection that keeps the store alive."""
        return Connection(store if self._clone is None else self._clone, prefix, keep=store)


_links: weakref.WeakKeyDictionary[Any, dict[tuple[int, tuple[int, ...]], Link]] = weakref.WeakKeyDictionary()
_links_lock = threading.Lock()


def link_to(store: Any, rank: int, ranks: tuple[int, ...]) -> Link:
    """Return what the saves and loads of a member share, which lives as long as the store."""
    with _links_lock:
        links = _links.setdefault(store, {})
        link = links.get((rank, ranks))
        if link is None:
            link = links[rank, ranks] = Link(store)
        return link
