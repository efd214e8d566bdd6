"""`load_dict`: a state without a template, as it was saved, with whole tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import _state
from .._geometry import Box
from .._save.running import wait_for
from .._storage import Storage, open_storage
from .._words import counted
from ..errors import MismatchError
from .checkpoint import open_checkpoint
from .names import asked, chooser
from .target import Request

__all__ = ["load_dict", "prune"]


def load_dict(
    path: str | os.PathLike[str] | Storage,
    *,
    step: int | str = "latest",
    keys: str | Iterable[str] | Callable[[str], bool] | None = None,
    device: torch.device | str | None = None,
    verify: bool = True,
    rank: int | None = None,
    threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Return a state as it was saved: the same dicts, lists and values, with whole tensors, tied ones tied.

    Needs no process group; every process that calls it reads all that it asks for.

    Args:
        path: the store.
        step: number of the step, or "latest".
        keys: pattern or patterns of names ("model.*"), or a function of a name; only these leaves are loaded, and
            containers without any are left out, but for empty ones whose own name is wanted; in lists and tuples None
            stands for what is left out. None: all.
        device: of the tensors; None: the CPU.
        verify: check the checksums.
        rank: whose own values (`local`) are filled in; None: rank 0's if one rank saved, else they are left out.
        threads: that read at the same time.
        progress: called with numbers of bytes that have been read.

    Raises:
        MissingStepError: there is no such step.
        MismatchError: no leaf is wanted.
        CorruptionError: it is damaged; the message names the tensors.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(folder, {"model": {"w": torch.ones(2)}, "step": 3})
        >>> ck.load_dict(folder), ck.load_dict(folder, keys="step")
        ({'model': {'w': tensor([1., 1.])}, 'step': 3}, {'step': 3})
    """
    storage = open_storage(path)
    wait_for(storage)
    with open_checkpoint(storage, step, threads=threads) as checkpoint:
        manifest = checkpoint.manifest
        root = _state.parse(manifest.tree, len(manifest.tensors))
        names = _state.leaf_names(root)
        wanted = chooser(keys)
        kept = {id(leaf) for leaf in _state.leaves_of(root) if wanted(names[id(leaf)])}
        rank = 0 if rank is None and manifest.world == 1 else rank
        if rank is None:
            kept -= {id(leaf) for leaf in _state.leaves_of(root) if leaf.kind == "local"}
        if not prune(root, kept, wanted) and names:
            count = counted(len(names), "key")
            said = asked(keys, list(names.values()))
            raise MismatchError(f"keys: of the {count} of step {checkpoint.step} none is wanted {said}.")
        arrays = {leaf.number for leaf in _state.leaves_of(root) if leaf.kind == "numpy"}
        requests: list[Request] = []
        tensors: dict[int, Tensor] = {}

        def tensor(number: int) -> Tensor:
            if number not in tensors:
                record = manifest.tensors[number]
                where = "cpu" if number in arrays else device
                tensors[number] = torch.empty(record.shape, dtype=_state.dtype_of(record.dtype), device=where)
                requests.append(Request(number, Box.whole(record.shape), tensors[number]))
            return tensors[number]

        def local(slot: int) -> Any:
            assert rank is not None
            return read_local(checkpoint, rank, slot, requests)

        # Numpy arrays share the memory of their tensors, so they may be made before these are read.
        state = _state.build(root, tensor, local)
        checkpoint.read_many(requests, verify=verify, progress=progress, consequence="Nothing was returned.")
        return state


def read_local(checkpoint: Any, rank: int, slot: int, requests: list[Request]) -> Any:
    """Return one of a rank's own values; the requests that fill its tensors are added to `requests`."""
    index = checkpoint.index(rank)
    node = index.local[slot] if slot < len(index.local) else None
    if node is None or _state.is_absent(node):
        return None
    records, first = index.local_tensors, len(checkpoint.names)

    def tensor(number: int) -> Tensor:
        record = records[number]
        out = torch.empty(record.shape, dtype=_state.dtype_of(record.dtype))
        requests.append(Request(first + number, Box.whole(record.shape), out, rank))
        return out

    return _state.unpack(node, tensor, lambda _: None, tensors=len(records), locals=0)


def prune(item: _state.Item, kept: set[int], wanted: Callable[[str], bool]) -> bool:
    """Drop what is not wanted; tell whether anything is left.

    Args:
        item: what to look through.
        kept: ids of the leaves that stay; containers stay in which one is.
        wanted: tells by its name whether a container stays that was saved with nothing in it.
    """
    if item.kind in _state.LEAVES:
        return id(item) in kept
    if not item.children:
        return wanted(".".join(map(str, item.path)))
    left = [(key, child) for key, child in item.children if prune(child, kept, wanted)]
    lost = len(left) < len(item.children)
    if lost and left and item.kind in ("list", "tuple"):  # the others keep their places
        there = dict(left)
        left = [(key, there.get(key, _state.Item("value", child.path))) for key, child in item.children]
    item.children = left
    return bool(left)
