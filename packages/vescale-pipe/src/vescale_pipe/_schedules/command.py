"""Command line: `python -m vescale_pipe schedules`, and `draw` and `check` of one by name or from a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._schedule import Schedule
    from .._simulate import Costs

__all__ = ["add_schedules"]

FILES = (".csv", ".json")
COLUMNS = ("schedule", "stages", "makespan", "bubble", "own span", "activations")


def add_schedules(commands: Any) -> None:
    """Add the sub-commands to a parser.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    listing = commands.add_parser("schedules", help="compare all schedules by simulation")
    draw = commands.add_parser("draw", help="draw a schedule: to the screen, or to a file .svg, .png or .txt")
    check = commands.add_parser("check", help="tell all that is wrong with a schedule of a file")
    draw.add_argument("schedule", help=f"name of a schedule, or a file {' or '.join(FILES)}")
    check.add_argument("file", help=f"a file {' or '.join(FILES)}")
    for parser in (listing, draw):
        parser.add_argument("--ranks", type=int, default=4, help="of the pipeline (default: %(default)s)")
        parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: %(default)s)")
        parser.add_argument("--chunks", type=int, default=None, help="stages per rank (default: the schedule's)")
        parser.add_argument(
            "--costs",
            type=_costs,
            default=None,
            metavar="F,I,W[,LATENCY]",
            help="seconds of a forward, an input and a weight gradient of all layers of a rank, and of a message",
        )
    draw.add_argument("-o", "--output", default=None, help="file to write (default: to the screen)")
    listing.set_defaults(run=_list)
    draw.set_defaults(run=_draw)
    check.set_defaults(run=_check)


def _costs(text: str) -> Costs:
    from .._simulate import Costs

    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not 3 <= len(numbers) <= 4:
        raise argparse.ArgumentTypeError(f"{text!r}: expected three or four numbers, such as 1,1.2,0.8,0.05")
    forward, input_grad, weight_grad, latency = (*numbers, 0.0)[:4]
    return Costs(forward=forward, input_grad=input_grad, weight_grad=weight_grad, latency=latency)


def _list(args: argparse.Namespace) -> str:
    from .._simulate import Costs, simulate
    from ..errors import ScheduleError
    from .registry import build_schedule, builders, schedule_names, takes

    costs = args.costs or Costs()
    rows, left_out = [COLUMNS], []
    for name in schedule_names():
        given = costs if "costs" in takes(builders()[name]) else None
        try:
            schedule = build_schedule(name, args.ranks, args.microbatches, chunks=args.chunks, costs=given)
        except ScheduleError as error:
            left_out.append(f"{name}: {error}")
            continue
        found = simulate(schedule, _divided(costs, schedule))
        spans = (f"{found.makespan:.4g}", f"{found.bubble:.1%}", f"{found.own_bubble:.1%}")
        rows.append((name, str(schedule.num_stages), *spans, f"{max(found.peak):.3g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *left_out])


def _draw(args: argparse.Namespace) -> str:
    from .._draw import render
    from .._simulate import simulate
    from .registry import build_schedule, builders, takes

    if Path(args.schedule).suffix in FILES:
        schedule = _read(args.schedule)
    else:
        build = builders().get(args.schedule)
        given = args.costs if build is not None and "costs" in takes(build) else None
        schedule = build_schedule(args.schedule, args.ranks, args.microbatches, chunks=args.chunks, costs=given)
    what = schedule if args.costs is None else simulate(schedule, _divided(args.costs, schedule))
    text = render(what, args.output, format="text" if args.output is None else None)
    return text.rstrip("\n") if args.output is None else str(Path(args.output))


def _check(args: argparse.Namespace) -> str:
    from .._schedule import validate

    schedule = _read(args.file)
    validate(schedule)
    return (
        f"{args.file}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_actions} actions, valid"
    )


def _read(path: str) -> Schedule:
    from .._schedule import from_csv, from_json

    text = Path(path).read_text()
    return from_json(text) if Path(path).suffix == ".json" else from_csv(text, name=Path(path).stem)


def _divided(costs: Costs, schedule: Schedule) -> Costs:
    """Return the costs of a stage, where those of all layers of a rank are given."""
    return costs.divided(max(1, schedule.num_stages // schedule.num_ranks))
