"""`ls`, `show` and `cat`: what is in a store, a step, a tensor."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from .._state import Local
from ..errors import MissingStepError
from .arguments import UsageError, add_common, add_path, chosen, one_step, parse_slice, split_path, store_at
from .tables import count, number, printable, size, table, when, write, write_json

__all__ = ["register"]


def register(commands: Any) -> None:
    """Add the commands."""
    ls = commands.add_parser("ls", help="list the steps of a store")
    add_path(ls, "folder or URL, with @STEP for that step alone")
    ls.set_defaults(run=run_ls)
    add_common(ls)
    show = commands.add_parser("show", help="show what is in a step: keys, shapes, layouts, sizes, ratios")
    add_path(show)
    show.add_argument("key", nargs="?", help="only keys that this pattern matches, e.g. 'model.*'")
    show.set_defaults(run=run_show)
    add_common(show)
    cat = commands.add_parser("cat", help="print a tensor, a part of one, or another value")
    cat.add_argument("path", help="folder or URL, with @STEP for another than the latest")
    cat.add_argument("key", help="its key, as show lists it")
    cat.add_argument("--slice", help="only this part, e.g. 0:4,:")
    cat.add_argument("--rank", type=int, metavar="R", help="whose value, where each rank has its own")
    cat.set_defaults(run=run_cat)
    add_common(cat)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the steps; the status is 1 if one is damaged."""
    from .._ops import steps

    path, step = split_path(chosen(arguments.path, arguments.step))
    view = steps(store_at(path))
    if step not in (None, "all"):
        view = _only(view, step)
    damaged = [info for info in view.steps if info.problem]
    if arguments.json:
        write_json(view)
        return 1 if damaged else 0
    head = ["step", "saved", "size", "new", "shared", "tensors", "ranks", "pinned", "state"]
    rows = [
        [
            str(info.step),
            when(info.created),
            size(info.nbytes),
            size(info.new_bytes),
            size(info.shared_bytes),
            str(info.tensors),
            str(info.writers),
            "yes" if info.pinned else "",
            "damaged" if info.problem else "ok",
        ]
        for info in view.steps
    ]
    write(table(head, rows, "step size new shared tensors ranks") if rows else f"{view.path}: no steps")
    for info in damaged:
        write(f"step {info.step}: {printable(info.problem)}")
    for name, text in view.others:
        write(f"{printable(name)}: {printable(text)}")
    return 1 if damaged else 0


def _only(view: Any, step: int | str | None) -> Any:
    """Return a view of a store with one step alone."""
    there = [info.step for info in view.steps]
    found = view.steps[-1:] if step == "latest" else tuple(info for info in view.steps if info.step == step)
    if not found:
        raise MissingStepError(f"{view.path}: no step {step}; there are: {', '.join(map(str, there)) or 'none'}.")
    return dataclasses.replace(view, steps=found, others=())


def run_show(arguments: argparse.Namespace) -> int:
    """Show a step."""
    from .._ops import describe

    words = [word for word in (arguments.step, arguments.key) if word is not None]
    beside = words.pop(0) if words and (len(words) == 2 or words[0] == "latest" or words[0].isdecimal()) else None
    path, step = one_step(chosen(arguments.path, beside))
    view = describe(store_at(path), step, words[0] if words else None)
    if arguments.json:
        ratios = {"dedup_ratio": view.dedup_ratio, "compression_ratio": view.compression_ratio}
        write_json({"info": view.info, "options": view.options, **ratios, "leaves": view.leaves})
        return 0
    info = view.info
    write(f"step {info.step} in {info.folder}, saved {when(info.created)} by {count(info.writers, 'rank')}")
    write(
        f"{count(info.tensors, 'tensor')}, {size(info.nbytes)} in memory; stored {size(info.new_bytes)} new and "
        f"{size(info.shared_bytes)} shared (compression {view.compression_ratio:.2f}x, dedup {view.dedup_ratio:.2f}x)"
    )
    if info.metadata is not None:
        write(f"metadata: {printable(_short(info.metadata, 500))}")
    write("")
    head = ["key", "dtype", "shape", "layout", "size", "new", "shared", "stored as"]
    rows = []
    for leaf in view.leaves:
        if leaf.kind == "tensor":
            stored = f"same as {leaf.alias_of}" if leaf.alias_of else " ".join(leaf.codecs)
            sizes = [size(leaf.nbytes), size(leaf.new_bytes), size(leaf.shared_bytes)]
            rows.append([leaf.name, leaf.dtype, str(list(leaf.shape)), leaf.layout, *sizes, stored])
        else:
            said = "of each rank" if leaf.kind == "local" else _short(leaf.value, 60)
            rows.append([leaf.name, "value", said, "", "", "", "", ""])
    write(table(head, rows, "size new shared") if rows else "no key matches")
    return 0


def run_cat(arguments: argparse.Namespace) -> int:
    """Print a tensor or a value."""
    import torch

    from .._load import TensorView, open_checkpoint
    from .local import value_at

    path, step = one_step(arguments.path)
    index = parse_slice(arguments.slice) if arguments.slice is not None else None
    with open_checkpoint(store_at(path), step) as checkpoint:
        value = value_at(checkpoint, arguments.key, arguments.rank)
        if not isinstance(value, TensorView):
            if index is not None:
                raise UsageError(f"--slice: {arguments.key!r} is no tensor.")
            value = _described(value, TensorView)
            if arguments.json:
                write_json({"key": arguments.key, "value": value})
            else:
                write(printable(str(value)))
            return 0
        try:
            data = value.read() if index is None else value[index]
        except (IndexError, ValueError) as error:
            raise UsageError(f"--slice {arguments.slice}: {error}") from None
    if arguments.json:
        numbers = data.to(torch.float32) if data.is_floating_point() and data.element_size() == 1 else data
        write_json(
            {
                "key": arguments.key,
                "dtype": str(data.dtype).removeprefix("torch."),
                "shape": list(data.shape),
                "values": numbers.tolist(),
            }
        )
    else:
        write(f"{arguments.key}: {str(data.dtype).removeprefix('torch.')}{list(data.shape)}")
        write(str(data))
    return 0


def _described(value: Any, view: type) -> Any:
    """Return a part of a state with short descriptions in place of tensors, and of values of single ranks."""
    if isinstance(value, Local):
        return "of each rank"
    if isinstance(value, view):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {key: _described(inner, view) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_described(inner, view) for inner in value) if type(value) in (list, tuple) else value
    return value


def _short(value: Any, most: int) -> str:
    text = number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
