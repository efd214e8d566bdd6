"""Which modules are units, and which parameters belong to which of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from ..errors import PlanError
from .entry import Entry, Use
from .kinds import kind_of

__all__ = ["assign", "choose_units"]

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def choose_units(root: nn.Module, units: str | Sequence[str | type[nn.Module]]) -> dict[str, nn.Module]:
    """Return the modules whose parameters are gathered together, by name, in the order of the module tree.

    The root is always among them, for what belongs to no other.

    Args:
        root: the module to be sharded.
        units: "auto"; or names and classes of modules. "auto" takes the blocks: the members of the outermost
            ModuleLists, ModuleDicts and Sequentials that have several; and embeddings, heads and the like that are
            about as large.

    Raises:
        PlanError: a name or class that is not there.
    """
    named = dict(root.named_modules())
    if isinstance(units, str):
        if units != "auto":
            raise PlanError(f'units: expected "auto" or a sequence of names and classes, but got {units!r}.')
        chosen = set(_blocks(root, ""))
        chosen |= set(_large(root, named, chosen))
    else:
        chosen = set()
        for wanted in units:
            found = {wanted} & named.keys() if isinstance(wanted, str) else _of_class(named, wanted)
            if not found:
                what = repr(wanted) if isinstance(wanted, str) else getattr(wanted, "__name__", wanted)
                raise PlanError(f"units: the module has no submodule {what}; names are such as {list(named)[1:4]}.")
            chosen |= found
    return {name: module for name, module in named.items() if name in chosen or not name}


def _of_class(named: dict[str, nn.Module], wanted: type[nn.Module]) -> set[str]:
    return {name for name, module in named.items() if isinstance(module, wanted)}


def _blocks(module: nn.Module, path: str) -> Iterator[str]:
    """Yield the names of the members of the outermost containers that can be units."""
    members = {f"{path}.{name}".lstrip("."): child for name, child in module.named_children() if _size(child)}
    is_container = isinstance(module, CONTAINERS) and len(members) > 1
    for name, member in members.items():
        is_called = type(member).forward is not nn.Module.forward
        if is_container and is_called:
            yield name
        else:
            yield from _blocks(member, name)


def _large(root: nn.Module, named: dict[str, nn.Module], chosen: set[str]) -> Iterator[str]:
    """Yield the modules beside the blocks that hold as much as half a block in parameters of their own."""
    sizes = [_size(named[name]) for name in chosen]
    if not sizes:
        return
    limit = sum(sizes) / len(sizes) / 2
    holders: dict[int, int] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for name, module in named.items():
        if not name or any(name == unit or name.startswith(f"{unit}.") for unit in chosen):
            continue
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if any(holders[id(parameter)] > 1 for parameter in own):
            continue  # shared: it belongs where all who share it are
        called = type(module).forward is not nn.Module.forward and not list(module.children())
        if called and sum(parameter.numel() for parameter in own) >= limit:
            yield name


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def assign(root: nn.Module, units: dict[str, nn.Module]) -> tuple[list[list[Entry]], list[list[nn.Module]]]:
    """Give each parameter to a unit.

    A parameter belongs to the innermost unit around it; one that several modules share, to the innermost unit around
    all of them, so it has one owner and is gathered for all of its uses.

    Args:
        root: the module to be sharded.
        units: by name, the root first.

    Returns:
        Per unit its parameters, and its modules that are in no unit further in.
    """
    names = list(units)
    where = {name: index for index, name in enumerate(names)}
    modules: list[list[nn.Module]] = [[] for _ in names]
    entries: dict[int, Entry] = {}
    paths: dict[int, tuple[int, ...]] = {}
    for path, module in root.named_modules():
        around = _around(path, where)
        modules[around[-1]].append(module)
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            if parameter.grad is not None:
                raise PlanError(f"{name} has a gradient already: call fully_shard before backward, or zero_grad first.")
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise PlanError(f"{name} has no shape yet: run the module once on an input before fully_shard.")
            entry = entries.get(id(parameter))
            if entry is None:
                entry = entries[id(parameter)] = Entry(name, parameter, kind_of(parameter, name))
            entry.uses.append(Use(module, attribute))
            known = paths.get(id(parameter), around)
            paths[id(parameter)] = _common(known, around)
    owned: list[list[Entry]] = [[] for _ in names]
    for key, entry in entries.items():
        owned[paths[key][-1]].append(entry)
    return owned, modules


def _around(path: str, where: dict[str, int]) -> tuple[int, ...]:
    """Return the units around a module, from the root inwards."""
    parts = path.split(".") if path else []
    prefixes = [".".join(parts[:count]) for count in range(len(parts) + 1)]
    return tuple(where[prefix] for prefix in prefixes if prefix in where)


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return a[:count]
