"""Compares a state with the tree of a checkpoint, place by place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from .dtypes import dtype_of
from .fill import as_saved, hand_over, into, put, refresh
from .items import LEAVES, Item, leaf_names, leaves_of
from .names import Path, plain, spell
from .nodes import parse
from .stateful import EXTRA, group_sizes, is_extra, is_strict, misses
from .template import Action, Match, Reader, Record, Target, Template
from .tree import build

__all__ = ["match"]

_MAPPINGS = ("dict", "ordered")


def match(
    template: Template,
    tree: Any,
    records: Sequence[Record],
    *,
    wanted: Callable[[str], bool] | None = None,
    rename: Callable[[str], str] | None = None,
    add: bool = False,
) -> Match:
    """Find what of a checkpoint goes where in a state. Changes nothing.

    Args:
        template: the state.
        tree: JSON of the checkpoint's state.
        records: the tensors that it counts.
        wanted: tells by the name in the state whether a leaf is to be loaded; others stay as they are.
        rename: from a name of the state to that of the checkpoint.
        add: put what only the checkpoint has into the dicts and lists of the state.

    Raises:
        FormatError: the tree is none.

    Example:
        >>> import torch
        >>> from .template import template
        >>> found = match(template({"step": 0, "new": 1}), {"step": 7, "old": 2}, [])
        >>> found.missing, found.unexpected
        (['new'], ['old'])
    """
    return _Matcher(template, parse(tree, len(records)), records, wanted, rename, add).match()


class _Matcher:
    def __init__(
        self,
        template: Template,
        root: Item,
        records: Sequence[Record],
        wanted: Callable[[str], bool] | None,
        rename: Callable[[str], str] | None,
        add: bool,
    ) -> None:
        self.template, self.root, self.records, self.add = template, root, records, add
        self.wanted = wanted or (lambda _: True)
        self.rename = rename or (lambda name: name)
        self.names = leaf_names(root)
        self.by_name = {self.names[id(leaf)]: leaf for leaf in leaves_of(root)}
        self.result = Match()
        self.used: set[int] = set()
        self.targets: dict[tuple[int, Any], Target] = {}
        self.rows: dict[int, list[int]] = {}  # place in the state's row of tensors -> records that go there
        self.missing: list[tuple[str, int | None]] = []

    def match(self) -> Match:
        found = self.result
        found.action = self.place(self.template.root, self.root)
        self.check_fixed(self.template.root)
        # A tensor that is tied to one that is filled is not missing.
        found.missing = [name for name, row in self.missing if row is None or row not in self.rows]
        found.unexpected = [
            name for name, leaf in self.by_name.items() if id(leaf) not in self.used and self.wanted(name)
        ]
        found.targets = list(self.targets.values())
        known = {*self.template.leaf_names.values(), *self.by_name}
        found.idle = bool(known) and not any(map(self.wanted, known))
        pairs = [(group[0], other) for group in self.rows.values() for other in group[1:]]
        found.shared = [(self.records[a].name, self.records[b].name) for a, b in pairs]
        return found

    def place(self, mine: Item, theirs: Item | None) -> Action:
        """Return what fills a place of the state from a place of the checkpoint, if that has one."""
        if mine.kind in LEAVES:
            return self.leaf(mine, theirs)
        if mine.kind == "stateful":
            return self.stateful(mine, theirs)
        if theirs is None:
            return self.inside(mine, {})
        if not _alike(mine, theirs):
            return self.mismatch(mine, theirs)
        if not mine.children:
            return self.refill(mine, theirs) if self.wants(theirs, mine.path) else self.keep(mine, theirs)
        if theirs.kind == "value":  # a list of plain numbers, where the state has one with nan or the like in it
            if _only_values(mine):
                return self.refill(mine, theirs)
            if len(theirs.value) != len(mine.children):
                return self.mismatch(mine, theirs)
            self.use(theirs)
            theirs = _spread(theirs)
        return self.inside(mine, dict(theirs.children))

    def inside(self, mine: Item, theirs: dict[Any, Item], owner: Any = None) -> Action:
        """Return what fills a container, which may be the state_dict of a module."""
        actions = []
        for key, child in mine.children:
            there = theirs.get(key)
            if there is not None and is_extra(owner, key):
                actions.append((key, self.adopt(there, child, EXTRA, child.path, len(child.path))))
            else:
                actions.append((key, self.place(child, there)))
        known = {key for key, _ in mine.children}
        extra: list[tuple[Any, Action]] = []
        if self.add and mine.kind != "tuple":
            for key, child in theirs.items():
                path = (*mine.path, key)
                if key not in known and self.wants(child, path):
                    extra.append((key, self.adopt(child, None, None, path, len(path))))
        return lambda local: refresh(mine, actions, extra, local)

    def leaf(self, mine: Item, theirs: Item | None) -> Action:
        name = self.template.leaf_names[id(mine)]
        there = self.rename(name)
        if there != name or theirs is None:
            theirs = self.by_name.get(there)
        if not self.wanted(name):
            return self.keep(mine, theirs)
        is_tensor = mine.kind in ("tensor", "numpy")
        if theirs is None:
            self.missing.append((name, self.template.row.number[id(mine)] if is_tensor else None))
            return lambda _: mine.value
        if (mine.kind == "local") != (theirs.kind == "local"):
            return self.mismatch(mine, theirs)
        if mine.kind == "local":
            self.use(theirs)
            self.result.locals[theirs.number] = name
            return lambda local: self.put_local(mine, theirs.number, local)
        if is_tensor:
            if theirs.kind not in ("tensor", "numpy"):
                return self.mismatch(mine, theirs)
            self.use(theirs)
            target = self.target(mine, theirs, name)
            return lambda _: as_saved(mine, target.tensor)
        if mine.value is None:
            return self.adopt(theirs, None, None, mine.path, len(mine.path))
        if theirs.kind == "value" or (_alike(mine, theirs) and _only_values(theirs)):
            if _alike(mine, theirs) and type(mine.value) is list:
                return self.refill(mine, theirs)
            self.use(theirs)
            return lambda local: build(theirs, self.no_tensor, local)
        if type(mine.value) in (list, tuple) and _alike(mine, theirs):  # of plain values, which may be None
            spread = _spread(mine)
            self.template.leaf_names.update((id(child), plain(child.path)) for _, child in spread.children)
            return self.inside(spread, dict(theirs.children))
        return self.mismatch(mine, theirs)

    def stateful(self, mine: Item, theirs: Item | None) -> Action:
        """Return what makes the new state_dict of an object and hands it over."""
        name, given = plain(mine.path), mine.children[0][1]
        moved = self.rename(f"{name}.x").removesuffix(".x") if mine.path else name
        if moved != name or theirs is None:
            theirs = self.container(moved) or theirs
        if not self.wants(given, mine.path) and (theirs is None or not self.wants(theirs, mine.path)):
            return self.keep(mine, theirs)
        before = len(self.used)
        if is_strict(mine.value) and theirs is not None and _alike(given, theirs) and given.children:
            action = self.inside(given, dict(theirs.children), mine.value)
        elif is_strict(mine.value) or theirs is None:
            action = self.place(given, theirs)
        elif theirs.kind == "local":
            return self.mismatch(mine, theirs)
        else:
            self.check_groups(mine, theirs)
            action = self.adopt(theirs, given, mine.value, mine.path, len(mine.path))

        if theirs is None and len(self.used) == before:
            return lambda _: mine.value
        return lambda local: hand_over(mine, action(local))

    def check_groups(self, mine: Item, theirs: Item) -> None:
        """Find an optimizer with other groups of parameters, which it would refuse when all else is loaded."""
        sizes, saved = group_sizes(mine.value), dict(theirs.children).get("param_groups")
        if sizes is None or saved is None:
            return
        groups = [dict(group.children).get("params") for _, group in saved.children]
        old = [len(g.children) if g.children else len(g.value or ()) for g in groups if g is not None]
        if old != sizes:
            self.result.kinds.append(
                f"{spell((*mine.path, 'param_groups'))}: groups of {old} parameters in the checkpoint, of {sizes} in "
                f"the state"
            )

    def check_fixed(self, mine: Item) -> None:
        """Find values that stand in no dict or list, so that nothing can be put in their place."""
        if mine.kind == "tuple":
            for _, child in mine.children:
                self.check_fixed(child)
        elif mine.kind == "value":
            name = self.template.leaf_names[id(mine)]
            theirs = self.by_name.get(self.rename(name))
            if theirs is not None and self.wanted(name) and theirs.kind in LEAVES and theirs.node != mine.node:
                where = "is the state itself" if not mine.path else "stands in a tuple that is the state itself"
                self.result.kinds.append(
                    f"{spell(mine.path)}: {_kind(mine)} that {where} cannot be replaced; put it into a dict or list"
                )

    def adopt(self, theirs: Item, mine: Item | None, owner: Any, path: Path, base: int) -> Action:
        """Return what builds a value as the checkpoint has it, of the tensors that the state has, where it has them."""
        if theirs.kind in LEAVES:
            return self.adopt_leaf(theirs, mine, owner, path, base)
        both = mine is not None and (theirs.kind in _MAPPINGS) == (mine.kind in _MAPPINGS) and mine.kind not in LEAVES
        old = dict(mine.children) if mine is not None and both else {}
        actions = []
        for key, child in theirs.children:
            if key in old or theirs.kind not in _MAPPINGS or self.wants(child, (*path, key)):
                actions.append((key, self.adopt(child, old.get(key), owner, (*path, key), base)))
        if theirs.kind in _MAPPINGS:
            known = {key for key, _ in theirs.children}
            for key, child in old.items():
                if key not in known and not _is_dropped(owner):
                    self.miss(child, owner)
                    actions.append((key, _constant(child.value)))
        return lambda local: put(theirs.kind, [(key, action(local)) for key, action in actions])

    def adopt_leaf(self, theirs: Item, mine: Item | None, owner: Any, path: Path, base: int) -> Action:
        self.use(theirs)
        name = plain(path)
        if not self.wanted(name):
            return _constant(None if mine is None else mine.value)
        if theirs.kind == "local":
            self.result.locals[theirs.number] = name
            return lambda local: (
                (None if mine is None else mine.value) if theirs.number in self.result.kept else local(theirs.number)
            )
        if theirs.kind == "value":
            return lambda local: build(theirs, self.no_tensor, local)
        if mine is not None and mine.kind in ("tensor", "numpy") and (owner is not EXTRA or self.fits(mine, theirs)):
            target = self.target(mine, theirs, name)
            existing = mine
            return lambda _: as_saved(existing, target.tensor)
        key = (theirs.number, ("new", id(owner)))
        if key not in self.targets:
            record = self.records[theirs.number]
            shape, dtype = tuple(record.shape), dtype_of(record.dtype)
            self.targets[key] = Target(theirs.number, name, None, False, shape, dtype, owner, path[base:])
        target = self.targets[key]
        return lambda local: build(theirs, lambda _: target.tensor, local)

    def fits(self, mine: Item, theirs: Item) -> bool:
        """Tell whether a tensor can be filled as it is; one of an extra state that cannot be is replaced."""
        record, tensor = self.records[theirs.number], self.template.row.tensors[self.template.row.number[id(mine)]][1]
        return tuple(record.shape) == tuple(tensor.shape) and dtype_of(record.dtype) == tensor.dtype

    def target(self, mine: Item, theirs: Item, name: str) -> Target:
        row = self.template.row.number[id(mine)]
        key = (theirs.number, row)
        if key not in self.targets:
            record = self.records[theirs.number]
            self.rows.setdefault(row, []).append(theirs.number)
            tensor = self.template.row.tensors[row][1]
            self.targets[key] = Target(
                theirs.number, name, tensor, mine.kind == "numpy", tuple(record.shape), dtype_of(record.dtype)
            )
        return self.targets[key]

    def refill(self, mine: Item, theirs: Item) -> Action:
        """Return what gives a dict or list of the state the contents that the checkpoint has."""
        container = mine.value
        action = self.adopt(theirs, None, None, mine.path, len(mine.path))

        def act(local: Reader) -> Any:
            new = action(local)
            if isinstance(container, list):
                container[:] = new
            elif isinstance(container, dict):
                container.clear()
                container.update(new)
            else:
                return new
            return container

        return act

    def keep(self, mine: Item, theirs: Item | None) -> Action:
        if theirs is not None:
            self.use(theirs)
        return lambda _: mine.value

    def mismatch(self, mine: Item, theirs: Item) -> Action:
        if self.wants(mine, mine.path):
            what = f"{_kind(theirs)} in the checkpoint, {_kind(mine)} in the state"
            if theirs.kind == "local":
                what += "; mark it with local(...)"
            self.result.kinds.append(f"{spell(mine.path)}: {what}")
        return self.keep(mine, theirs)

    def miss(self, child: Item, owner: Any) -> None:
        for leaf in leaves_of(child):
            is_tensor = leaf.kind in ("tensor", "numpy")
            name = self.template.leaf_names[id(leaf)]
            if misses(owner, is_tensor) and self.wanted(name):
                self.missing.append((name, self.template.row.number[id(leaf)] if is_tensor else None))

    def use(self, theirs: Item) -> None:
        self.used.update(id(leaf) for leaf in leaves_of(theirs))

    def wants(self, item: Item, path: Path) -> bool:
        """Tell whether anything below an item, which stands at `path` in the state, is to be loaded."""
        leaves = list(leaves_of(item))
        return not leaves or any(self.wanted(plain((*path, *leaf.path[len(item.path) :]))) for leaf in leaves)

    def container(self, name: str) -> Item | None:
        stack = [self.root]
        while stack:
            item = stack.pop()
            if item.kind not in LEAVES:
                if item.path and plain(item.path) == name:
                    return item
                stack += [child for _, child in item.children]
        return None

    def put_local(self, mine: Item, slot: int, local: Reader) -> Any:
        if slot not in self.result.kept:
            mine.value.value = into(mine.value.value, local(slot))
        return mine.value

    @staticmethod
    def no_tensor(number: int) -> Any:
        raise AssertionError(f"tensor {number} in a value")


def _constant(value: Any) -> Action:
    return lambda _: value


def _is_dropped(owner: Any) -> bool:
    """Whether what the checkpoint lacks is dropped: an optimizer has the state that was saved, no more."""
    return owner is not None and not misses(owner, True)


def _only_values(item: Item) -> bool:
    return all(leaf.kind == "value" for leaf in leaves_of(item))


def _spread(item: Item) -> Item:
    """Return a list or tuple of plain values, which is one leaf, as a container of leaves."""
    children = [(n, Item("value", (*item.path, n), value, value)) for n, value in enumerate(item.value)]
    return Item(type(item.value).__name__, item.path, item.value, item.node, children=children)


def _alike(mine: Item, theirs: Item) -> bool:
    """Tell whether two places are both mappings, both lists or both tuples, as containers or as lists of numbers."""
    return _family(mine) == _family(theirs)


def _family(item: Item) -> str:
    if item.kind in _MAPPINGS:
        return "dict"
    if item.kind == "value":
        return type(item.value).__name__ if type(item.value) in (list, tuple) else "value"
    return item.kind


def _kind(item: Item) -> str:
    if item.kind in _MAPPINGS:
        return "a dict"
    if item.kind == "stateful":
        return f"a {type(item.value).__qualname__}"
    if item.kind == "local":
        return "a value for each rank"
    if item.kind == "value":
        if item.value is None:
            return "None"
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(item.value, numpy.generic):
            return "a numpy scalar"
        return f"a {type(item.value).__name__}"
    return {"tensor": "a tensor", "numpy": "a numpy array", "list": "a list", "tuple": "a tuple"}[item.kind]
