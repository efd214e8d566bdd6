"""What can go wrong at one operation of a storage, and plans that say at which."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass


class Killed(BaseException):
    """The process is dead, as far as a FaultyStorage is concerned. No Exception: nobody may handle it and go on."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call that a FaultyStorage got."""

    number: int
    """Counted from 0, over all methods."""
    kind: str
    """Method: "create", "put", "get", "open", "list", "remove", "remove_folder", "sync", or of a file "write", \
"close", "abort", "read"."""
    path: str
    """As given; for a method of a file, the path of that file."""
    nbytes: int
    """Bytes to be written or read; 0 for other methods."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The operation raises StorageError; before that, a part of a write gets through."""

    code: int = errno.EIO
    """errno of the error, such as ENOSPC."""
    part: float = 0.0
    """Share of the bytes, from the front, that a "write" has written when it fails."""


@dataclass(frozen=True, slots=True)
class Tear:
    """A "write" writes a part of its bytes, and reports success: a device that lies."""

    part: float = 0.5
    """Share of the bytes, from the front, that is written; the rest is zeros."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The process dies in the operation: Killed is raised, by this call and by all later ones."""

    part: float = 0.0
    """Share of the operation that is done before: 0 nothing, 1 all. A "put" is done at 1 only, and leaves an
    unfinished file behind from 0.5 on; "remove_folder" removes that share of the files."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The operation begins when something has happened."""

    wait: Callable[[], object]
    """Called before the operation, without locks: such as the `wait` of an Event."""


Fault = Fail | Tear | Kill | Slow

Plan = Callable[[Operation], Fault | None]
"""Asked before each operation, in order; it must not call the storage."""


def at(faults: Mapping[int, Fault]) -> Plan:
    """Make a plan: faults by the number of the operation.

    Example:
        >>> plan = at({3: Kill()})
        >>> plan(Operation(3, "put", "COMMIT", 80))
        Kill(part=0.0)
    """
    return lambda operation: faults.get(operation.number)


def matching(fault: Fault, *, kind: str | None = None, name: str | None = None, times: int = 1) -> Plan:
    """Make a plan: a fault at the first operations of a kind, or on files of a name.

    Args:
        fault: what happens.
        kind: of the operation; None for any.
        name: last name of the path; None for any.
        times: at how many operations.

    Example:
        >>> plan = matching(Fail(28), kind="write")
        >>> [plan(Operation(i, kind, "a/b", 1)) for i, kind in enumerate(["create", "write", "write"])]
        [None, Fail(code=28, part=0.0), None]
    """
    left = times

    def plan(operation: Operation) -> Fault | None:
        nonlocal left
        if left and kind in (None, operation.kind) and name in (None, os.path.basename(operation.path)):
            left -= 1
            return fault
        return None

    return plan
