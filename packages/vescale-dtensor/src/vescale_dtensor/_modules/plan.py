"""Reading a parallel plan: patterns, what they match, and the placements they ask for.

A plan is data. Reading it gives one *request* per entry; a request names a pattern, the path of a value
inside an input or output, and one placement per mesh axis, where None means "as it is". Later entries
override earlier ones axis by axis, so plans for different mesh axes merge.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._mesh import MeshInfo
from ..errors import PlanError
from ..placements import Placement

Axes = tuple[Placement | None, ...]
"""One placement per mesh axis; None leaves the axis as it is."""
Path = tuple[str, ...]
"""Where a value stands inside nested arguments: names and indices."""

SECTIONS = ("parameter", "buffer", "forward")
_FORWARD = re.compile(r"(?:(.*)\.)?(input|output)((?:\\?\.\w+)*)")


@dataclass(frozen=True, slots=True)
class Request:
    """One entry of a plan."""

    key: str
    """The entry's key, for messages."""
    pattern: re.Pattern[str]
    """Matches whole names of parameters, buffers or modules."""
    axes: Axes
    """The placements asked for."""
    side: str = ""
    """`input` or `output` for entries of the section "forward"."""
    path: Path = ()
    """Position inside the input or output; empty for all of it."""
    optional: bool = False
    """Whether it may match nothing: entries of named plans, which serve several kinds of models."""

    def matching(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that the pattern matches."""
        return [n for n in names if self.pattern.fullmatch(n)]


@dataclass(slots=True)
class Requests:
    """A plan as read, the requests of each section in order."""

    parameter: list[Request]
    buffer: list[Request]
    forward: list[Request]


def read_plan(plan: Mapping[str, Any], mesh: MeshInfo, *, optional: bool = False) -> Requests:
    """Read a plan given as a mapping.

    Args:
        plan: sections by name.
        mesh: the mesh it is for.
        optional: whether patterns may match nothing and axes that the mesh lacks are left out.

    Raises:
        PlanError: unknown sections, malformed keys, or placements that do not fit the mesh.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"plan = {plan!r}: expected a mapping with the keys "
            f"{', '.join(map(repr, SECTIONS))}, the name of a plan, or a list of both"
        )
    for name in plan:
        if name not in SECTIONS:
            raise PlanError(
                f"the plan has an unknown section {name!r}{nearest(str(name), SECTIONS)}; sections are {list(SECTIONS)}"
            )
        if not isinstance(plan[name], Mapping):
            raise PlanError(f"plan[{name!r}] = {plan[name]!r}: expected a mapping from patterns to placements")
        for key in plan[name]:
            if not isinstance(key, str):
                raise PlanError(f"plan[{name!r}] has the key {key!r}; keys are regular expressions, as text, of names")
    read = Requests([], [], [])
    for section in ("parameter", "buffer"):
        for key, value in plan.get(section, {}).items():
            axes = read_axes(value, mesh, f"plan[{section!r}][{key!r}]", optional)
            getattr(read, section).append(Request(key, _compile(key, key), axes, optional=optional))
    for key, value in plan.get("forward", {}).items():
        name, side, path = _split(key)
        pattern = _compile(name, key)
        for inner, axes in _nested(value, mesh, f'plan["forward"][{key!r}]', optional):
            read.forward.append(Request(key, pattern, axes, side, (*path, *inner), optional))
    return read


def _split(key: str) -> tuple[str, str, Path]:
    found = _FORWARD.fullmatch(key)
    if found is None:
        raise PlanError(
            f'plan["forward"] has the key {key!r}; keys are a pattern of module names '
            f'followed by ".input" or ".output", '
            'for example "layers.0.mlp.input" or "input" for the whole module, then perhaps ".<argument name or index>"'
        )
    name = found[1] or ""
    if (len(name) - len(name.rstrip("\\"))) % 2:  # the dot before "input" was escaped
        name = name[:-1]
    return name, found[2], tuple(part for part in found[3].replace("\\", "").split(".") if part)


def _compile(pattern: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PlanError(f"the plan's key {key!r} is not a regular expression: {error}") from None


def _is_placements(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Placement) for v in value)


def _is_by_axis(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(v, Placement) for v in value.values())


def _nested(value: Any, mesh: MeshInfo, where: str, optional: bool) -> list[tuple[Path, Axes]]:
    """Placements of one value, or of the values inside a container of them."""
    if value is None:
        return []
    if isinstance(value, Mapping) and value and not _is_by_axis(value):
        items = [(str(k), v) for k, v in value.items()]
    elif isinstance(value, list | tuple) and value and not any(isinstance(v, Placement) for v in value):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return [((), read_axes(value, mesh, where, optional))]
    return [((k, *path), axes) for k, v in items for path, axes in _nested(v, mesh, f"{where}[{k!r}]", optional)]


def read_axes(value: Any, mesh: MeshInfo, where: str, optional: bool) -> Axes:
    """Read placements: one per mesh axis in order, or by name of the axis."""
    names = mesh.device_mesh.mesh_dim_names or ()
    if _is_by_axis(value):
        axes: list[Placement | None] = [None] * mesh.ndim
        for name, placement in value.items():
            if name in names:
                axes[names.index(name)] = placement
            elif not optional:
                known = f"the axes of {mesh!r} are {list(names)}"
                if not names:
                    known = "the mesh has no names for its axes; make it with mesh_dim_names, or list placements"
                raise PlanError(f"{where} names the mesh axis {name!r}{nearest(str(name), names)}; {known}")
        return tuple(axes)
    if not _is_placements(value):
        raise PlanError(
            f"{where} = {value!r}: expected placements, one per mesh axis such as [Shard(0), Replicate()], "
            'or by the name of the axis such as {"tp": Shard(0)}'
        )
    if len(value) != mesh.ndim:
        raise PlanError(
            f"{where} = {list(value)} has {len(value)} placements, but {mesh!r} has {mesh.ndim} axes; give one per axis"
        )
    return tuple(value)


def merged(axes: Iterable[Axes], mesh: MeshInfo) -> Axes:
    """What several requests for one value come to: the last one that names an axis decides it."""
    result: list[Placement | None] = [None] * mesh.ndim
    for one in axes:
        for i, placement in enumerate(one):
            if placement is not None:
                result[i] = placement
    return tuple(result)


def require_matches(requests: Sequence[Request], names: Sequence[str], what: str) -> None:
    """Raise if a pattern matches none of `names`."""
    for request in requests:
        if not request.optional and not request.matching(names):
            pattern = request.pattern.pattern
            raise PlanError(
                f"the plan's key {request.key!r} matches no {what} of the module{nearest(pattern, names)}. "
                f"Keys are regular expressions for whole names; there are {len(names)}: {_some(names)}"
            )


def nearest(word: str, names: Iterable[str]) -> str:
    """Suggest names that look like `word`, a name or a pattern, as an addition to a message."""
    plain = re.sub(r"\\d[+*]?|\[0-9\][+*]?|\.[*+]", "0", word).replace("\\", "")
    found = difflib.get_close_matches(plain, list(names), n=3, cutoff=0.4)
    return f" (did you mean {' or '.join(map(repr, found))}?)" if found else ""


def _some(names: Sequence[str], most: int = 8) -> str:
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
