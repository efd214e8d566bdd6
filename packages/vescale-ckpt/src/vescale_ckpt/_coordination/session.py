"""One save or one load over a store: members post under keys of their own, member 0 answers under one key per call.

Nobody waits inside the store: a call looks for what it needs and for the failure of any member, and pauses. Each key is
deleted once all who need it have read it, and the last member to close deletes the rest.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from ..errors import RanksError
from .connection import Connection
from .frames import Call, Frame, frames, part_keys

__all__ = ["Session"]

BATCH = 256
"""Members whose messages are asked for at a time."""
FIRST_PAUSE, LAST_PAUSE = 0.0002, 0.03
"""Seconds between two looks at the store; they grow. Large groups pause longer, so that the store keeps up."""
PAUSE_PER_MEMBER = 1e-4
"""Makes 20,000 looks per second of all members together, about an eighth of a core of the process with the store."""
LINGER = 5.0
"""Most seconds that member 0 waits in `close`: its process may serve the store, and end right after."""
MOST_TEXT = 4000
"""Characters of an error that others are told."""
FAILURE, CLOSED, END = "failed", "closed", "end"


class Session:
    """One save or one load of `StoreMembers`."""

    def __init__(
        self, connection: Connection, rank: int, ranks: tuple[int, ...], kind: str, number: int, timeout: float
    ) -> None:
        self.rank, self.world, self.ranks = rank, len(ranks), ranks
        self._connection, self._kind, self._number, self._timeout = connection, kind, number, timeout
        self._calls = 0
        self._told: list[str] = []  # keys of member 0 that may still be there
        self._gathers: list[int] = []  # calls whose posts may still be there
        self._failure: str | None = None
        self._closed = False
        self._lock = threading.RLock()  # for `fail` from other threads

    def __repr__(self) -> str:
        return f"<Session {self._kind!r}, number {self._number}, member {self.rank} of {self.world}>"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def gather(self, name: str, data: bytes) -> list[bytes] | None:
        """Return what every member gave, on member 0; None elsewhere, once member 0 has it all."""
        with self._calling("gather", name) as (call, number):
            if self.rank:
                self._post(call, number, data)
                self._receive(call, number)
                return None
            gathered = self._collect(call, number, data)
            self._answer(call, number, b"")
            return gathered

    def broadcast(self, name: str, data: bytes | None) -> bytes:
        """Return what member 0 gave."""
        with self._calling("broadcast", name) as (call, number):
            if self.rank:
                return self._receive(call, number)
            if data is None:
                raise ValueError(f"{name}: member 0 has to give data.")
            self._answer(call, number, data)
            return data

    def agree(self, name: str, data: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Return what `decide`, which runs on member 0, makes of what every member gave."""
        with self._calling("agree", name) as (call, number):
            if self.rank:
                self._post(call, number, data)
                return self._receive(call, number)
            decision = decide(self._collect(call, number, data))
            self._answer(call, number, decision)
            return decision

    def fail(self, error: BaseException) -> None:
        """Let the calls of all members raise, those that wait and later ones."""
        with self._lock:
            if self._closed or self._failure is not None:
                return
            text = str(error) if isinstance(error, RanksError) else f"{type(error).__name__}: {error}"
            self._failure = f"rank {self.ranks[self.rank]} failed: {text[:MOST_TEXT]}"
            if self.world == 1:
                return
            # Where the store is gone nobody can be told; the caller raises its own error.
            with contextlib.suppress(RanksError):
                told = self._connection.put_first(FAILURE, json.dumps([self._kind, self._failure]))
                self._failure = str(json.loads(told)[1])

    def missed(self) -> bool:
        """Return whether this session failed before this member came to it, and was of another kind."""
        if self.world == 1 or not self._connection.has([FAILURE]):
            return False
        return bool(json.loads(self._connection.get([FAILURE])[0])[0] != self._kind)

    def close(self) -> None:
        """Say that this member makes no more calls."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self.world == 1:
            return
        # The talk is over and its result stands, so a store that went away with another rank is no error any more.
        with contextlib.suppress(RanksError):
            if not self.rank:
                # The others may have posted for the call that failed here, and for the next one.
                calls = {*self._gathers, max(self._calls - 1, 0), self._calls}
                end = {"told": self._told, "calls": sorted(calls)}
                self._connection.put(END, json.dumps(end).encode())
            if self._connection.count(CLOSED) == self.world:
                self._delete_all()
            elif not self.rank:
                self._linger()

    @contextlib.contextmanager
    def _calling(self, verb: str, name: str) -> Iterator[tuple[Call, int]]:
        """Number a call, and let the others know of what ends it."""
        call = Call(self._kind, self._number, verb, name)
        if self._closed:
            raise RanksError(f"{call}: this session was closed, so nothing can be told in it.")
        number, self._calls = self._calls, self._calls + 1
        try:
            self._raise_failure()
            yield call, number
        except BaseException as error:
            self.fail(error)
            raise

    def _post(self, call: Call, number: int, data: bytes) -> None:
        if number not in self._gathers:
            self._gathers.append(number)
        self._write(_post_key(number, self.rank), call, data)

    def _collect(self, call: Call, number: int, data: bytes) -> list[bytes]:
        """Return what all members posted, on member 0."""
        self._gathers.append(number)
        if self.world == 1:
            return [data]
        # Its own post has no data; it only tells those who wait that member 0 came to this call.
        self._write(_post_key(number, 0), call, b"")
        gathered = [data]
        deadline = time.monotonic() + self._timeout
        for first in range(1, self.world, BATCH):
            members = range(first, min(self.world, first + BATCH))
            keys = [_post_key(number, member) for member in members]
            self._wait(keys, call, number, deadline)
            for member, key, value in zip(members, keys, self._connection.get(keys), strict=True):
                gathered.append(self._read(key, value, call, member)[0])
        # All are here, so all have read the answers to earlier calls and deleted what they posted for them.
        self._connection.remove(self._told)
        self._told = [_post_key(number, 0)]
        self._gathers = [number]
        return gathered

    def _answer(self, call: Call, number: int, data: bytes) -> None:
        if self.world > 1:
            key = _answer_key(number)
            # Before it is written: whatever happens then, it is deleted in the end.
            self._told += [key, *part_keys(key, frames(call, data)[0].parts)]
            self._write(key, call, data)

    def _receive(self, call: Call, number: int) -> bytes:
        """Return the answer of member 0."""
        key = _answer_key(number)
        # Member 0 is the one that should find out who is missing; others do where it is missing itself.
        self._wait([key], call, number, time.monotonic() + 1.05 * self._timeout)
        data, _ = self._read(key, self._connection.get([key])[0], call, 0)
        if number in self._gathers:
            self._connection.remove(self._posted(number, self.rank))
            self._gathers.remove(number)
        return data

    def _wait(self, keys: Sequence[str], call: Call, number: int, deadline: float) -> None:
        """Return when all keys are there."""
        pause, last = FIRST_PAUSE, max(LAST_PAUSE, PAUSE_PER_MEMBER * self.world)
        while True:
            self._raise_failure()
            if self._connection.has(keys):
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._late(call, number)
            time.sleep(min(pause, left))
            pause = min(last, 1.5 * pause)

    def _late(self, call: Call, number: int) -> RanksError:
        """Return the error of a wait that took too long, which names the members that are missing."""
        absent = [0]
        if call.verb != "broadcast":
            absent = []
            for first in range(0, self.world, BATCH):
                keys = {m: _post_key(number, m) for m in range(first, min(self.world, first + BATCH))}
                if not self._connection.has(list(keys.values())):
                    absent += [member for member, key in keys.items() if not self._connection.has([key])]
        who = f"{_listed([self.ranks[member] for member in absent])} to come to it"
        if not absent:
            who = f"rank {self.ranks[0]}, to which all ranks came, to answer"
        return RanksError(
            f"after {self._timeout:g} s rank {self.ranks[self.rank]} still waits at {call} for {who}. It died, or is "
            f"slow and needs a longer timeout, or does not make the same calls: all ranks have to save and load in "
            f"the same order."
        )

    def _raise_failure(self) -> None:
        if self._failure is None and self.world > 1 and self._connection.has([FAILURE]):
            failure = str(json.loads(self._connection.get([FAILURE])[0])[1])
            with self._lock:
                self._failure = failure
        if self._failure is not None:
            raise RanksError(self._failure)

    def _write(self, key: str, call: Call, data: bytes) -> None:
        first, rest = frames(call, data)
        for part, value in zip(part_keys(key, first.parts), rest, strict=True):
            self._connection.put(part, value)
        self._connection.put(key, first.to_bytes())  # last: who sees it finds the others

    def _read(self, key: str, value: bytes, call: Call, member: int) -> tuple[bytes, int]:
        """Return a message and in how many values it lies; its first value is given."""
        frame = Frame.from_bytes(value)
        if frame.call != call:
            raise RanksError(
                f"rank {self.ranks[member]} is at {frame.call}, where rank {self.ranks[self.rank]} is at {call}: all "
                f"ranks have to save and load in the same order."
            )
        rest = [part for name in part_keys(key, frame.parts) for part in self._connection.get([name])]
        return b"".join([frame.data, *rest]), frame.parts

    def _posted(self, number: int, member: int) -> list[str]:
        """Return the keys that a member wrote for a call, which it finished."""
        key = _post_key(number, member)
        keys = [key]
        while self._connection.has([f"{key}.{len(keys)}"]):
            keys.append(f"{key}.{len(keys)}")
        return keys

    def _delete_all(self) -> None:
        """Delete what is left; this member is the last, so nobody looks at it any more."""
        end = json.loads(self._connection.get([END])[0])
        self._connection.remove(end["told"])
        if self._connection.has([FAILURE]):  # else each member deleted what it posted
            for number in end["calls"]:
                for member in range(self.world):
                    self._connection.remove(self._posted(number, member))
            self._connection.remove([FAILURE])
        self._connection.remove([END, CLOSED])

    def _linger(self) -> None:
        """Wait until the last member has closed, for a while."""
        deadline = time.monotonic() + min(LINGER, self._timeout)
        pause = FIRST_PAUSE
        while self._connection.has([CLOSED]) and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(LAST_PAUSE, 1.5 * pause)


def _post_key(number: int, member: int) -> str:
    return f"{number}/{member}"


def _answer_key(number: int) -> str:
    return f"{number}/answer"


def _listed(ranks: list[int]) -> str:
    some = ", ".join(map(str, ranks[:16]))
    return f"rank{'s' * (len(ranks) > 1)} {some}" + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
