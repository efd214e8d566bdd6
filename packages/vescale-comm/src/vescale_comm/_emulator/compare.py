"""Compare two recorded runs and name the first thing that differs: its collective or tensor, and its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .choose import ORDERS
from .exchange import bits
from .recorder import Event, Recording
from .sums import identify

__all__ = ["Difference", "compare"]

REDUCTIONS = ("all_reduce",)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing in which a run differs from the reference."""

    rank: int
    """Global rank on which it shows first."""
    index: int
    """Which event of this rank, from 0."""
    op: str
    """Such as "all_reduce", or "note"; "nothing" where the run has ended."""
    what: str
    """"input", "output", "note", "call" (another call than in the reference) or "missing"."""
    tensor: str
    """Name of the tensor: as noted, or "input 0", "output 1"; empty for calls."""
    text: str
    """All of it in a sentence or two."""

    def __str__(self) -> str:
        return self.text


def compare(run: Sequence[Recording], reference: Sequence[Recording]) -> Difference | None:
    """Find the first difference between two runs, in the order in which one thing could cause another.

    Args:
        run: recordings of all ranks, or of some.
        reference: those of the same ranks.

    Returns:
        The first difference, or None if every call, every input and every result is the same, bit for bit.

    Raises:
        ValueError: the recordings are not of the same ranks.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from vescale_comm.emulator import emulate, record
        >>> def step(rank):
        ...     with record() as recording:
        ...         dist.all_reduce(torch.tensor([1e8, -1e8, 1.0][rank]))
        ...     return recording
        >>> found = compare(emulate(step, 3, "gloo"), emulate(step, 3, "canonical"))
        >>> found.what, found.op, found.rank
        ('output', 'all_reduce', 0)
    """
    ranks, others = [one.rank for one in run], [one.rank for one in reference]
    if ranks != others:
        raise ValueError(f"run, reference: must be of the same ranks in the same order; got {ranks} and {others}.")
    times = _times(reference)
    found: list[tuple[tuple[int, bool, int], Difference]] = []
    for place, (one, other) in enumerate(zip(run, reference, strict=True)):
        difference = _first(run, reference, one, other)
        if difference is not None:
            known = times[place]
            time = known[difference.index] if difference.index < len(known) else max(known, default=0) + 1
            found.append(((time, difference.what == "output", one.rank), difference))
    return min(found, key=lambda item: item[0])[1] if found else None


def _first(
    run: Sequence[Recording], reference: Sequence[Recording], one: Recording, other: Recording
) -> Difference | None:
    for index in range(max(len(one.events), len(other.events))):
        if index >= len(one.events):
            return _missing(one.rank, index, "run", other.events[index])
        if index >= len(other.events):
            return _missing(one.rank, index, "reference", one.events[index])
        event, wanted = one.events[index], other.events[index]
        if _call(event) != _call(wanted) or (event.detail and wanted.detail and event.detail != wanted.detail):
            text = f"Rank {one.rank} calls {event.describe()}, but in the reference {wanted.describe()}."
            return Difference(one.rank, index, event.op, "call", "", text)
        for before in (True, False):
            difference = _tensors(run, reference, one, other, index, before)
            if difference is not None:
                return difference
    return None


def _call(event: Event) -> tuple[object, ...]:
    return (event.op, event.group, event.sequence, event.peer, event.shapes)


def _missing(rank: int, index: int, where: str, event: Event) -> Difference:
    text = f"Rank {rank}: the {where} ends before {event.describe()}."
    return Difference(rank, index, event.op if where == "reference" else "nothing", "missing", "", text)


def _tensors(
    run: Sequence[Recording],
    reference: Sequence[Recording],
    one: Recording,
    other: Recording,
    index: int,
    before: bool,
) -> Difference | None:
    event, wanted = one.events[index], other.events[index]
    hashes = (event.before, wanted.before) if before else (event.after, wanted.after)
    # What a message brought is unknown on real processes; what was sent is known at the other end.
    if hashes[0] == hashes[1] or (event.op in ("send", "recv") and not all(hashes)):
        return None
    place = next((i for i, pair in enumerate(zip(*hashes, strict=False)) if pair[0] != pair[1]), 0)
    if event.op == "note":
        what, name = "note", event.detail
        text = f"Rank {one.rank}: {event.describe()} differs; {_since(one, index)}."
    elif before:
        what, name = "input", f"input {place}"
        text = (
            f"Rank {one.rank} puts other values into {event.describe()} ({name}), although all that it received "
            f"before was the same: it computed something else; {_since(one, index)}."
        )
    else:
        what, name = "output", f"output {place}"
        text = f"Rank {one.rank} gets other values from {event.describe()} ({name}) than in the reference."
        text += _orders(run, reference, event, wanted)
    return Difference(one.rank, index, event.op, what, name, text + _elements(event, wanted, place, before))


