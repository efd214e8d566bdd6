"""Command line: `python -m vescale_pipe timeline merge | summary | report | plot FILES`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .merge import Merged

__all__ = ["add_timeline", "run_timeline"]


def add_timeline(commands: Any) -> None:
    """Add the sub-command `timeline` to a parser.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    own = commands.add_parser("timeline", help="put timelines of ranks together, sum them up, draw them")
    actions = own.add_subparsers(dest="action", required=True)
    merge = actions.add_parser("merge", help="write one trace for Perfetto (ui.perfetto.dev) and chrome://tracing")
    summary = actions.add_parser("summary", help="tell who was at what for how long, and which ranks are stragglers")
    report = actions.add_parser("report", help="tell which ranks and links make steps slow, and the bubble")
    plot = actions.add_parser("plot", help="draw one step")
    for parser in (merge, summary, report, plot):
        parser.add_argument("files", nargs="+", help="files that ranks have written, or folders of them")
        parser.add_argument(
            "--no-tighten", action="store_true", help="leave clocks as they were read, even where messages contradict"
        )
    merge.add_argument("-o", "--output", default="trace.json.gz", help="file to write (default: %(default)s)")
    for parser in (summary, report):
        parser.add_argument("--axis", default=None, help="mesh axis of the pipeline (default: pp, or the only one)")
    report.add_argument("--rank", type=int, default=None, help="only this one (default: all)")
    plot.add_argument("-o", "--output", default=None, help="file to write: .svg, .png or .txt (default: to the screen)")
    plot.add_argument("--step", type=int, default=None, help="number of the step (default: the last whole one)")
    own.set_defaults(run=run_timeline)


def run_timeline(args: argparse.Namespace) -> str:
    """Do what the arguments say, and return what to print.

    Raises:
        ValueError: files or arguments are wrong.
        OSError: a file cannot be read or written.
    """
    from .merge import merge

    merged = merge(args.files, tighten=not args.no_tighten)
    if args.action == "merge":
        merged.save(args.output)
        count = sum(len(one.spans) for one in merged.ranks)
        said = [f"{args.output}: {len(merged.ranks)} ranks, {count} spans, {len(merged.messages)} messages"]
        return "\n".join([*said, *(f"note: {note}" for note in merged.notes)])
    if args.action == "plot":
        return _plot(merged, args.step, args.output)
    from .report import report
    from .tables import report_text, summary

    if args.action == "report":
        return report_text(report(merged, axis=args.axis), args.rank)
    text = summary(merged)
    if any(span.is_action for one in merged.ranks for span in one.spans):
        try:
            text += "\n\n" + str(report(merged, axis=args.axis))
        except ValueError as error:
            if args.axis is not None:
                raise
            text += f"\n\nnote: no report, {error}"
    return text


def _plot(merged: Merged, step: int | None, output: str | None) -> str:
    from .._draw import render
    from .bars import bars, chosen_step

    number = chosen_step(merged, step)
    some = bars(merged, number)
    text = render(some, output, format="text" if output is None else None, title=f"step {number}, as measured")
    return text.rstrip("\n") if output is None else str(Path(output))
