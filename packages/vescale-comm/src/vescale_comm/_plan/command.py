"""Command line: `python -m vescale_comm plan MODEL --world N`, padding of a model's buffers and what binds it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .blocks import Blocks, Rule
    from .models import Unit
    from .search import Knobs

__all__ = ["add_plan"]

COLUMNS = ("world", "padding", "even", "Shard(0)", "bound", "largest", "seconds", "choice")


def add_plan(commands: Any) -> None:
    """Add the sub-command to a parser.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    plan = commands.add_parser("plan", help="plan the buffers of a model: padding, groups, and what binds them")
    plan.add_argument("model", help="name of a model, or a JSON file: a config, or {unit: {parameter: [size, ...]}}")
    plan.add_argument("--world", type=_worlds, required=True, metavar="N[,N...]", help="number of ranks; more: a table")
    plan.add_argument(
        "--block",
        action="append",
        default=[],
        metavar="[PATTERN=]RULE",
        help="what stays on one rank: 128x128 (a tile), rows:32, whole, or a number of elements; with a pattern, of "
        "the parameters whose whole name matches it; the first that matches counts (default: 1)",
    )
    plan.add_argument("--target", type=float, default=None, help="padding that is good enough (default: 0.1)")
    plan.add_argument("--group-share", type=float, default=None, help="largest group, of the model (default: 0.25)")
    plan.add_argument("--max-replicas", type=int, default=None, help="copies of a shard at most (default: 1)")
    plan.add_argument(
        "--storage",
        choices=("given", "transposed", "tiles"),
        default="tiles",
        help="most that may be changed about how tiles are stored (default: %(default)s)",
    )
    plan.set_defaults(run=_plan)


def _worlds(text: str) -> list[int]:
    try:
        worlds = [int(part) for part in text.split(",")]
    except ValueError:
        worlds = [0]
    if min(worlds) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of ranks, such as 64 or 8,64,512")
    return worlds


def _plan(args: argparse.Namespace) -> str:
    from ..errors import PlanError
    from .models import MODELS, model_units, read_units
    from .search import plan_model

    if args.model not in MODELS and not Path(args.model).exists():
        raise PlanError(f"{args.model!r} is no file and no model; models are {', '.join(MODELS)}.")
    units = model_units(args.model) if args.model in MODELS else read_units(Path(args.model))
    blocks, knobs = _blocks(args.block), _knobs(args)
    if len(args.world) == 1:
        return plan_model(units, args.world[0], blocks=blocks, knobs=knobs).explain()
    return _table(units, args.world, blocks, knobs)


def _knobs(args: argparse.Namespace) -> Knobs:
    from .blocks import Storage
    from .search import Knobs

    kinds = {"given": (), "transposed": (Storage.TRANSPOSED,), "tiles": (Storage.TRANSPOSED, Storage.TILES)}
    names = ("target", "group_share", "max_replicas")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return Knobs(storage=kinds[args.storage], **given)


def _blocks(texts: Sequence[str]) -> Blocks:
    rules: dict[str, Rule] = {}
    for text in texts:
        pattern, equals, rule = text.rpartition("=")
        rules[pattern if equals else ".*"] = _rule(rule)
    return rules or 1


def _rule(text: str) -> Rule:
    from ..errors import PlanError
    from .blocks import Block, Rows, Whole

    if text == "whole":
        return Whole()
    try:
        if text.startswith("rows:"):
            return Rows(int(text.removeprefix("rows:")))
        rows, times, columns = text.partition("x")
        return Block(int(rows), int(columns)) if times else int(text)
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{text!r} is no block: write 128x128, rows:32, whole, or a number of elements.") from None


def _table(units: Sequence[Unit], worlds: Sequence[int], blocks: Blocks, knobs: Knobs) -> str:
    from .even import row_wise_numel
    from .search import plan_model

    shapes = [shape for unit in units for _, shape in unit.tensors]
    rows: list[Mapping[str, str]] = []
    for world in worlds:
        plan = plan_model(units, world, blocks=blocks, knobs=knobs)
        cells = (
            str(world),
            f"{plan.padding:.2%}",
            f"{plan.even:.2%}",
            f"{row_wise_numel(shapes, world) / plan.used - 1:.2%}",
            f"{plan.bound:.2%}",
            f"{plan.largest / 1e6:.0f} M",
            f"{plan.seconds:.2f}",
            f"{plan.choice()}; {plan.reason}",
        )
        rows.append(dict(zip(COLUMNS, cells, strict=True)))
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS[:-1]}
    lines = ["  ".join([*(name.rjust(width) for name, width in widths.items()), COLUMNS[-1]])]
    lines += ["  ".join([*(row[name].rjust(width) for name, width in widths.items()), row["choice"]]) for row in rows]
    return "\n".join(lines)
