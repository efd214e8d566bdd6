"""`visualize`: a picture in text of which rank holds which part of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from ._mesh import MeshInfo, mesh_info
from ._spec import Box, Spec, spec_of
from ._tensor import DTensor
from .placements import P, Placement, to_axis_types, to_placement


def visualize(
    tensor: DTensor | Sequence[int],
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    show: bool = True,
) -> str:
    """Print who holds what of a tensor, and return the text. Communicates nothing.

    Args:
        tensor: a DTensor, or the shape of a tensor to be.
        device_mesh: mesh, where `tensor` is a shape.
        placements: one per mesh axis, where `tensor` is a shape.
        show: print the text.

    Returns:
        A grid for up to two dims: each cell names the ranks that hold it. A list for more dims.
    """
    if isinstance(tensor, DTensor):
        if device_mesh is not None or placements is not None:
            raise ValueError(
                "a DTensor has a mesh and placements of its own; give device_mesh and placements with a shape only"
            )
        spec = tensor._spec
    else:
        if device_mesh is None or placements is None:
            raise ValueError("to visualize a shape, give device_mesh and placements too")
        info = mesh_info(device_mesh)
        shape = tuple(tensor)
        spec = spec_of(info, shape, to_axis_types(placements, mesh_ndim=info.ndim, ndim=len(shape)))
    text = "\n".join([_title(spec), *_body(spec)])
    if show:
        print(text)  # noqa: T201  (its purpose)
    return text


def _title(spec: Spec) -> str:
    mesh = spec.mesh
    axes = ", ".join(f"{mesh.axis_name(a)}={mesh.sizes[a]}: {to_placement(t)!r}" for a, t in enumerate(spec.types))
    pending = " (ranks hold parts of a pending sum)" if P in spec.types else ""
    return f"shape {list(spec.shape)} on mesh ({axes}){pending}"


def _holders(mesh: MeshInfo, spec: Spec) -> list[tuple[int, Box]]:
    """(rank, box) of every rank of the mesh, in order of rank; several boxes of a rank where its part is not one."""
    grid = mesh.device_mesh.mesh
    coordinates = [tuple(c) for c in (grid >= -1).nonzero().tolist()]
    found: list[tuple[int, Box]] = []
    for c in coordinates:
        boxes = [p.box for p in spec.pieces_of(c).pieces] if spec.irregular else [spec.box_of(c)]
        found += [(int(grid[c]), box) for box in boxes or [_nothing(spec)]]
    return sorted(found)


def _nothing(spec: Spec) -> Box:
    return (0,) * spec.ndim, (0,) * spec.ndim


def _body(spec: Spec) -> list[str]:
    holders = _holders(spec.mesh, spec)
    empty = [rank for rank, (_, shape) in holders if 0 in shape]
    lines = _grid(spec, holders) if spec.ndim <= 2 and spec.numel else _list(holders)
    if empty and spec.numel:
        lines.append(f"nothing: {_ranks(empty)}")
    return lines


def _grid(spec: Spec, holders: list[tuple[int, Box]]) -> list[str]:
    shape = (1,) * (2 - spec.ndim) + tuple(spec.shape)
    boxes = [(r, (0,) * (2 - spec.ndim) + o, (1,) * (2 - spec.ndim) + s) for r, (o, s) in holders if 0 not in s]
    cuts = [sorted({0, shape[d], *(o[d] for _, o, _ in boxes), *(o[d] + s[d] for _, o, s in boxes)}) for d in (0, 1)]
    spans = [list(itertools.pairwise(c)) for c in cuts]
    header = [f"{a}:{b}" for a, b in spans[1]] if spec.ndim else [""]
    table = [
        [
            _ranks([r for r, o, s in boxes if o[0] <= top < o[0] + s[0] and o[1] <= left < o[1] + s[1]])
            for left, _ in spans[1]
        ]
        for top, _ in spans[0]
    ]
    names = [f"{a}:{b}" if spec.ndim == 2 else "" for a, b in spans[0]]
    return _boxed(names, header, table)


def _boxed(names: list[str], header: list[str], table: list[list[str]]) -> list[str]:
    margin = max(map(len, names))
    widths = [max(len(h), *(len(row[i]) for row in table)) for i, h in enumerate(header)]
    rule = " " * margin + " +" + "+".join("-" * (w + 2) for w in widths) + "+"
    lines = []
    if any(header):
        lines.append(
            " " * margin + "  " + " ".join(h.center(w + 2) for h, w in zip(header, widths, strict=True)).rstrip()
        )
    lines.append(rule)
    for name, row in zip(names, table, strict=True):
        cells = "|".join(f" {cell.center(w)} " for cell, w in zip(row, widths, strict=True))
        lines += [f"{name.rjust(margin)} |{cells}|", rule]
    return lines


def _list(holders: list[tuple[int, Box]]) -> list[str]:
    by_box: dict[Box, list[int]] = {}
    for rank, box in holders:
        by_box.setdefault(box, []).append(rank)
    return [
        f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]  {_ranks(ranks)}"
        for box, ranks in by_box.items()
        if 0 not in box[1]
    ] or ["no elements"]


def _ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(map(str, ranks)) if ranks else "-"
