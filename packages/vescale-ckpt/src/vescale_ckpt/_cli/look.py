"""`ls`, `show` and `cat`: what is in a store, a step, a tensor."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import UsageError, add_common, one_step, parse_slice, parse_step
from .tables import count, number, printable, size, table, when, write, write_json

__all__ = ["register"]


def register(commands: Any) -> None:
    """Add the commands."""
    ls = commands.add_parser("ls", help="list the steps of a store")
    ls.add_argument("path", help="folder or URL")
    ls.set_defaults(run=run_ls)
    add_common(ls)
    show = commands.add_parser("show", help="show what is in a step: keys, shapes, layouts, sizes, ratios")
    show.add_argument("path", help="folder or URL; PATH@STEP works too")
    show.add_argument("step", nargs="?", help="number of the step; the latest if left out")
    show.add_argument("key", nargs="?", help="only keys that this pattern matches, e.g. 'model.*'")
    show.set_defaults(run=run_show)
    add_common(show)
    cat = commands.add_parser("cat", help="print a tensor, a part of one, or another value")
    cat.add_argument("path", help="folder or URL, with @STEP for another than the latest")
    cat.add_argument("key", help="its key, as show lists it")
    cat.add_argument("--slice", help="only this part, e.g. 0:4,:")
    cat.set_defaults(run=run_cat)
    add_common(cat)


def run_ls(arguments: argparse.Namespace) -> int:
    """List the steps; the status is 1 if one is damaged."""
    from .._ops import steps

    view = steps(arguments.path)
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


def run_show(arguments: argparse.Namespace) -> int:
    """Show a step."""
    from .._ops import describe

    path, step = one_step(arguments.path)
    words = [word for word in (arguments.step, arguments.key) if word is not None]
    if words and (len(words) == 2 or words[0] == "latest" or words[0].isdecimal()):
        step = parse_step(words.pop(0))
    view = describe(path, step, words[0] if words else None)
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

    path, step = one_step(arguments.path)
    index = parse_slice(arguments.slice) if arguments.slice is not None else None
    with open_checkpoint(path, step) as checkpoint:
        value = checkpoint[arguments.key]
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
    """Return a part of a state with short descriptions in place of tensors."""
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
