"""Record the collectives of one rank, of a real run or of an emulated one, so that two runs can be compared.

In an emulated world the emulated group reports them; on real processes a dispatch mode of torch sees them (`real`).
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from .._objects import gather_objects
from .world import PLACE

__all__ = ["Event", "Recording", "begin", "end", "pushed", "record"]


@dataclass(frozen=True, slots=True)
class Event:
    """A collective that one rank took part in, or a tensor that the program noted."""

    op: str
    """Such as "all_reduce", or "note"."""
    detail: str
    """Reduction, where it is known, or the name under which a tensor was noted."""
    group: tuple[int, ...]
    """Global ranks of the group; empty for a note."""
    sequence: int
    """How many such calls on a group of these ranks were recorded before on this rank; messages count by peer."""
    peer: int
    """Global rank of the other end of a message; -1 if there is none or it may be any."""
    before: tuple[str, ...]
    """Hashes of what went in."""
    after: tuple[str, ...]
    """Hashes of what came out; empty for messages of a real run, which are not waited for."""
    shapes: tuple[str, ...]
    """Dtypes and shapes of what went in, or of what came out where nothing went in."""
    inputs: tuple[Tensor, ...] | None = None
    """What went in, where it is kept."""
    outputs: tuple[Tensor, ...] | None = None
    """What came out, where it is kept."""

    def describe(self) -> str:
        """Return the call in words."""
        if self.op == "note":
            return f"{self.detail!r} ({', '.join(self.shapes)})"
        ranks = ", ".join(map(str, self.group))
        detail = f"({self.detail})" if self.detail else ""
        peer = f" with rank {self.peer}" if self.peer >= 0 else ""
        return f"{self.op}{detail} {self.sequence}{peer} of ranks {ranks} ({', '.join(self.shapes)})"


@dataclass(slots=True)
class Recording:
    """What one rank did; can be pickled and sent, once recording is over."""

    rank: int
    """Global rank."""
    keep: bool = False
    """Whether tensors are kept, not only their hashes."""
    events: list[Event] = field(default_factory=list)
    """In the order in which the rank started them."""
    counts: dict[tuple[Any, ...], int] = field(default_factory=dict)
    """How many calls there were, by group, and by peer for messages."""

    def note(self, name: str, tensor: Tensor) -> None:
        """Note a tensor, such as a loss or an activation.

        Args:
            name: what `compare` calls it.
            tensor: of any shape; its local part if it is a DTensor.
        """
        to_local = getattr(tensor, "to_local", None)
        local = to_local() if callable(to_local) else tensor
        kept = (local.detach().clone(),) if self.keep else None
        self.events.append(Event("note", name, (), -1, -1, (), _hashes([local]), _shapes([local]), None, kept))

    def note_module(self, module: nn.Module, name: str = "") -> None:
        """Note all parameters of a module, and their gradients where there are any.

        Args:
            module: whose parameters.
            name: put before their names, such as the number of the step.
        """
        before = f"{name} " if name else ""
        for key, parameter in module.named_parameters():
            self.note(f"{before}parameter {key}", parameter)
            if parameter.grad is not None:
                self.note(f"{before}gradient {key}", parameter.grad)

    def gather(self, group: dist.ProcessGroup | None = None) -> list[Recording]:
        """Return the recordings of all ranks, on each of them; a collective, to be called when recording is over.

        Args:
            group: whose ranks; None: the default group.
        """
        return gather_objects(self, group)

    def begin(
        self, op: str, detail: str, group: Sequence[int], inputs: Sequence[Tensor], peer: int = -1, places: Any = None
    ) -> int:
        """Add an event that has no results yet, and return its place.

        Args:
            op: name of the call.
            detail: reduction.
            group: global ranks of the group.
            inputs: what goes in.
            peer: global rank of the other end of a message.
            places: where results will be, if nothing goes in and they are not told later.
        """
        ranks = tuple(group)
        key = (ranks, op, peer) if op in ("send", "recv") else (ranks,)
        sequence = self.counts.get(key, 0)
        self.counts[key] = sequence + 1
        kept = tuple(tensor.detach().clone() for tensor in inputs) if self.keep else None
        self.events.append(
            Event(op, detail, ranks, sequence, peer, _hashes(inputs), (), _shapes(places or inputs), kept, None)
        )
        return len(self.events) - 1

    def end(self, index: int, outputs: Sequence[Tensor]) -> None:
        """Add the results to the event at a place."""
        event = self.events[index]
        kept = tuple(tensor.detach().clone() for tensor in outputs) if self.keep else None
        shapes = event.shapes or _shapes(outputs)
        self.events[index] = replace(event, after=_hashes(outputs), shapes=shapes, outputs=kept)


class _Active(threading.local):
    """Recordings under way in this thread."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []


_active = _Active()


@contextmanager
def record(keep: bool = False) -> Iterator[Recording]:
    """Record what this rank communicates, in an emulated world or on a real process.

    On real processes, collectives are waited for as soon as they are started, so that their results can be read.

    Args:
        keep: whether to keep the tensors, so that `compare` can say how many elements differ and which order of
            additions explains them.

    Yields:
        The recording; it is complete when the block ends.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from vescale_comm.emulator import emulate
        >>> def step(rank):
        ...     with record() as recording:
        ...         dist.all_reduce(torch.ones(3))
        ...     return recording
        >>> emulate(step, 2)[1].events[0].describe()
        'all_reduce(sum) 0 of ranks 0, 1 (float32[3])'
    """
    if PLACE.run is not None:
        with pushed(Recording(PLACE.rank, keep)) as recording:
            yield recording
        return
    from .real import watching

    with watching(Recording(dist.get_rank() if dist.is_initialized() else 0, keep)) as recording:
        yield recording


@contextmanager
def pushed(recording: Recording) -> Iterator[Recording]:
    """Let a recording receive what `begin` and `end` are told in this thread."""
    _active.recordings.append(recording)
    try:
        yield recording
    finally:
        _active.recordings[:] = [other for other in _active.recordings if other is not recording]


def begin(op: str, detail: str, group: Sequence[int], inputs: Sequence[Tensor], peer: int = -1) -> Any:
    """Tell the recordings of this thread that a collective starts; called by the emulated group."""
    return [(one, one.begin(op, detail, group, inputs, peer)) for one in _active.recordings]


def end(token: Any, outputs: Sequence[Tensor]) -> None:
    """Tell them that it is finished."""
    for recording, index in token:
        recording.end(index, outputs)


def _hashes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(_hash(tensor) for tensor in tensors)


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous()
    digest = hashlib.blake2b(digest_size=8)
    if flat.nbytes:
        digest.update((ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()))
    return digest.hexdigest()


def _shapes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    return tuple(
        f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]" for tensor in tensors
    )
