"""What must be the same on all ranks, as one number to compare and as words where it is not."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._codec.memory import memory
from .._geometry import Explicit, Layout
from .nodes import leaves
from .tensors import Held, TensorSpec

__all__ = ["canonical", "difference", "digest", "small_values"]

SMALL = 16 * 1024
"""Bytes of a replicated tensor up to which all of its values are compared; of larger ones a sample is."""
BLOCKS = 8
"""Stretches of a sample that begin at even distances from the first element on; one more ends with the last."""
BLOCK = 512
"""Bytes of such a stretch."""
ALIGN = 16
"""Bytes of the longest element: each stretch begins with a whole one."""
Said = tuple[Sequence[TensorSpec], Any, Mapping[str, str]]
"""Specs, tree and hashes of replicated tensors."""


def small_values(helds: Sequence[Held]) -> dict[str, str]:
    """Return hashes of the replicated tensors by name: of all their bytes up to 16 KiB, else of a sample of 4.5 KiB.

    Without them two ranks with different random states under one key would look alike, and one state would be lost; or
    a large tensor would be put together from pieces of different ones.
    """
    hashes: dict[str, str] = {}
    found: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for held in helds:
        spec = held.spec
        if isinstance(spec.layout, Explicit) or any(text != "R" for text in spec.layout.placements):
            continue
        for _, view in held.parts:
            if view.numel() * view.element_size() <= SMALL:
                found.setdefault(view.device, []).append((spec.name, view))
            elif view.device.type != "cpu" or not view.is_contiguous() or view.is_conj() or view.is_neg():
                found.setdefault(view.device, []).append((spec.name, _sample(view)))
            else:
                hashes[spec.name] = _hash(_stretches(memory(view)))
    for device, views in found.items():
        flat = [_bytes(view) for _, view in views]
        if device.type != "cpu":  # one copy for all
            sizes = [piece.numel() for piece in flat]
            flat = list(torch.split(torch.cat(flat).cpu(), sizes))
        for (name, _), data in zip(views, flat, strict=True):
            hashes[name] = _hash(memory(data))
    return hashes


def digest(specs: Sequence[TensorSpec], tree: Any, small: Mapping[str, str]) -> bytes:
    """Return 32 bytes that are equal on two ranks exactly if they hold the same keys, layouts and values.

    The order in which dicts were filled does not matter, nor do the boxes of layouts without a rule, which differ by
    rank anyway.

    Args:
        specs: the tensors that the tree counts.
        tree: JSON of the state.
        small: hashes of small tensors.

    Example:
        >>> digest([], {"a": 1, "b": 2}, {}) == digest([], {"b": 2, "a": 1}, {})
        True
    """
    layouts: dict[int, int] = {}
    listed: list[Any] = []
    rows = []
    for spec in sorted(specs, key=lambda spec: spec.name):
        number = layouts.get(id(spec.layout))
        if number is None:
            entry = _layout(spec.layout)
            if entry not in listed:
                listed.append(entry)
            number = layouts[id(spec.layout)] = listed.index(entry)
        rows.append([spec.name, spec.dtype, spec.shape, number])
    said = [listed, rows, canonical(tree, [spec.name for spec in specs]), dict(small)]
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).digest()


def difference(mine: Said, theirs: Said, limit: int = 5) -> list[str]:
    """Return in words where two ranks differ: one line per key, the first ones.

    Args:
        mine: specs, tree and hashes of one rank.
        theirs: of another.
        limit: number of lines.

    Example:
        >>> difference(([], {"a": 1}, {}), ([], {"a": 2, "b": 3}, {}))
        ['a: 1 | 2', 'b: (absent) | 3']
    """
    a, b = _words(mine), _words(theirs)
    names = [*a, *(name for name in b if name not in a)]
    lines = [f"{n}: {_short(a.get(n))} | {_short(b.get(n))}" for n in names if a.get(n) != b.get(n)]
    if not lines and digest(*mine) != digest(*theirs):
        lines.append("the containers that hold the keys: their kinds differ, or empty ones are in one of them only")
    return lines[:limit]


def canonical(tree: Any, names: Sequence[str]) -> Any:
    """Return a tree with names in the place of the numbers of tensors, and with dicts in one order."""
    if isinstance(tree, list):
        return [canonical(node, names) for node in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        tag, payload = next(iter(tree.items()))
        if tag in ("$tensor", "$numpy"):
            return {tag: names[payload]}
        if tag in ("$dict", "$counter"):
            pairs = [[key, canonical(node, names)] for key, node in payload]
            return {tag: sorted(pairs, key=lambda pair: json.dumps(pair[0], sort_keys=True))}
    return {key: canonical(node, names) for key, node in tree.items()}


def _layout(layout: Layout) -> Any:
    if isinstance(layout, Explicit):
        return "explicit"
    ranks = layout.mesh.ranks
    said = [ranks.start, ranks.stop, ranks.step] if isinstance(ranks, range) else [list(ranks)]
    return [list(layout.mesh.shape), said, list(layout.placements)]


def _bytes(view: Tensor) -> Tensor:
    dense = view.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if dense.dtype == torch.complex32:  # has no view as bytes of its own
        dense = dense.view(torch.int32)
    return dense.view(torch.uint8)


def _hash(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _stretches(data: memoryview) -> bytes:
    """Return the bytes that a sample has of a large tensor whose elements lie in order."""
    step = len(data) // BLOCKS // ALIGN * ALIGN
    stretches = [data[at : at + BLOCK] for at in range(0, BLOCKS * step, step)]
    return b"".join([*stretches, data[-BLOCK:]])


def _sample(view: Tensor) -> Tensor:
    """Return the elements of which `_stretches` returns the bytes, of a tensor of any strides, on its device."""
    size, total = view.element_size(), view.numel()
    count, step = BLOCK // size, total * size // BLOCKS // ALIGN * ALIGN // size
    if view.is_contiguous():
        flat = view.detach().view(-1)
        return torch.cat([flat[: BLOCKS * step].view(BLOCKS, step)[:, :count].reshape(-1), flat[-count:]])
    if size == 1:  # some dtypes of a byte cannot be indexed
        view = view.detach().view(torch.uint8)
    starts = torch.tensor([*range(0, BLOCKS * step, step), total - count])
    at = (starts[:, None] + torch.arange(count)).view(-1).to(view.device)
    return view.detach()[torch.unravel_index(at, view.shape)]


def _words(said: Said) -> dict[str, str]:
    specs, tree, small = said
    words: dict[str, str] = dict(_leaf_words(specs, tree))
    for name, value in small.items():
        words[name] = words.get(name, "a tensor") + f", hash of its values {value[:12]}"
    return words


def _leaf_words(specs: Sequence[TensorSpec], tree: Any) -> Iterator[tuple[str, str]]:
    for leaf in leaves(tree):
        if leaf.record is not None:
            spec = specs[leaf.record]
            tied = "" if spec.name == leaf.name else f", tied to {spec.name}"
            yield leaf.name, f"{spec.dtype} {list(spec.shape)} {layout_words(spec.layout)}{tied}"
        else:
            yield leaf.name, json.dumps(leaf.node, sort_keys=True)


def layout_words(layout: Layout) -> str:
    """Return a layout for messages.

    Example:
        >>> from .._geometry import Mesh, Rule
        >>> layout_words(Rule(Mesh((2, 2), range(4)), ("S(0)", "R")))
        'S(0), R on a mesh 2 x 2 of ranks 0...3'
    """
    if isinstance(layout, Explicit):
        return "in boxes"
    ranks = list(layout.mesh.ranks)
    some = f"{ranks[0]}...{ranks[-1]}" if math.prod(layout.mesh.shape) > 2 else ", ".join(map(str, ranks))
    return f"{', '.join(layout.placements)} on a mesh {' x '.join(map(str, layout.mesh.shape))} of ranks {some}"


def _short(text: str | None) -> str:
    if text is None:
        return "(absent)"
    return text if len(text) <= 200 else text[:120] + "..." + text[-70:]
