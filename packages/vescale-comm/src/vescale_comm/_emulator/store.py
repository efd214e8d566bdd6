"""The key-value store of an emulated world: waiting for a key gives the turn to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch._C._distributed_c10d import Store

__all__ = ["TurnStore"]


class Wait(Protocol):
    """How a rank waits; see `Turns.wait`."""

    def __call__(self, ready: Callable[[], bool], what: Callable[[], str], expires: bool = False) -> bool: ...


Poll = Callable[[Callable[[], str]], None]


class TurnStore(Store):
    """A store in memory, shared by the ranks. Time-outs are not needed: what cannot come is found as a deadlock."""

    def __init__(self, wait: Wait, poll: Poll) -> None:
        """Take how to wait.

        Args:
            wait: called with a condition and a text; returns when the condition holds, or false if it expired.
            poll: called with a text where a rank asks without waiting.
        """
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._wait, self._poll = wait, poll

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value."""
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        """Return a value as soon as there is one."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value."""
        self._values[key] = self._values.get(key, b"") + (value.encode() if isinstance(value, str) else bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Store a value if the present one is as expected; return the one that is there afterwards."""
        expected = expected_value.encode() if isinstance(expected_value, str) else bytes(expected_value)
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.set(key, desired_value)
        return self._values.get(key, expected)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys have values; if not, let others run."""
        if not self._has(keys):
            self._poll(lambda: f"the keys {list(keys)} of the store")
        return self._has(keys)

    def delete_key(self, key: str) -> bool:
        """Remove a value and tell whether there was one."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values as soon as all are there."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    # What torch calls from C++.
    deleteKey = delete_key
    getNumKeys = num_keys

    def has_extended_api(self) -> bool:
        """Tell that append and the operations on several keys are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Take no notice: a wait ends, or is found to be a deadlock."""

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values.

        Args:
            keys: to wait for.
            timeout: if there is one, the wait ends where no other rank can run.

        Raises:
            DistStoreError: the wait ended so.
        """
        what = f"the keys {list(keys)} of the store"
        if not self._wait(lambda: self._has(keys), lambda: what, timeout is not None):
            raise dist.DistStoreError(f"wait timeout: no rank is left that could set {what}.")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)
