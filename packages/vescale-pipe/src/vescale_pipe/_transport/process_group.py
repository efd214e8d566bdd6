"""Messages over a process group whose point-to-point calls have tags, such as gloo.

What gloo does not do is done here. It sends no sizes: a message longer than its buffer ends the connection of the
receiver without a word, a shorter one leaves old numbers behind. So both ends remember the layout of the last
message of each tag. The first bytes of a message say whether it is of that layout; if not, a header follows (short,
so that it fits into what was posted), then the tensors. In the steady state a message is one call, and two or more
where tensors are large.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from ..errors import RankError, TransportError
from .failure import FailureBoard, rank_error
from .links import Links, connect
from .message import ALIGN, Layout, describe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from .interface import Label

__all__ = ["GroupTransport", "open_transport"]

# A message of an unknown layout: its first bytes say how long the header is, which starts right after them.
WORD = ALIGN
FIRST = 1024
# Of one tag here, three of the process group: the first part, the rest of a header, tensors one by one.
PARTS = 3
# Seconds that ranks have to meet, which may be more than a message may take: some load models meanwhile.
MEET = 300.0
# In the errors of a group that cannot send or receive at all, as when the other end is gone already.
GLOO = "gloo/"


class _Calls(Protocol):
    """What is used of a process group."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Work: ...

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Work: ...


class _Linked:
    """A process group whose first parts of messages go over links, to ranks that have one."""

    def __init__(self, group: _Calls, links: Links) -> None:
        self._group = group
        self._links = links
        self.rank, self.size = group.rank, group.size

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> Any:
        link = self._links.get(dst) if tag % PARTS == 0 else None
        return self._group.send(tensors, dst, tag) if link is None else link.send(tag, tensors[0])

    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> Any:
        link = self._links.get(src) if tag % PARTS == 0 else None
        return self._group.recv(tensors, src, tag) if link is None else link.post(tag, tensors[0])


class _Slot:
    """What one end remembers of a tag."""

    __slots__ = ("epoch", "layout", "room", "word")

    def __init__(self) -> None:
        self.epoch = 0
        self.layout: Layout | None = None
        self.room = FIRST
        """Bytes of the first part of a message that the receiver has made ready."""
        self.word = torch.empty(0, dtype=torch.uint8)
        """First bytes of a message of this layout."""

    def change(self, layout: Layout) -> None:
        """Go on with another layout."""
        self.epoch += 1
        self.layout = layout
        self.room = layout.nbytes if layout.packed else WORD
        self.word = _word(self.epoch, 0)


