"""Export to and import from `torch.save` files. Nothing but builtins and tensors goes out, nothing else comes in.

Both map the file, so that tensors never lie in memory as a whole: an export makes the file with room for the elements
and fills it block by block, an import reads from the mapped pages.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _state
from .._codec import as_bytes
from .._geometry import Box, Piece
from .._load import Checkpoint, open_checkpoint
from .._load.fresh import prune
from .._load.names import Keys, chooser
from .._save.options import SaveOptions
from .._storage import Storage
from ..errors import FormatError, MismatchError, StateError
from .common import (
    ExportReport,
    ImportReport,
    NewFiles,
    Progress,
    blocks,
    export_dtype,
    fill,
    local_path,
    record_of,
    refuse_existing,
)
from .names import below
from .safetensors_source import nested_below
from .streaming import Source, save_stream

__all__ = ["build_items", "chosen", "chosen_items", "export_torch", "import_torch", "tensor_source"]


def export_torch(
    path: str | os.PathLike[str] | Storage,
    out: str | os.PathLike[str],
    *,
    step: int | str = "latest",
    keys: Keys = None,
    dtype: torch.dtype | str | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a step as a file that `torch.load(file, weights_only=True)` reads, with the same dicts, lists and values.

    Numpy arrays become tensors, numpy scalars Python numbers. Takes memory for one block of 16 MiB; the file's pages
    are the system's to write back. The check sums of the zip file are not filled in, which torch does not look at.

    Args:
        path: the store.
        out: the file.
        step: number of the step, or "latest".
        keys: pattern or patterns of names ("model.*"), or a function of a name; None: all.
        dtype: floating point tensors are converted to this one; None: as they are.
        overwrite: replace the file.
        verify: check the checksums of all that is read.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was written. Values of single ranks are left out, unless one rank saved.

    Raises:
        MissingStepError: there is no such step.
        StateError: a value that `weights_only=True` would refuse.
        CheckpointError: something is at `out` already.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(f"{folder}/run", {"model": {"w": torch.ones(2)}, "step": 3})
        >>> _ = ck.export_torch(f"{folder}/run", f"{folder}/state.pt")
        >>> torch.load(f"{folder}/state.pt", weights_only=True)
        {'model': {'w': tensor([1., 1.])}, 'step': 3}
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import set_default_mmap_options, skip_data

    target = local_path(out, "out")
    refuse_existing(target, overwrite)
    with open_checkpoint(path, step) as checkpoint, NewFiles() as new:
        root, skipped = chosen_items(checkpoint, keys)

        def make(number: int) -> Tensor:
            record = record_of(checkpoint, number)
            return torch.empty(record.shape, dtype=export_dtype(record.dtype, dtype))

        partial = str(new.place(target))
        with FakeTensorMode():
            state = build_items(root, make)
        with skip_data(materialize_fake_tensors=True):
            torch.save(state, partial)
        numbers = {leaf.number for leaf in _state.leaves_of(root) if leaf.kind in ("tensor", "numpy")}
        total, done = 0, 0
        if numbers:
            with set_default_mmap_options(mmap.MAP_SHARED):  # what is put into the tensors goes to the file
                mapped = torch.load(partial, mmap=True, weights_only=True)
            targets = dict(_pairs(root, mapped))
            total = sum(tensor.nbytes for tensor in targets.values())
            for number, tensor in targets.items():
                flat = tensor.view(-1)
                whole = Box.whole(tuple(tensor.shape))
                for start, stop in blocks(whole.numel, record_of(checkpoint, number).itemsize):
                    fill(checkpoint, number, Piece(whole, start, stop), flat[start:stop], verify=verify)
                    done += (stop - start) * tensor.element_size()
                    if progress is not None:
                        progress(done, total)
            del mapped, targets
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        return ExportReport(str(target), "torch", checkpoint.step, (str(target),), len(numbers), total, skipped)


def import_torch(
    src: str | os.PathLike[str],
    path: str | os.PathLike[str] | Storage,
    *,
    step: int | None = None,
    keys: Keys = None,
    under: str | None = None,
    overwrite: bool = False,
    metadata: Any = None,
    compress: str | None = None,
    dedup: str | None = "position",
    progress: Progress | None = None,
) -> ImportReport:
    """Save the state in a `torch.save` file as a step. It is opened with `weights_only=True`, always.

    Args:
        src: the file.
        path: the store.
        step: number of the step; None: the one after the latest.
        keys: pattern or patterns of names ("model.*"), or a function of a name; None: all.
        under: keys of the dict that the state is put in, joined by dots; None: it is the state.
        overwrite: save a step again that is there.
        metadata: JSON to keep with the step.
        compress: as for `save`.
        dedup: as for `save`.
        progress: called with (bytes done, bytes of all).

    Returns:
        What was saved.

    Raises:
        FormatError: the file holds objects that `weights_only=True` refuses, is damaged, or is none.
        StateError: it holds a tensor or value that no checkpoint holds.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> torch.save({"w": torch.ones(2), "epoch": 1}, f"{folder}/a.pt")
        >>> report = ck.import_torch(f"{folder}/a.pt", f"{folder}/run")
        >>> report.tensors, report.values
        (1, 1)
    """
    options = SaveOptions(compress=compress, dedup=dedup, overwrite=overwrite)
    place, source = below(under), local_path(src, "src")
    state = chosen(_load(str(source)), keys, source)
    sources: dict[int, Source] = {}
    values = _sources(state, "state", sources)
    info, packed = save_stream(
        path, nested_below(place, state), sources, step=step, metadata=metadata, options=options, progress=progress
    )
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in packed.tensors)
    return ImportReport(str(source), "torch", len(packed.tensors), total, values, info)


def chosen_items(checkpoint: Checkpoint, keys: Keys) -> tuple[_state.Item, tuple[str, ...]]:
    """Return the items of a step with the leaves that are wanted, and names of rank-local values that are left out.

    Values of the only rank stand in their places; numbers of its tensors count on from those of all.
    """
    count = len(checkpoint.names)
    root = _state.parse(checkpoint.manifest.tree, count)
    names, wanted = _state.leaf_names(root), chooser(keys)
    kept, skipped = set(), []
    own = checkpoint.index(0) if checkpoint.manifest.world == 1 else None
    for leaf in list(_state.leaves_of(root)):
        name = names[id(leaf)]
        if not wanted(name):
            continue
        if leaf.kind == "local":
            node = own.local[leaf.number] if own is not None and leaf.number < len(own.local) else _state.ABSENT
            if own is None or _state.is_absent(node):
                skipped.append(name)
                continue
            inside = _state.parse(node, len(own.local_tensors), 0)
            leaf.kind, leaf.value, leaf.node = inside.kind, inside.value, inside.node
            leaf.number, leaf.children = inside.number, inside.children
            for item in _state.leaves_of(leaf):
                item.number += count
                kept.add(id(item))
        kept.add(id(leaf))
    if not prune(root, kept, wanted) and names:
        raise MismatchError(f"keys: none of the {len(names)} keys of step {checkpoint.step} is wanted by {keys!r}.")
    return root, tuple(skipped)


def build_items(root: _state.Item, make: Callable[[int], Any]) -> Any:
    """Build a state with what `make` returns for each number of a tensor; numpy arrays become tensors."""
    made: dict[int, Any] = {}

    def tensor(number: int) -> Any:
        if number not in made:
            made[number] = make(number)
        return made[number]

    for leaf in _state.leaves_of(root):
        if leaf.kind == "numpy":
            leaf.kind = "tensor"
        elif leaf.kind == "value":
            _check_value(leaf)
    return _state.build(root, tensor, lambda _: None)


def _check_value(leaf: _state.Item) -> None:
    """Raise StateError for a value that `torch.load(weights_only=True)` would not read; numpy scalars are converted."""
    if type(leaf.value).__name__ == "NumpyScalar":
        leaf.value = _state.build(leaf, lambda _: None, lambda _: None).item()
    if leaf.value is None or type(leaf.value) in (bool, int, float, str):
        return
    buffer = io.BytesIO()
    torch.save(leaf.value, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError:
        raise StateError(
            f"{'.'.join(map(str, leaf.path))}: torch.load(weights_only=True) would not read a "
            f"{type(leaf.value).__name__}. Leave it out with keys=...."
        ) from None


def _pairs(item: _state.Item, value: Any) -> Any:
    """Yield (number, tensor) for the tensors of a state that was built of items."""
    if item.kind == "tensor":
        yield item.number, value
    elif item.kind not in _state.LEAVES:
        for key, child in item.children:
            yield from _pairs(child, value[key])


def _load(source: str) -> Any:
    try:
        return torch.load(source, weights_only=True, mmap=True, map_location="cpu")
    except FileNotFoundError:
        raise FormatError(f"src: {source} is not there.") from None
    except pickle.UnpicklingError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in lines if "global" in line.lower() or "class" in line.lower()), lines[0])
        raise FormatError(
            f"src: {source} holds more than tensors and plain values, and reading it could run its code: {why:.300} "
            f"Load it where you trust it, and save its state_dict again."
        ) from None
    except (RuntimeError, ValueError, EOFError, KeyError, TypeError, AttributeError, IndexError) as error:
        if "mmap can only be used" in str(error):
            raise FormatError(
                f"src: {source} is of the format before torch 1.6 or no file of torch.save. Load it and save it again "
                f"with torch.save, or with vescale_ckpt.save."
            ) from None
        raise FormatError(
            f"src: {source} is no whole file of torch.save: {type(error).__name__}: {str(error).splitlines()[0]:.300}"
        ) from None


def chosen(state: Any, keys: Keys, source: object) -> Any:
    """Return a state with the leaves that are wanted; None in lists and tuples for what is left out."""
    if keys is None:
        return state
    wanted, gone = chooser(keys), object()

    def keep(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            left = [(key, keep(child, (*path, str(key)))) for key, child in value.items()]
            left = [(key, child) for key, child in left if child is not gone]
            return type(value)(left) if left else gone
        if type(value) in (list, tuple) and any(isinstance(child, (Tensor, dict, list, tuple)) for child in value):
            items = [keep(child, (*path, str(number))) for number, child in enumerate(value)]
            if all(child is gone for child in items):
                return gone
            return type(value)(None if child is gone else child for child in items)
        return value if wanted(".".join(path)) else gone

    found = keep(state, ())
    if found is gone:
        raise MismatchError(f"keys: nothing in {source} is wanted by {keys!r}.")
    return found


def _sources(value: Any, path: str, found: dict[int, Source]) -> int:
    """Put a source for each tensor of a state into `found`; return how many other values there are."""
    if isinstance(value, Tensor):
        if id(value) not in found:
            found[id(value)] = tensor_source(value, path)
        return 0
    if isinstance(value, dict):
        return sum(_sources(child, f"{path}.{key}", found) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_sources(child, f"{path}.{number}", found) for number, child in enumerate(value))
    return 1


def tensor_source(tensor: Tensor, name: str) -> Source:
    """Return a source that reads a plain tensor in place, or block by block where its memory is not dense.

    Raises:
        StateError: it is sparse, quantized, on meta, or of a class of its own.
    """
    held = _state.plain(name, tensor)
    spec, parts = held.spec, held.parts
    view = parts[0][1] if parts else tensor.detach()
    dense = view.is_contiguous() and not view.is_conj() and not view.is_neg()
    whole = Box.whole(spec.shape)

    def fetch(piece: Piece) -> Tensor:
        size = view.element_size()
        if dense:
            return as_bytes(view.view(-1)[piece.start : piece.stop])
        out, at = torch.empty(piece.numel * size, dtype=torch.uint8), 0
        for box in piece.boxes():
            block = view[box.slices(whole)].resolve_conj().resolve_neg().contiguous()
            out[at : at + block.nbytes] = as_bytes(block.view(-1))
            at += block.nbytes
        return out

    return Source(spec.dtype, spec.shape, fetch)