def _since(recording: Recording, index: int) -> str:
    if index == 0:
        return "nothing was recorded before it"
    return f"the last thing that was the same was {recording.events[index - 1].describe()}"


def _elements(event: Event, wanted: Event, place: int, before: bool) -> str:
    kept, others = (event.inputs, wanted.inputs) if before else (event.outputs, wanted.outputs)
    if kept is None or others is None or place >= min(len(kept), len(others)):
        return ""
    one, other = kept[place].reshape(-1), others[place].reshape(-1)
    if one.shape != other.shape or one.dtype != other.dtype or not one.numel():
        return ""
    differs = (bits(one).view(one.numel(), -1) != bits(other).view(one.numel(), -1)).any(dim=1)
    first = int(differs.nonzero()[0])
    return (
        f" {int(differs.sum())} of {one.numel()} elements differ, the first is element {first}: "
        f"{one[first].item()!r} instead of {other[first].item()!r}."
    )


def _orders(run: Sequence[Recording], reference: Sequence[Recording], event: Event, wanted: Event) -> str:
    """Say which orders of additions explain the results, where tensors were kept."""
    if event.op not in REDUCTIONS:
        return ""
    parts = []
    for name, recordings, one in (("run", run, event), ("reference", reference, wanted)):
        inputs = [_input(recording, one) for recording in recordings if recording.rank in one.group]
        if one.outputs is None or len(inputs) != len(one.group) or any(tensor is None for tensor in inputs):
            return ""
        terms = [tensor for tensor in inputs if tensor is not None]
        names = identify(list(ORDERS.values()), terms, one.outputs[0], one.detail or "sum")
        parts.append(f"{name}: {' or '.join(names) if names else 'none that is known'}")
    return f" Order of additions in the {', in the '.join(parts)}."


def _input(recording: Recording, event: Event) -> torch.Tensor | None:
    for other in recording.events:
        if (other.op, other.group, other.sequence) == (event.op, event.group, event.sequence):
            return other.inputs[0] if other.inputs else None
    return None


def _times(recordings: Sequence[Recording]) -> list[list[int]]:
    """Return a logical time for each event: later than all that could have caused it (Lamport, 1978)."""
    times: list[list[int]] = [[] for _ in recordings]
    places = {recording.rank: place for place, recording in enumerate(recordings)}
    indices = [
        {(event.op, event.group, event.sequence): index for index, event in enumerate(recording.events)}
        for recording in recordings
    ]
    sent: dict[tuple[object, ...], int] = {}
    while True:
        moved = False
        for place, recording in enumerate(recordings):
            while len(times[place]) < len(recording.events):
                time = _time(recordings, times, places, indices, sent, place)
                if time is None:
                    break
                times[place].append(time)
                moved = True
        if not moved:
            break
    for place, recording in enumerate(recordings):
        while len(times[place]) < len(recording.events):
            times[place].append(max(times[place], default=0) + 1)
    return times


def _time(
    recordings: Sequence[Recording],
    times: Sequence[Sequence[int]],
    places: dict[int, int],
    indices: Sequence[Mapping[tuple[str, tuple[int, ...], int], int]],
    sent: dict[tuple[object, ...], int],
    place: int,
) -> int | None:
    """Return the time of the next event of a rank, or None while something that comes before it has none."""
    rank = recordings[place].rank
    event = recordings[place].events[len(times[place])]
    last = times[place][-1] if times[place] else 0
    if event.op == "send":
        sent[(event.group, rank, event.peer, event.sequence)] = last + 1
        return last + 1
    if event.op == "recv" and event.peer in places:
        key = (event.group, event.peer, rank, event.sequence)
        return max(last, sent[key]) + 1 if key in sent else None
    if event.op in ("note", "recv"):
        return last + 1
    latest = last
    for member in event.group:
        if member not in places:
            continue
        other = places[member]
        index = indices[other].get((event.op, event.group, event.sequence))
        if index is None or index > len(times[other]):
            return None
        latest = max(latest, times[other][index - 1] if index else 0)
    return latest + 1