def _word(epoch: int, header: int) -> Tensor:
    word = torch.zeros(WORD // 8, dtype=torch.int64)
    word[0] = epoch
    word[1] = header
    return word.view(torch.uint8)


class _Sent:
    """Calls under way, and the memory they read."""

    __slots__ = ("_buffers", "_owner", "_peer", "_tag", "works")

    def __init__(self, owner: GroupTransport, peer: int, tag: int, buffers: list[Tensor], works: list[Work]) -> None:
        self._owner = owner
        self._peer = peer
        self._tag = tag
        self._buffers = buffers
        self.works = works

    def wait(self) -> None:
        work: Work | None = None
        try:
            for work in self.works:
                work.wait(self._owner.limit)
        except RuntimeError as error:
            work = None  # tracebacks keep this frame, and what waits keeps the connection
            self._owner.fail(error, f"{self._owner.label(self._tag)} to rank {self._peer}", self._peer)
        self._owner.pending.discard(self)
        self.works = []
        self._buffers = []


class _Expected:
    """A message whose first part was asked for, and its tensors too where they are known to be apart."""

    __slots__ = ("_buffers", "_first", "_owner", "_peer", "_tag", "works")

    def __init__(
        self, owner: GroupTransport, peer: int, tag: int, first: Tensor, buffers: list[Tensor], works: list[Work]
    ) -> None:
        self._owner = owner
        self._peer = peer
        self._tag = tag
        self._first = first
        self._buffers = buffers
        self.works = works

    def ready(self) -> bool:
        return True  # gloo tells nothing before it is waited for

    def wait(self) -> list[Any]:
        owner = self._owner
        work: Work | None = None
        try:
            for work in self.works:
                work.wait(owner.limit)
            owner.pending.discard(self)
            self.works = []
            return owner.finish(self._peer, self._tag, self._first, self._buffers)
        except RuntimeError as error:
            work = None  # as above
            if isinstance(error, TransportError | RankError):
                raise
            owner.fail(error, f"{owner.label(self._tag)} from rank {self._peer}", self._peer)


class GroupTransport:
    """One rank's end; see `Transport`.

    Args:
        group: of the ranks of the pipeline, in their order, for point-to-point calls on the CPU; it belongs to this
            transport, which ends it.
        board: where the first failure stands.
        device: that received tensors are put on.
        timeout: seconds that a wait may take.
        links: to ranks on the same host, for short messages.
    """

    def __init__(
        self, group: ProcessGroup, board: FailureBoard, device: torch.device, timeout: float, links: Links
    ) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.label: Label = str
        self.pending: set[_Sent | _Expected] = set()
        """Calls under way: the group ends only when they are dropped."""
        self._group: _Calls | None = _Linked(group, links) if len(links) else group
        self._links = links
        self._board = board
        self._device = device
        self._staged = device.type != "cpu"
        self.limit = timedelta(seconds=timeout)
        """How long a wait may take."""
        self._sent: dict[tuple[int, int], _Slot] = {}
        self._seen: dict[tuple[int, int], _Slot] = {}

    def send(self, dst: int, tag: int, values: Sequence[Any]) -> _Sent:
        """Start to send; see `Transport.send`."""
        group = self._open()
        signature, tensors = describe(values)
        slot = self._sent.get((dst, tag))
        if slot is None:
            slot = self._sent[dst, tag] = _Slot()
        if self._staged:
            tensors = [one.detach().cpu() for one in tensors]
        layout = slot.layout
        base = tag * PARTS
        try:
            if layout is None or layout.signature != signature:
                buffers, works = self._send_changed(group, dst, base, slot, Layout(signature), tensors)
            elif layout.packed:
                buffers = [layout.pack(slot.word, tensors)]
                works = [group.send(buffers, dst, base)]
            else:
                buffers = [slot.word, *layout.flat(tensors)]
                works = [group.send(buffers[:1], dst, base)]
                works += [group.send([one], dst, base + 2) for one in buffers[1:] if one.numel()]
        except RuntimeError as error:
            if GLOO not in str(error):
                raise
            self.fail(error, f"{self.label(tag)} to rank {dst}", dst)
        sent = _Sent(self, dst, tag, buffers, works)
        self.pending.add(sent)
        return sent

    def _send_changed(
        self, group: _Calls, dst: int, base: int, slot: _Slot, layout: Layout, tensors: list[Tensor]
    ) -> tuple[list[Tensor], list[Work]]:
        """Send a message of another layout than the last one of this tag."""
        header = torch.frombuffer(bytearray(layout.header()), dtype=torch.uint8)
        fits = slot.room - WORD
        first = torch.cat((_word(slot.epoch + 1, header.numel()), header[:fits]))
        buffers = [first]
        works = [group.send([first], dst, base)]
        old = slot.layout
        if old is not None and not old.packed:
            # The receiver may have asked for tensors of the old layout: one byte each makes it go on.
            for part in old.parts:
                if part.numel == 0:
                    continue
                buffers.append(torch.zeros(1, dtype=torch.uint8))
                works.append(group.send(buffers[-1:], dst, base + 2))
        if header.numel() > fits:
            buffers.append(header[fits:].contiguous())
            works.append(group.send(buffers[-1:], dst, base + 1))
        slot.change(layout)
        tail = [layout.pack(slot.word, tensors)] if layout.packed else layout.flat(tensors)
        for one in tail:
            if one.numel():
                buffers.append(one)
                works.append(group.send([one], dst, base + 2))
        return buffers, works

    def recv(self, src: int, tag: int) -> _Expected:
        """Start to receive; see `Transport.recv`."""
        group = self._open()
        slot = self._seen.get((src, tag))
        if slot is None:
            slot = self._seen[src, tag] = _Slot()
        base = tag * PARTS
        first = torch.empty(slot.room, dtype=torch.uint8)
        layout = slot.layout
        buffers: list[Tensor] = []
        try:
            works = [group.recv([first], src, base)]
            if layout is not None and not layout.packed:
                buffers = layout.empty(first.device)
                works += [group.recv([one], src, base + 2) for one in buffers if one.numel()]
        except RuntimeError as error:
            if GLOO not in str(error):
                raise
            self.fail(error, f"{self.label(tag)} from rank {src}", src)
        expected = _Expected(self, src, tag, first, buffers, works)
        self.pending.add(expected)
        return expected

    def finish(self, src: int, tag: int, first: Tensor, buffers: list[Tensor]) -> list[Any]:
        """Return the values of a message whose first parts have come.

        Args:
            src: rank that sent it.
            tag: of the message.
            first: first part.
            buffers: tensors that came apart.
        """
        slot = self._seen[src, tag]
        epoch = int(first[:8].view(torch.int64).item())
        layout = slot.layout
        if layout is None or epoch != slot.epoch:
            layout, first, buffers = self._finish_changed(src, tag, slot, first, epoch)
        tensors = layout.unpack(first) if layout.packed else layout.shaped(buffers)
        if self._staged:
            tensors = [one.detach().to(self._device).requires_grad_(one.requires_grad) for one in tensors]
        return layout.values(tensors)

    def _finish_changed(
        self, src: int, tag: int, slot: _Slot, first: Tensor, epoch: int
    ) -> tuple[Layout, Tensor, list[Tensor]]:
        """Receive the rest of a message of another layout than the last one of this tag."""
        group = self._open()
        base = tag * PARTS
        length = int(first[8:16].view(torch.int64).item())
        if epoch != slot.epoch + 1 or length <= 0:
            raise TransportError(
                f"rank {self.rank}: {self.label(tag)} from rank {src} is message {epoch} of its kind where "
                f"{slot.epoch} or {slot.epoch + 1} was expected; do all ranks run the same schedule and model?"
            )
        header = first[WORD : WORD + length]
        if header.numel() < length:
            rest = torch.empty(length - header.numel(), dtype=torch.uint8)
            group.recv([rest], src, base + 1).wait(self.limit)
            header = torch.cat((header, rest))
        layout = Layout.of_header(bytes(header.tolist()))
        slot.change(layout)
        if layout.packed:
            first = torch.empty(layout.nbytes, dtype=torch.uint8)
            group.recv([first], src, base + 2).wait(self.limit)
            return layout, first, []
        buffers = layout.empty(first.device)
        for work in [group.recv([one], src, base + 2) for one in buffers if one.numel()]:
            work.wait(self.limit)
        return layout, first, buffers

    def fail(self, error: RuntimeError, what: str, peer: int) -> NoReturn:
        """Raise what `failure` says; where another rank failed, what the process group said here is of no use."""
        found = self.failure(error, what, peer)
        raise found from None if isinstance(found, RankError) else error

    def failure(self, error: RuntimeError, what: str, peer: int) -> Exception:
        """Return what to raise where a call failed: the first failure of any rank if it is known.

        Args:
            error: of the process group.
            what: the message and its other end.
            peer: the other end.
        """
        _let_go(error.__traceback__)
        known = self._board.first()
        if known is not None:
            rank, text = known
            return rank_error(rank, text, self.rank, what)
        if "Timed out" in str(error):
            return TransportError(
                f"rank {self.rank}: {what} did not come through within {self.limit.total_seconds():g} s (timeout=); "
                f"rank {peer} is stuck, or much slower than that. {error}"
            )
        store = ""
        if self._board.lost:
            store = (
                " The store where the ranks met is gone too: unless a launcher keeps it, rank 0 is gone, and may have "
                "been the first."
            )
        return TransportError(
            f"rank {self.rank}: {what} was lost, for rank {peer} is gone: it was killed, or ended early. {error}{store}"
        )

    def abort(self, error: str) -> None:
        """End all channels of this rank at once; see `Transport.abort`."""
        if self._group is None:
            return
        self._board.publish(error)
        self.close()
        _let_go(sys.exc_info()[2])
        self._board.await_readers(2.0)

    def close(self) -> None:
        """End the group, by dropping all that refers to it."""
        self._group = None
        self._links.close()
        for one in self.pending:
            one.works = []
        self.pending.clear()

    def _open(self) -> _Calls:
        group = self._group
        if group is None:
            raise TransportError(
                f"rank {self.rank}: the channels are closed, for a step failed before; make a new engine on all ranks."
            )
        return group


def _let_go(trace: TracebackType | None) -> None:
    """Clear the frames of this file in a traceback, for they refer to the group, which must end now."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            with suppress(RuntimeError):  # one that still runs
                trace.tb_frame.clear()
        trace = trace.tb_next


def open_transport(group: ProcessGroup | None, device: torch.device, timeout: float) -> GroupTransport:
    """Make the channels of a pipeline; all of its ranks call it at the same place.

    Args:
        group: ranks of the pipeline, in their order; None for all ranks.
        device: that received tensors are put on.
        timeout: seconds that a wait may take.

    Raises:
        TransportError: this rank is not in the group.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    if dist.get_rank() not in ranks:
        raise TransportError(f"rank {dist.get_rank()} is not among the ranks {ranks} of the pipeline.")
    store = _store()
    # A group of its own: tags cannot meet those of others, and it can be ended without harm to the user's. Its name
    # must be new each time, for addresses of an ended group stay in the store.
    key = ",".join(map(str, ranks))
    _opened[key] = _opened.get(key, 0) + 1
    name = f"vescale_pipe/{key}/{_opened[key]}"
    rank = ranks.index(dist.get_rank())
    own: Any = ProcessGroupGloo(PrefixStore(name, store), rank, len(ranks), timedelta(seconds=max(timeout, MEET)))
    # Without a launcher the first of all ranks keeps the store, unless it is in a file.
    keeps = dist.get_rank() == 0 and not isinstance(_innermost(store), FileStore)
    board = FailureBoard(PrefixStore(f"{name}/failed", store), rank, len(ranks), keeps)
    links = connect(PrefixStore(name, store), rank, len(ranks), timedelta(seconds=timeout))
    return GroupTransport(own, board, device, timeout, links)


_opened: dict[str, int] = {}
"""Pipelines that this process has opened, per list of ranks."""


def _store() -> Store:
    """Return the store that the processes met at; torch has no public name for it."""
    store: Store = distributed_c10d._get_default_store()
    return store


def _innermost(store: Store) -> Store:
    """Return the store inside of those that add prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
