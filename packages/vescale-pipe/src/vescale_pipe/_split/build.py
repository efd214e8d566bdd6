"""From the parts of a recording to stage modules under the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..errors import SplitError
from .cut import Part
from .graph import Crossing, Port, Stage
from .names import Names
from .program import StageModule, write
from .tree import leaves
from .values import Recording, Value

__all__ = ["build_stages", "tied_parameters"]


def build_stages(recording: Recording, parts: Sequence[Part], names: Names) -> tuple[list[Stage], list[Crossing]]:
    """Write each part as a module.

    Raises:
        SplitError: a buffer changes on more than one stage.
    """
    _check_buffers(parts)
    members = [_members(part, names) for part in parts]
    _place_unused(members, names)
    results = [leaf for leaf in leaves(recording.output) if isinstance(leaf, Value)]
    outputs = {part.index: [part.sent[number] for number in sorted(part.sent)] for part in parts[:-1]}
    outputs[len(parts) - 1] = results
    places = {(index, value.number): number for index, made in outputs.items() for number, value in enumerate(made)}
    owner = {number: part.index for part in parts for number in part.sent}
    stages, crossings = [], []
    for part in parts:
        batch = [part.batch[number] for number in sorted(part.batch)]
        received = [part.received[number] for number in sorted(part.received)]
        sent = part.index < len(parts) - 1
        program = write(part.ordered(), [*batch, *received], outputs[part.index], sent=sent)
        module = StageModule(program)
        _register(module, names, members[part.index])
        ports = [Port("batch", *value.key) for value in batch]
        for value in received:
            producer = owner[value.number]
            ports.append(Port("stage", producer, places[producer, value.number]))
            size = value.tensor.numel() * value.tensor.element_size()
            crossings.append(
                Crossing(producer, part.index, value.text, tuple(value.tensor.shape), value.tensor.dtype, size)
            )
        needs_grad = tuple(value.tensor.requires_grad for value in outputs[part.index])
        stages.append(Stage(part.index, module, tuple(ports), len(outputs[part.index]), needs_grad))
    return stages, crossings


def _check_buffers(parts: Sequence[Part]) -> None:
    changed: dict[str, list[tuple[int, str]]] = {}
    users: dict[str, set[int]] = {}
    for part in parts:
        for name in part.held:
            users.setdefault(name, set()).add(part.index)
        for node in part.ordered():
            for name in node.changed_buffers:
                changed.setdefault(name, []).append((part.index, str(node)))
            for old, _ in node.touched:
                root = old
                while root.alias is not None:
                    root = root.alias
                if root.source == "buffer":
                    changed.setdefault(root.key, []).append((part.index, str(node)))
    for name, where in changed.items():
        stages = {stage for stage, _ in where} | users.get(name, set())
        if len(stages) > 1:
            raise SplitError(
                f"buffer {name!r} is changed by {where[0][1]} and used on stages "
                f"{', '.join(map(str, sorted(stages)))}; each would have its own. "
                "Cut the model so that all uses are on one stage."
            )


class _Members:
    """What a stage holds of the model."""

    def __init__(self) -> None:
        self.modules: set[int] = set()
        self.tensors: set[str] = set()


def _members(part: Part, names: Names) -> _Members:
    members = _Members()
    for node in part.nodes.values():
        if node.module is not None:
            members.modules.add(id(names.modules[node.module]))
    members.tensors |= set(part.held)
    return members


def _place_unused(members: Sequence[_Members], names: Names) -> None:
    """Give what the forward did not use to the stage of what stands before it in the model."""
    stage = 0
    for name, module in names.modules.items():
        owners = [
            index
            for index, some in enumerate(members)
            if any(id(names.modules[outer]) in some.modules for outer in _outers(name))
        ]
        if owners:
            stage = owners[0]
            continue
        for table in (module._parameters, module._buffers):
            for leaf, tensor in table.items():
                full = f"{name}.{leaf}".lstrip(".")
                if tensor is None:
                    continue
                holders = [index for index, some in enumerate(members) if full in some.tensors]
                if holders:
                    stage = holders[0]
                else:
                    members[stage].tensors.add(full)


def _outers(name: str) -> list[str]:
    """Return a name and those of all modules around it."""
    found = [name]
    while name:
        name = name.rpartition(".")[0]
        found.append(name)
    return found


def _register(stage: StageModule, names: Names, members: _Members) -> None:
    """Put modules, parameters and buffers under their own names, in the order of the model."""
    witness: tuple[str, ...] = ()
    for name, module in names.modules.items():
        if id(module) in members.modules:
            parent, _, leaf = name.rpartition(".")
            holder = _holder(stage, parent, names)
            if leaf not in holder._modules:
                holder._modules[leaf] = module
            if not witness and module.training == names.model.training:
                witness = tuple(name.split("."))
        for kind, table in (("_parameters", module._parameters), ("_buffers", module._buffers)):
            for leaf, tensor in table.items():
                if f"{name}.{leaf}".lstrip(".") in members.tensors:
                    holder = _holder(stage, name, names)
                    getattr(holder, kind)[leaf] = tensor
                    if leaf in module._non_persistent_buffers_set:
                        holder._non_persistent_buffers_set.add(leaf)
    stage.follow(names.model, witness)


def _holder(stage: nn.Module, name: str, names: Names) -> nn.Module:
    """Return what stands in a stage for an opened module: a plain one that only holds others."""
    found: Any = stage
    path = ""
    for part in name.split(".") if name else ():
        path = f"{path}.{part}" if path else part
        if part not in found._modules:
            found._modules[part] = nn.Module()
            found._modules[part].training = names.modules[path].training
        found = found._modules[part]
    return found  # type: ignore[no-any-return]


def tied_parameters(stages: Sequence[Stage]) -> tuple[tuple[tuple[int, str], ...], ...]:
    """Return per parameter that several stages hold: (stage, its name there)."""
    groups: dict[int, list[tuple[int, str]]] = {}
    for stage in stages:
        for name, parameter in stage.module.named_parameters():
            groups.setdefault(id(parameter), []).append((stage.index, name))
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
