"""`AutoPlan`: a plan as a mapping, what it is predicted to cost, and its text as Python that can be edited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..placements import Placement, Shard, to_placement
from .cost import Cost
from .rehearse import Choices
from .skeleton import Skeleton


class AutoPlan(Mapping[str, Any]):
    """A plan that `auto_plan` made: pass it to `parallelize_module` as it is, or print it, edit the text and keep it.

    Attributes:
        predicted: what a training step costs a rank.
    """

    def __init__(self, sections: dict[str, dict[str, Any]], predicted: Cost, title: str) -> None:
        self._sections, self.predicted, self._title = sections, predicted, title

    def __getitem__(self, section: str) -> Any:
        return self._sections[section]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sections)

    def __len__(self) -> int:
        return len(self._sections)

    def source(self) -> str:
        """The plan as Python: comments with the prediction, and an assignment to `plan`."""
        lines = [f"# {self._title}", *(f"# {line}" for line in self._summary())]
        text = " " + repr(self._sections).replace("{", " ")
        used = [n for n in ("InterleavedShard", "Replicate", "Shard", "Varying") if f" {n}(" in text]
        if used:
            lines += [f"from vescale_dtensor import {', '.join(used)}", ""]
        lines.append("plan = {")
        for section, entries in self._sections.items():
            lines.append(f'    "{section}": {{')
            lines += [f"        {_pattern(key)}: {_placements(value)}," for key, value in entries.items()]
            lines.append("    },")
        return "\n".join([*lines, "}"])

    def __str__(self) -> str:
        return self.source()

    def _summary(self) -> list[str]:
        cost = self.predicted
        lines = [f"sent per rank and step: {size_text(cost.sent)}"]
        lines += [
            f"  {n} x {kind} over {'+'.join(axes)}, {size_text(size)} of input"
            for (kind, axes), (n, size) in sorted(cost.totals.items())
        ]
        if cost.implicit:
            lines.append(f"  {cost.implicit} of them are implicit: operators ask for them, not the plan")
        lines.append(
            f"memory per rank: {size_text(cost.memory)}: parameters {size_text(cost.parameters)}, gradients and two "
            f"moments {size_text(cost.state - cost.parameters)}, activations {size_text(cost.activations)}"
        )
        return lines


def sections_of(choices: Choices, skeleton: Skeleton, mesh: DeviceMesh) -> dict[str, dict[str, Any]]:
    """The sections of a plan from choices about a skeleton; keys are patterns for the names of the model."""
    parameter: dict[str, Any] = {}
    forward: dict[str, Any] = {}
    for key, types in choices.items():
        if all(t is None for t in types):
            continue
        value = _by_axis(types, mesh)
        pattern = skeleton.pattern(key.name)
        if key.section == "parameter":
            parameter[pattern] = value
        else:
            parts = (pattern, key.section, *key.path) if pattern else (key.section, *key.path)
            forward[".".join(parts)] = value
    return {"parameter": parameter, "forward": forward}


def _by_axis(types: tuple[int | None, ...], mesh: DeviceMesh) -> dict[str, Placement] | list[Placement]:
    names = mesh.mesh_dim_names
    assert names is not None
    return {names[a]: to_placement(t) for a, t in enumerate(types) if t is not None}


def _pattern(text: str) -> str:
    return f'r"{text}"' if "\\" in text else f'"{text}"'


def _placements(value: Mapping[str, Placement]) -> str:
    return "{" + ", ".join(f'"{axis}": {_placement(p)}' for axis, p in value.items()) + "}"


def _placement(p: Placement) -> str:
    return f"Shard({p.dim})" if type(p) is Shard else repr(p)


def size_text(num_bytes: float) -> str:
    """Bytes for people.

    >>> size_text(512), size_text(3_500_000)
    ('512 B', '3.5 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
