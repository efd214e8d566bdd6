"""Bars of a measured step, for the renderer that draws simulated ones too."""

from __future__ import annotations

from .._draw import Bar
from .merge import Merged
from .span import Span

__all__ = ["bars", "chosen_step"]


def bars(merged: Merged, step: int | None = None) -> list[Bar]:
    """Return what the ranks did in one step, for `render`.

    Args:
        merged: of all ranks; a row each, in the order of their numbers.
        step: its number; None: the last one in which all ranks did as much as in any other.

    Returns:
        The actions of a schedule if there are any, from the first of their starts on; else all spans that are in no
        other span of their thread.

    Raises:
        ValueError: there is no such step.

    Example:
        >>> from time import perf_counter_ns
        >>> from vescale_pipe import timeline
        >>> with timeline.record() as recorded:
        ...     timeline.recorder.action(0, 3, 1, perf_counter_ns(), perf_counter_ns())
        >>> timeline.bars(timeline.merge([recorded]))[0].name
        '3F1'
    """
    actions = any(span.is_action for rank in merged.ranks for span in rank.spans)
    chosen = chosen_step(merged, step)
    rows = [
        [span for span in rank.spans if span.step == chosen and span.is_action]
        if actions
        else _outermost([span for span in rank.spans if span.step == chosen])
        for rank in merged.ranks
    ]
    zero = min((span.start for row in rows for span in row), default=0)
    found = []
    for row, spans in enumerate(rows):
        stages = sorted({span.tags["stage"] for span in spans if span.is_action})
        for span in spans:
            start, end = (span.start - zero) / 1e9, (span.end - zero) / 1e9
            if span.is_action:
                shade = stages.index(span.tags["stage"])
                label = str(span.tags["microbatch"])
                found.append(Bar(row, start, end, label, span.tags["kind"], shade, name=span.name))
            else:
                kind = "message" if span.is_message else "other"
                found.append(Bar(row, start, end, span.name, kind, name=f"{span.category}: {span.name}"))
    return found


def chosen_step(merged: Merged, step: int | None = None) -> int:
    """Return the number of the step that `bars` takes; arguments and errors as there."""
    steps = merged.steps()
    if step is not None:
        if step not in steps:
            known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has no spans"
            raise ValueError(f"step: {step} given, which is not in the timeline; {known}.")
        return step
    counts: dict[int, int] = {}
    actions = any(span.is_action for rank in merged.ranks for span in rank.spans)
    for rank in merged.ranks:
        for span in rank.spans:
            if span.is_action or not actions:
                counts[span.step] = counts.get(span.step, 0) + 1
    most = max(counts.values(), default=0)
    return max((number for number, count in counts.items() if count == most), default=0)


def _outermost(spans: list[Span]) -> list[Span]:
    """Return the spans that lie in no other one of their track."""
    found: list[Span] = []
    reached: dict[int, int] = {}
    for span in spans:
        if span.end > reached.get(span.track, -1):
            found.append(span)
            reached[span.track] = span.end
    return found
