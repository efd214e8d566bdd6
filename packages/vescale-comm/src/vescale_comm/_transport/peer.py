"""Collectives from sends and receives straight into the parts of a buffer, added in rank order.

On gloo these take a quarter to a half of the time of its own collectives, which go through temporaries.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._emulator.group import is_emulated
from .blame import Blame
from .call import Call, broadcast_of, flat_buffer, flat_equal_parts, reduction
from .interface import Work
from .progress import Progress
from .rooms import Rooms
from .running import Last, Message, Running, Steps, posted
from .sums import add_in_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PeerTransport", "add_in_order"]

SMALL = 1 << 18
"""Bytes that a rank may send and add more, to reduce in one round: whole buffers to everybody, no second wait."""
ROOM = 8 << 20
"""Bytes that may arrive at once to be added; larger reductions go in windows, two of them under way."""
BESIDE = 64 << 10
"""Bytes of a buffer above which messages are posted by a thread: waking it takes as long as copying this much."""
FIRST_TAG = 1 << 30
"""Above the tags of users; those of gloo's collectives are apart anyway."""


class PeerTransport:
    """All ranks of a group exchange parts with each other directly: one round, `size - 1` messages.

    A message carries no sizes, and the backend checks none. So the tag of a collective holds a hash of what was asked
    for: ranks that ask for different things do not get each other's numbers but a time-out.
    """

    name = "p2p"
    canonical = True

    def __init__(self, group: ProcessGroup) -> None:
        """Take the group.

        Args:
            group: of torch.distributed, with a backend whose sends have tags, such as gloo; this rank must be in it.
                Every rank makes its transports of a group in the same order.
        """
        self._group = group
        self.rank, self.size = group.rank(), group.size()
        instance = _instances.get(group, 0)
        _instances[group] = instance + 1
        self._first_tag = FIRST_TAG | (instance & 0x3F) << 24
        self._calls = 0
        self._rooms = Rooms()
        self._in_rounds: list[Running] = []
        """Collectives under way that send again when messages have arrived, in waits."""
        # Ranks of an emulation take turns by themselves; a thread of its own would not have one.
        emulated = is_emulated(group)
        self._progress = None if emulated else Progress()
        # Nothing refers back to the transport, so that its threads end when nobody has it any more.
        cut = None if emulated else partial(_cut, group, list(self._peers()), self._first_tag | 0xFFFFFF)
        self._blame = Blame(group, f"p2p/{instance}", cut)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum parts at their owners; see `Transport`."""
        call = reduction("reduce_scatter", buffer, divisor, accumulate)
        parts = flat_equal_parts(buffer, self.size)
        return self._start(call, self._reduce(parts, call, self._tag(call)), rounds=self._windows(parts, call) > 1)

    def all_gather(self, buffer: Tensor) -> Work:
        """Send the own part to everybody; see `Transport`."""
        call = Call("all_gather", buffer.numel(), buffer.dtype)
        parts = flat_equal_parts(buffer, self.size)
        return self._start(call, self._gather(parts, self._tag(call)))

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum parts at their owners, then gather them; see `Transport`."""
        call = reduction("all_reduce", buffer, divisor, accumulate)
        flat, tag = flat_buffer(buffer), self._tag(call)
        if call.nbytes * (self.size - 1) ** 2 <= SMALL * self.size:
            return self._start(call, self._reduce_whole(flat, call, tag))
        return self._start(call, self._reduce_and_gather(list(flat.tensor_split(self.size)), call, tag), rounds=True)

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Send from one rank to all; see `Transport`."""
        call, flat = broadcast_of(buffer, source, self.size)
        tag = self._tag(call)
        if self.size == 2 or call.nbytes * self.size <= SMALL:
            return self._start(call, self._send_whole(flat, source, tag))
        return self._start(call, self._spread(list(flat.tensor_split(self.size)), source, tag), rounds=True)

    def all_to_all(self, source: Tensor, goal: Tensor) -> Work:
        """Send part `i` of a flat buffer to rank `i`; part `i` of another one comes from rank `i`."""
        call = Call("all_to_all", source.numel(), source.dtype)
        parts, arriving = flat_equal_parts(source, self.size), flat_equal_parts(goal, self.size)
        arriving[self.rank].copy_(parts[self.rank])
        return self._start(call, self._swap(parts, arriving, self._tag(call)))

    def close(self) -> None:
        """Free the memory for arriving parts."""
        self._rooms.clear()
        if self._progress is not None:
            self._progress.close()

    def _start(self, call: Call, steps: Steps, rounds: bool = False) -> Work:
        if self._progress is not None and call.nbytes > BESIDE:
            run = Running(steps, partial(self._blame.explain, call, self._calls - 1), begin=False)
            self._progress.take(run, rounds)
            return run
        # What is sent in later rounds is sent in waits, so those must come in the same order on all ranks.
        self._in_rounds = [run for run in self._in_rounds if not run.finished]
        run = Running(steps, partial(self._blame.explain, call, self._calls - 1), tuple(self._in_rounds))
        if rounds:
            self._in_rounds.append(run)
        return run

    def _tag(self, call: Call) -> int:
        number = self._calls
        self._calls += 1
        return self._first_tag | (number & 0xFFF) << 12 | call.check

    def _reduce(self, parts: Sequence[Tensor], call: Call, tag: int) -> Steps:
        others = self.size - 1
        own = parts[self.rank]
        longest = max(part.numel() for part in parts)
        window = -(-longest // max(1, self._windows(parts, call)))
        under_way: list[tuple[int, list[Tensor], Tensor, list[Message]]] = []
        for start in range(0, longest, max(window, 1)):
            mine = own[start : start + window]
            numel = mine.numel()
            arriving, room = self._rooms.take(others * numel, call.dtype, own.device)
            terms = [arriving[i * numel : (i + 1) * numel] for i in range(others)]
            terms.insert(self.rank, mine)
            messages = self._exchange([part[start : start + window] for part in parts], terms, tag)
            under_way.append((start, terms, room, messages))
            if len(under_way) == 2:
                yield from self._add_window(under_way.pop(0), own, call)
        for entry in under_way:
            yield from self._add_window(entry, own, call)

    def _windows(self, parts: Sequence[Tensor], call: Call) -> int:
        # The longest part, not the own one, decides: ranks must agree.
        arriving = (self.size - 1) * max(part.numel() for part in parts) * call.dtype.itemsize
        return 1 if arriving <= ROOM else -(-arriving // (ROOM // 2))

    def _add_window(self, entry: tuple[int, list[Tensor], Tensor, list[Message]], own: Tensor, call: Call) -> Steps:
        start, terms, room, messages = entry
        yield messages
        add_in_order(terms, own[start : start + terms[0].numel()], call.divisor, call.accumulate)
        self._rooms.give_back(room)

    def _reduce_whole(self, flat: Tensor, call: Call, tag: int) -> Steps:
        arriving, room = self._rooms.take((self.size - 1) * flat.numel(), flat.dtype, flat.device)
        terms = list(arriving.view(self.size - 1, flat.numel()).unbind()) if self.size > 1 else []
        terms.insert(self.rank, flat)
        yield self._exchange([flat] * self.size, terms, tag)
        add_in_order(terms, flat, call.divisor, call.accumulate)
        self._rooms.give_back(room)

    def _reduce_and_gather(self, parts: Sequence[Tensor], call: Call, tag: int) -> Steps:
        yield from self._reduce(parts, call, tag)
        yield from self._gather(parts, tag)

    def _gather(self, parts: Sequence[Tensor], tag: int) -> Steps:
        yield Last(self._exchange([parts[self.rank]] * self.size, parts, tag))

    def _swap(self, parts: Sequence[Tensor], arriving: Sequence[Tensor], tag: int) -> Steps:
        yield self._exchange(parts, arriving, tag)

    def _send_whole(self, flat: Tensor, source: int, tag: int) -> Steps:
        if not flat.numel():
            return
        if self.rank == source:
            yield [self._send(flat, peer, tag) for peer in self._peers()]
        else:
            yield [self._receive(flat, source, tag)]

    def _spread(self, parts: Sequence[Tensor], source: int, tag: int) -> Steps:
        # A part to each rank, then everybody passes on: twice the bytes of the buffer per rank, not `size - 1` times.
        own = parts[self.rank]
        if self.rank == source:
            yield [self._send(parts[peer], peer, tag) for peer in self._peers()]
            yield Last(self._send(own, peer, tag) for peer in self._peers())
        else:
            yield [self._receive(own, source, tag)]
            messages = [self._receive(parts[peer], peer, tag) for peer in self._peers()]
            messages += [self._send(own, peer, tag) for peer in self._peers() if peer != source]
            yield Last(messages)

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> list[Message]:
        # Messages of one tag between two ranks come in the order in which they were sent.
        messages = []
        for step in range(1, self.size):
            source, goal = (self.rank - step) % self.size, (self.rank + step) % self.size
            if incoming[source].numel():
                messages.append(self._receive(incoming[source], source, tag))
            if outgoing[goal].numel():
                messages.append(self._send(outgoing[goal], goal, tag))
        return messages

    def _peers(self) -> Iterator[int]:
        return ((self.rank + step) % self.size for step in range(1, self.size))

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return posted(lambda: self._group.send([tensor], peer, tag), "sending to", peer)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Message:
        return posted(lambda: self._group.recv([tensor], peer, tag), "receiving from", peer)


def _cut(group: ProcessGroup, peers: Sequence[int], tag: int) -> None:
    """Close the connections of a group: ranks that wait for messages of this one get to know that none will come.

    A time-out of one message does that in gloo; here it is one that nobody sends.
    """
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in peers:
        with suppress(RuntimeError):
            group.recv([nothing], peer, tag).wait(timedelta(milliseconds=1))


_instances: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Transports made per group: their messages must not meet."""
