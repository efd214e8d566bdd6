"""One state out of those of ranks that hold different keys, as the stages of a pipeline do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .._geometry import Box, Explicit, Layout, Mesh, Rule
from ..errors import RanksError
from .agree import canonical, layout_words
from .items import Item, leaf_names, leaves_of
from .names import named, plain, spell
from .nodes import parse
from .tensors import TensorSpec
from .tree import node_of

__all__ = ["held_by", "merge"]

_MAPPINGS = ("dict", "ordered")
Entry = tuple[Sequence[int], TensorSpec]
"""The ranks of a group, and the spec that they have."""


def held_by(spec: TensorSpec, rank: int) -> TensorSpec:
    """Return the spec of a tensor of which one rank alone has the values that count.

    Example:
        >>> both = TensorSpec("w", "int8", (2,), Rule(Mesh((2,), range(2)), ("R",)))
        >>> held_by(both, 1).layout.holders((2,), 1)
        (1,)
    """
    return TensorSpec(spec.name, spec.dtype, spec.shape, Rule(Mesh((1,), (rank,)), ("R",)))


def merge(
    parts: Sequence[tuple[Sequence[int], Sequence[TensorSpec], Any]], *, first: bool = False
) -> tuple[list[TensorSpec], Any]:
    """Return specs and tree of the union of what groups of ranks hold.

    Args:
        parts: per group its ranks, its specs, and the tree that counts those. Ranks of a group hold the same keys.
        first: take Python values that differ from the first group; else they are an error.

    Returns:
        The specs by name, and the tree that counts them.

    Raises:
        RanksError: two groups have different things under one key; names the key, a rank of each, and both things.

    Example:
        >>> merge([((0,), [], {"a": 1}), ((1,), [], {"b": 2, "a": 1})])
        ([], {'a': 1, 'b': 2})
    """
    roots = [(ranks, parse(tree, len(specs)), specs) for ranks, specs, tree in parts]
    _check_names([(ranks, root) for ranks, root, _ in roots])
    merger = _Merger(first)
    for ranks, _, specs in roots:
        merger.collect(ranks, specs)
    ranks, root, specs = roots[0]
    merged = _copy(root, specs, ranks)
    for ranks, root, specs in roots[1:]:
        merged = merger.union(merged, _copy(root, specs, ranks))
    found = merger.specs()
    number = {spec.name: place for place, spec in enumerate(found)}
    names = leaf_names(merged)
    leaves = list(leaves_of(merged))
    slots = sorted((leaf for leaf in leaves if leaf.kind == "local"), key=lambda leaf: names[id(leaf)])
    numbers = {id(leaf): number[leaf.value.name] for leaf in leaves if leaf.kind in ("tensor", "numpy")}
    return found, node_of(merged, numbers, {id(leaf): slot for slot, leaf in enumerate(slots)})


class _Merger:
    def __init__(self, first: bool) -> None:
        self.first = first
        self.entries: dict[str, list[Entry]] = {}

    def collect(self, ranks: Sequence[int], specs: Sequence[TensorSpec]) -> None:
        """Take note of who has which tensors."""
        for spec in specs:
            self.entries.setdefault(spec.name, []).append((ranks, spec))

    def union(self, mine: Item, theirs: Item) -> Item:
        """Return what two groups have at one place."""
        if mine.kind in _MAPPINGS and theirs.kind == mine.kind:
            children = dict(mine.children)
            for key, child in theirs.children:
                children[key] = self.union(children[key], child) if key in children else child
            mine.children = list(children.items())
            return mine
        if mine.kind in ("list", "tuple") and theirs.kind == mine.kind and len(mine.children) == len(theirs.children):
            pairs = zip(mine.children, theirs.children, strict=True)
            mine.children = [(key, self.union(child, other)) for (key, child), (_, other) in pairs]
            return mine
        if mine.kind == theirs.kind == "local":
            return mine
        if mine.kind == theirs.kind and mine.kind in ("tensor", "numpy") and mine.value.name == theirs.value.name:
            return mine
        if mine.kind == theirs.kind == "value" and (self.first or _json(mine.node) == _json(theirs.node)):
            return mine
        raise _conflict(mine, theirs)

    def specs(self) -> list[TensorSpec]:
        """Return one spec per tensor, by name."""
        found = []
        for name in sorted(self.entries):
            entries = self.entries[name]
            ranks, first = entries[0]
            for others, spec in entries[1:]:
                if (spec.dtype, spec.shape) != (first.dtype, first.shape):
                    raise _differ(name, ranks, others, _words(first), _words(spec), "")
            found.append(TensorSpec(name, first.dtype, first.shape, _layout(name, entries)))
        return found


def _layout(name: str, entries: Sequence[Entry]) -> Layout:
    layouts = [spec.layout for _, spec in entries]
    rules = [layout for layout in layouts if isinstance(layout, Rule)]
    if len(rules) != len(layouts):
        return Explicit(tuple(part for ranks, spec in entries for part in _boxes(spec, ranks)))
    first = rules[0]
    if any(
        _is_replicated(rule) != _is_replicated(first) or (not _is_replicated(rule) and not _stacks(rule, first))
        for rule in rules
    ):
        at = next(n for n, layout in enumerate(layouts) if layout != layouts[0])
        hint = "Give the tensor the same mesh and placements on all ranks that hold it."
        raise _differ(name, entries[0][0], entries[at][0], _words(entries[0][1]), _words(entries[at][1]), hint)
    if _is_replicated(first):
        return _holders(name, entries, rules)
    return _sharded(name, entries, rules)


def _boxes(spec: TensorSpec, ranks: Sequence[int]) -> Sequence[tuple[int, tuple[Box, ...]]]:
    """Return what is known of the boxes of a group; where some are listed, those of a rule are listed as well."""
    if isinstance(spec.layout, Explicit):
        return spec.layout.parts
    return [(rank, boxes) for rank in ranks if (boxes := spec.layout.boxes(spec.shape, rank))]


def _holders(name: str, entries: Sequence[Entry], rules: Sequence[Rule]) -> Rule:
    """Return the rule of a tensor of which each of some ranks holds all."""
    if all(rule == rules[0] for rule in rules) and _covered(rules[0], entries):
        return rules[0]
    holders = sorted({rank for (ranks, _), rule in zip(entries, rules, strict=True) for rank in _both(rule, ranks)})
    if not holders:
        raise RanksError(
            f"state: {name}: none of the ranks that have this key is in the mesh of the tensor "
            f"({layout_words(rules[0])}), so nobody holds its data."
        )
    return Rule(Mesh((len(holders),), tuple(holders)), ("R",))


def _sharded(name: str, entries: Sequence[Entry], rules: Sequence[Rule]) -> Rule:
    """Return the rule of a tensor that is sharded on one mesh, or on several that hold the same."""
    distinct: list[Rule] = []
    for rule in rules:
        if rule not in distinct:
            distinct.append(rule)
    having = {rank for ranks, _ in entries for rank in ranks}
    for rule in distinct:
        lacking = [rank for rank in rule.mesh.ranks if rank not in having]
        if lacking:
            raise RanksError(
                f"state: {name} is sharded ({layout_words(rule)}), but the state of rank {lacking[0]} does not have "
                f"this key. Every rank of its mesh must save it."
            )
    if len(distinct) == 1:
        return distinct[0]
    ranks = [rank for rule in distinct for rank in rule.mesh.ranks]
    if len(set(ranks)) != len(ranks):
        words = [layout_words(rule) for rule in distinct[:2]]
        at = rules.index(distinct[1])
        hint = "The meshes overlap, but are not the same."
        raise _differ(name, entries[0][0], entries[at][0], words[0], words[1], hint)
    distinct.sort(key=lambda rule: min(rule.mesh.ranks))
    ranks = [rank for rule in distinct for rank in rule.mesh.ranks]
    mesh = Mesh((len(distinct), *distinct[0].mesh.shape), tuple(ranks))
    return Rule(mesh, ("R", *distinct[0].placements))


def _both(rule: Rule, ranks: Sequence[int]) -> list[int]:
    members = rule.mesh.ranks if isinstance(rule.mesh.ranks, range) else set(rule.mesh.ranks)
    return [rank for rank in ranks if rank in members]


def _covered(rule: Rule, entries: Sequence[Entry]) -> bool:
    return set(rule.mesh.ranks) <= {rank for ranks, _ in entries for rank in ranks}


def _is_replicated(rule: Rule) -> bool:
    return all(text == "R" for text in rule.placements)


def _stacks(rule: Rule, first: Rule) -> bool:
    return rule.mesh.shape == first.mesh.shape and rule.placements == first.placements


def _check_names(roots: Sequence[tuple[Sequence[int], Item]]) -> None:
    """Raise RanksError if a leaf has another name in the whole: ranks find what they hold by the name they know."""
    paths = list(dict.fromkeys(leaf.path for _, root in roots for leaf in leaves_of(root)))
    whole = dict(zip(paths, named(paths), strict=True))
    for ranks, root in roots:
        names = leaf_names(root)
        for leaf in leaves_of(root):
            if whole[leaf.path] != names[id(leaf)]:
                same = [path for path in whole if path != leaf.path and plain(path) == plain(leaf.path)]
                raise RanksError(
                    f"state: two different keys have the name {spell(leaf.path)}: {ascii(leaf.path)[:200]} on rank "
                    f"{ranks[0]} and {ascii(same[0] if same else whole[leaf.path])[:200]} on another rank. Rename one "
                    f"of them."
                )


def _copy(item: Item, specs: Sequence[TensorSpec], ranks: Sequence[int]) -> Item:
    """Return a tree that may be changed, whose tensors know their specs and whose values know who has them."""
    value = specs[item.number] if item.kind in ("tensor", "numpy") else item.value
    children = [(key, _copy(child, specs, ranks)) for key, child in item.children]
    return Item(item.kind, item.path, value, item.node, ranks[0], children)


def _conflict(mine: Item, theirs: Item) -> RanksError:
    text = spell(mine.path)
    hint = (
        f'Wrap it in `vescale_ckpt.local(...)` if each rank is to keep its own, save with differing="first" to keep '
        f"that of rank {mine.number} only, or make the ranks agree."
    )
    if "tensor" in (mine.kind, theirs.kind) and mine.kind == theirs.kind:
        hint = "It is tied to other keys on some of the ranks only; tie it on all, or use different keys."
    elif mine.kind != "value" or theirs.kind != "value":
        hint = "Use different keys, or make the ranks agree."
    return _differ(text, (mine.number,), (theirs.number,), _what(mine), _what(theirs), hint)


def _differ(name: str, ranks: Sequence[int], others: Sequence[int], a: str, b: str, hint: str) -> RanksError:
    text = f"state: {name} is {a} on rank {ranks[0]}, but {b} on rank {others[0]}."
    return RanksError(f"{text} {hint}".rstrip())


def _what(item: Item) -> str:
    if item.kind in ("tensor", "numpy"):
        return f"the tensor {item.value.name}"
    if item.kind == "value":
        text = _json(item.node)
        return text if len(text) <= 100 else text[:60] + "..." + text[-35:]
    if item.kind == "local":
        return "a value of each rank's own"
    count = len(item.children)
    return f"{'an OrderedDict' if item.kind == 'ordered' else 'a ' + item.kind} of {count}"


def _words(spec: TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)} {layout_words(spec.layout)}"


def _json(node: Any) -> str:
    return json.dumps(canonical(node, ()), sort_keys=True)
