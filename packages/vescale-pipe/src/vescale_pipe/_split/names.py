"""Names of modules: which of them become units, and errors that help with a wrong name."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .._nearest import nearest
from ..errors import SplitError

__all__ = ["Names", "choose_units", "has_forward", "nearest"]


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called; lists and dicts of modules can't."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


class Names:
    """All names of the modules of a model; a module may have several."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        self.of: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            self.of.setdefault(id(module), []).append(name)

    def find(self, name: str, argument: str) -> nn.Module:
        """Return the module of a name.

        Raises:
            SplitError: there is none; `argument` says whose fault that is.
        """
        if name not in self.modules or name == "":
            kind = type(self.model).__name__
            if len(self.modules) == 1:
                raise SplitError(f"{argument}={name!r}: {kind} holds no other modules, so it cannot be cut.")
            raise SplitError(f"{argument}={name!r}: {kind} has no such module.{nearest(name, self.modules, 'modules')}")
        return self.modules[name]

    def first(self, module: nn.Module) -> str:
        """Return the first name of a module."""
        return self.of[id(module)][0]

    def parents(self, module: nn.Module) -> set[int]:
        """Return the ids of all modules that contain a module, by any of its names."""
        found = set()
        for name in self.of[id(module)]:
            while name:
                name = name.rpartition(".")[0]
                found.add(id(self.modules[name]))
        return found


def choose_units(
    names: Names, at: Sequence[str] | None, units: Sequence[str | type] | None, num_stages: int | None
) -> tuple[set[int], set[int]]:
    """Choose what is called as a whole (units) and what is opened, so that a cut may lie inside it.

    Args:
        names: of the model.
        at: where to cut; what contains a cut is opened, and nothing else.
        units: names or classes of modules that stay whole, by which all that contains one is opened.
        num_stages: with neither of these: open whatever holds a list of modules, then the largest until there are
            enough units of about the same size.

    Returns:
        ids of the units and of the opened modules.

    Raises:
        SplitError: a name is wrong, a cut lies inside a unit, no module has a given class.
    """
    model = names.model
    opened = {id(model)}
    whole: set[int] = set()
    for unit in units or ():
        if isinstance(unit, str):
            found = [names.find(unit, "units")]
        else:
            found = [module for module in model.modules() if isinstance(module, unit)]
            if not found:
                kinds = sorted({type(module).__name__ for module in model.modules()})
                raise SplitError(
                    f"units: {type(model).__name__} holds no module of class {unit.__name__}."
                    f"{nearest(unit.__name__, kinds, 'classes')}"
                )
        whole |= {id(module) for module in found}
    inside = {id(child) for key in whole for child in names.modules[names.of[key][0]].modules()} - whole
    whole -= inside  # a Block inside a Block: the outer one stays whole
    for key in whole:
        opened |= names.parents(names.modules[names.of[key][0]])
    for cut in at or ():
        module = names.find(cut, "at")
        parents = names.parents(module)
        for key in parents & whole:
            raise SplitError(
                f"at={cut!r}: it lies inside {names.of[key][0]!r}, which `units` keeps whole. Cut at that, or take it "
                "out of `units`."
            )
        opened |= parents
    if units is None and num_stages is not None:
        opened |= _auto_opened(model, num_stages)
    chosen = set(whole)
    _children(model, opened, chosen)
    return chosen, opened


def _children(module: nn.Module, opened: set[int], chosen: set[int]) -> None:
    """Add to `chosen` the outermost modules below `module` that are not opened; lists are always opened."""
    for child in module.children():
        if id(child) in chosen:
            continue
        if id(child) in opened or not has_forward(child):
            opened.add(id(child))
            _children(child, opened, chosen)
        else:
            chosen.add(id(child))


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(module) > 1


def _auto_opened(model: nn.Module, num_stages: int) -> set[int]:
    opened: set[int] = {id(model)}

    def descend(module: nn.Module) -> None:
        for child in module.children():
            if _is_list(child):
                opened.add(id(child))
                # Below a list of lists (stages of a network for images) the inner ones are what repeats.
                if not isinstance(child, nn.Sequential):
                    for item in child.children():
                        if _is_list(item):
                            opened.add(id(item))
            elif any(_is_list(inner) for inner in child.modules()) or not has_forward(child):
                opened.add(id(child))
                descend(child)

    if not _is_list(model):
        descend(model)
    total = sum(parameter.numel() for parameter in model.parameters())
    while True:
        chosen: set[int] = set()
        _children(model, opened, chosen)
        units = [module for module in model.modules() if id(module) in chosen]
        sizes = {id(unit): sum(parameter.numel() for parameter in unit.parameters()) for unit in units}
        enough = sum(1 for unit in units if sizes[id(unit)]) >= num_stages
        openable = [unit for unit in units if any(True for _ in unit.children()) and sizes[id(unit)]]
        largest = max(openable, key=lambda unit: sizes[id(unit)], default=None)
        if largest is None or (enough and sizes[id(largest)] * num_stages <= 1.5 * total):
            return opened
        opened.add(id(largest))
