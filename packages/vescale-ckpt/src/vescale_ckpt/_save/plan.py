"""What is saved, by whom, and where: agreed on by all ranks before a byte is copied.

Ranks compare a digest of what they hold. Where it is the same everywhere (one program, many data) that is all that is
sent; where ranks hold different keys (pipeline stages), one rank of each kind sends its keys and they are merged.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _state
from .._format import TensorRecord, layouts_from_json, layouts_to_json
from .._geometry import Assignment, Box, Explicit, Geometry, Layout, Piece
from .._state import Held, TensorSpec
from ..errors import RanksError
from .stage import Task, sources_of

if TYPE_CHECKING:
    from .._coordination import Coordinator

__all__ = ["Content", "Kind", "assign", "describe_state", "merge_kinds"]


@dataclass(slots=True)
class Content:
    """What one rank wants to save."""

    packed: _state.Packed
    """The state, taken apart."""
    held: Mapping[str, Held]
    """By name: how this rank holds each tensor."""
    local: Sequence[Held]
    """The tensors that belong to this rank alone."""
    small: Mapping[str, str]
    """Hashes of small replicated tensors, by name."""

    @property
    def specs(self) -> list[TensorSpec]:
        """Return the specs in the order of the tree's numbers."""
        return [self.held[name].spec for name, _ in self.packed.tensors]

    def digest(self) -> str:
        """Return what must be equal on ranks that hold the same keys."""
        return _state.digest(self.specs, self.packed.tree, self.small).hex()


def describe_state(state: Any, ranks: Sequence[int], rank: int) -> Content:
    """Take a state apart.

    Args:
        state: any nested state.
        ranks: the global rank of each writer.
        rank: number of this writer.

    Raises:
        StateError: something in it cannot be saved.
        LayoutError: a tensor is a pending sum, or nobody knows how it is sharded.
    """
    packed = _state.pack(state)
    held = {name: _state.describe(name, tensor, ranks, rank) for name, tensor in packed.tensors}
    local = [_state.plain(name, tensor) for name, tensor in packed.local_tensors]
    small = _state.small_values(list(held.values())) if len(ranks) > 1 else {}
    return Content(packed, held, local, small)


@dataclass(frozen=True, slots=True)
class Kind:
    """The keys of the ranks whose digests are equal."""

    ranks: tuple[int, ...]
    """Writers."""
    specs: Sequence[TensorSpec]
    """Their tensors."""
    tree: Any
    """Their tree, whose numbers count `specs`."""
    small: Mapping[str, str]
    """Hashes of their small replicated tensors."""


def kind_to_bytes(specs: Sequence[TensorSpec], tree: Any, small: Mapping[str, str]) -> bytes:
    """Return keys as ranks send them to each other."""
    layouts, rows = records(specs)
    meshes, texts = layouts_to_json(layouts)
    tensors = [[row.name, row.dtype, row.shape, row.layout] for row in rows]
    return json.dumps(
        {"tensors": tensors, "meshes": meshes, "layouts": texts, "tree": tree, "small": dict(small)}
    ).encode()


def kind_from_bytes(data: bytes, ranks: Sequence[int], world: int) -> Kind:
    """Return what `kind_to_bytes` sent."""
    value = json.loads(data)
    layouts = layouts_from_json(value["meshes"], value["layouts"], world, "keys")
    specs = [TensorSpec(name, dtype, tuple(shape), layouts[number]) for name, dtype, shape, number in value["tensors"]]
    return Kind(tuple(ranks), specs, value["tree"], value["small"])


