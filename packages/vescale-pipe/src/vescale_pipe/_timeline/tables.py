"""Summaries and reports as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._draw.bars import number
from .merge import Merged
from .recorder import MESSAGE
from .span import Span
from .work import covered

if TYPE_CHECKING:
    from .report import RankReport, Report

__all__ = ["report_text", "summary"]

MOST_LINKS = 5
MOST_NAMES = 12


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns under each other; the first row is the head, and the first column is text.

    Example:
        >>> table([("rank", "time"), ("rank 0", "1 s")])
        ['rank    time', 'rank 0   1 s']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def seconds(value: float) -> str:
    """Return seconds as people write them, negative ones too."""
    return f"-{number(-value, 's')}" if value < 0 else number(value, "s")


def summary(merged: Merged) -> str:
    """Return how long the ranks were at what: per rank and category the time, and the names that take most.

    Args:
        merged: of all ranks. What overlaps in a category of a rank counts once; a category may lie in another one. Of
            messages, the time counts in which a rank did nothing but wait for them.
    """
    ends = [span.end for one in merged.ranks for span in one.spans]
    count = sum(len(one.spans) for one in merged.ranks)
    wall = max(ends, default=0)
    steps = merged.steps()
    lines = [
        f"{len(merged.ranks)} ranks, {count} spans, {len(steps)} steps, {number(wall / 1e9, 's')}; "
        f"{len(merged.messages)} messages with both ends"
    ]
    categories = sorted({span.category for one in merged.ranks for span in one.spans})
    heads = ["wait for messages" if category == MESSAGE else category for category in categories]
    rows = [("rank", *heads, "clock within")]
    for one in merged.ranks:
        cells = []
        for category in categories:
            spans = [_time_of(span) for span in one.spans if span.category == category]
            time = covered(spans)
            cells.append(f"{number(time / 1e9, 's')} {time / wall:.0%}" if wall and spans else "-")
        rows.append((one.name, *cells, number(one.bound / 1e9, "s") if one.bound else "(reference)"))
    lines += ["", *table(rows)]
    totals: dict[tuple[str, str], list[int]] = {}
    for one in merged.ranks:
        for span in one.spans:
            if not span.is_message:
                name = f"{span.tags['kind']} of stage {span.tags['stage']}" if span.is_action else span.name
                totals.setdefault((span.category, name), []).append(span.length)
    largest = sorted(totals.items(), key=lambda item: sum(item[1]), reverse=True)[:MOST_NAMES]
    if largest:
        lines += ["", *table([("span", "count", "total", "mean", "longest"), *(_name_row(*item) for item in largest)])]
    return "\n".join([*lines, *_notes(merged.notes)])


def _time_of(span: Span) -> tuple[int, int]:
    """Return the time in which a span kept its rank."""
    return (span.end - span.tags["blocked"] if span.is_message else span.start), span.end


def _name_row(what: tuple[str, str], lengths: Sequence[int]) -> tuple[str, ...]:
    total = sum(lengths) / 1e9
    mean, longest = number(total / len(lengths), "s"), number(max(lengths) / 1e9, "s")
    return f"{what[0]}: {what[1]}", str(len(lengths)), number(total, "s"), mean, longest


def report_text(report: Report, rank: int | None = None) -> str:
    """Return a report as text; its first line names who is to blame.

    Args:
        report: of all ranks.
        rank: the only one to show, with its links; None: all.

    Raises:
        ValueError: there is no such rank.
    """
    shown = [one for one in report.ranks if rank in (None, one.rank)]
    if not shown:
        there = ", ".join(str(number) for number in sorted(one.rank for one in report.ranks))
        raise ValueError(f"rank: {rank} given; the timeline has ranks {there}.")
    lengths = list(report.steps.values())
    mean = sum(lengths) / len(lengths)
    lines = [_verdict(report, mean), ""]
    parts = [f"{len(lengths)} steps of {seconds(mean)} (longest {seconds(max(lengths))})"]
    if report.bubble is not None:
        parts.append(f"bubble {report.bubble:.1%}")
    if report.usual_bubble is not None:
        parts.append(f"without stragglers and latency {report.usual_bubble:.1%}")
    if report.paper_bubble is not None:
        parts.append(f"1F1B on paper {report.paper_bubble:.1%}")
    lines += [", ".join(parts), ""]
    rows = [("rank", "busy a step", "slowdown", "excess a step", "blame a step", "trend", "compared with")]
    for one in shown:
        blame = "-" if one.blame is None else seconds(one.blame)
        rows.append(
            (
                _name(one),
                seconds(one.busy),
                f"{one.slowdown:.2f}x",
                seconds(one.excess),
                blame,
                f"{one.trend:.2f}x",
                one.compared,
            )
        )
    lines += table(rows)
    some = [link for link in report.links if rank is None or rank in (link.src, link.dst)]
    if some:
        links = [
            (f"{link.src} to {link.dst}", str(link.messages), seconds(link.median), seconds(link.total))
            for link in some[:MOST_LINKS]
        ]
        lines += ["", *table([("link", "messages", "median wait", "wait a step"), *links])]
    return "\n".join([*lines, *_notes(report.notes)])


def _verdict(report: Report, mean: float) -> str:
    slow = report.stragglers
    if not slow:
        return "no rank is a straggler"
    worst = slow[0]
    cost = worst.excess if worst.blame is None else worst.blame
    text = f"{_name(worst)} takes {worst.slowdown:.2f} times what it should and costs {seconds(cost)} a step"
    text += f" ({cost / mean:.0%})" if mean else ""
    if worst.compared == "stages":
        text += "; no other rank holds its stage, so that the stage may just be larger"
    if len(slow) > 1:
        where = report.axes
        ranks = ", ".join(str(one.rank) for one in sorted(slow, key=lambda one: one.rank))
        text += f"; {len(slow)} ranks are slow: {ranks}"
        if where:
            text += ", all those with " + ", ".join(f"{axis}={place}" for axis, place in where.items())
    return text


def _name(one: RankReport) -> str:
    where = ", ".join(f"{axis}={place}" for axis, place in one.coordinates.items())
    return f"rank {one.rank} ({where})" if where else f"rank {one.rank}"


def _notes(notes: Sequence[str]) -> list[str]:
    return ["", *(f"note: {note}" for note in notes)] if notes else []