def merge_kinds(kinds: Sequence[Kind], differing: str = "error") -> tuple[list[TensorSpec], Any]:
    """Return the union of what kinds of ranks hold.

    Args:
        kinds: by their lowest rank.
        differing: "first" takes replicas and values that differ from the lowest rank, which writes them alone.

    Raises:
        RanksError: naming the key, if two kinds hold different things under it.
    """
    first: dict[str, tuple[int, str]] = {}
    alone: dict[str, int] = {}
    for kind in kinds:
        for name, value in kind.small.items():
            rank, other = first.setdefault(name, (kind.ranks[0], value))
            if other != value and differing == "first":
                alone[name] = rank
            elif other != value:
                raise RanksError(
                    f"state: {name} is a replicated tensor, but its values differ between ranks {rank} and "
                    f"{kind.ranks[0]}. Wrap it in `vescale_ckpt.local(...)` if each rank is to keep its own, as for "
                    f'states of random generators; save with differing="first" to keep those of rank {rank} only, as '
                    f"for buffers of a model (running means of batch norm); else make the ranks agree before saving."
                )
    parts = [(kind.ranks, kind.specs, kind.tree) for kind in kinds]
    specs, tree = _state.merge(parts, first=differing == "first")
    return [_state.held_by(spec, alone[spec.name]) if spec.name in alone else spec for spec in specs], tree


def agree_on_keys(
    session: Coordinator,
    content: Content,
    kinds: Sequence[Sequence[int]],
    check: Callable[[Sequence[TensorSpec]], None],
    differing: str = "error",
) -> tuple[list[TensorSpec], Any]:
    """Return specs and tree of the whole, the same on all ranks.

    Args:
        session: all ranks call this.
        content: what this rank holds.
        kinds: the writers of each kind.
        check: called on member 0 where there are several kinds, before any rank goes on: may raise.
        differing: as of `merge_kinds`.
    """
    specs, tree = content.specs, content.packed.tree
    if len(kinds) > 1:
        speaks = session.rank in [ranks[0] for ranks in kinds]

        def decide(messages: list[bytes]) -> bytes:
            merged, whole = merge_kinds([kind_from_bytes(messages[r[0]], r, session.world) for r in kinds], differing)
            check(merged)
            return kind_to_bytes(merged, whole, {})

        own = kind_to_bytes(specs, tree, content.small) if speaks else b""
        answer = session.agree("keys", own, decide)
        kind = kind_from_bytes(answer, range(session.world), session.world)
        specs, tree = list(kind.specs), kind.tree
    listed = {spec.name for spec in specs if isinstance(spec.layout, Explicit)}
    if listed:
        boxes = json.dumps(_state.own_boxes(content.specs, session.rank, listed)).encode()

        def join(messages: list[bytes]) -> bytes:
            return kind_to_bytes(_state.join_boxes(specs, [json.loads(m) for m in messages]), tree, {})

        kind = kind_from_bytes(session.agree("boxes", boxes, join), range(session.world), session.world)
        specs = list(kind.specs)
    return specs, tree


def assign(specs: Sequence[TensorSpec], content: Content, rank: int) -> list[Task]:
    """Return what a rank writes: its share of the replicas, and its own tensors."""
    geometry = [Geometry(s.shape, _state.itemsize(s.dtype), s.layout) for s in specs]
    tasks = []
    for number, piece in Assignment(geometry).pieces(rank):
        spec = specs[number]
        tasks.append(_task(number, piece, content.held[spec.name], spec))
    for at, held in enumerate(content.local):
        box = Box.whole(held.spec.shape)
        if box.numel:
            tasks.append(_task(len(specs) + at, Piece(box, 0, box.numel), held, held.spec))
    return tasks


def _task(number: int, piece: Piece, held: Held, spec: TensorSpec) -> Task:
    sources = sources_of(piece, held.parts, spec.shape)
    return Task(number, piece, sources, spec.shape, _state.dtype_of(spec.dtype), _state.itemsize(spec.dtype))


def records(specs: Sequence[TensorSpec]) -> tuple[tuple[Layout, ...], tuple[TensorRecord, ...]]:
    """Return the layouts and tensors as a manifest lists them."""
    layouts: dict[Layout, int] = {}
    rows = tuple(TensorRecord(s.name, s.dtype, s.shape, layouts.setdefault(s.layout, len(layouts))) for s in specs)
    return tuple(layouts), rows


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors, replicas counted once."""
    return sum(math.prod(spec.shape) * _state.itemsize(spec.dtype) for spec in specs)
