"""Turn a failed run into one text: who failed first and why, who only followed, who hung where."""

from __future__ import annotations

import textwrap

from vescale_testing._group import Run
from vescale_testing._messages import Outcome

SUMMARY_LIMIT = 160


def describe(run: Run) -> str:
    """Return the report of a run that failed."""
    bad = {rank: outcome for rank, outcome in run.outcomes.items() if outcome.kind in ("fail", "died")}
    causes = {rank: outcome for rank, outcome in bad.items() if not outcome.follower} or bad
    order = sorted(causes, key=lambda rank: causes[rank].when)
    parts = [_headline(run, order)]
    for place, rank in enumerate(order):
        parts.append(_title(f"rank {rank} of {run.world} {_verb(causes[rank])}{' first' if place == 0 else ' too'}"))
        parts.append(causes[rank].text)
    followers = [rank for rank in sorted(bad) if rank not in causes]
    parts.extend(f"rank {rank} followed: {textwrap.shorten(bad[rank].summary, SUMMARY_LIMIT)}" for rank in followers)
    for rank, stacks in sorted(run.stacks.items()):
        when = f"at the time-out of {run.timeout:g} s" if run.is_overdue else "when its peers had ended"
        parts.append(_title(f"rank {rank} of {run.world} was still running {when}"))
        parts.append(stacks or "(no stack: it did not answer)")
    quiet = [rank for rank, outcome in sorted(run.outcomes.items()) if outcome.kind in ("ok", "skip", "xfail")]
    if quiet:
        listed = ", ".join(f"{rank} ({run.outcomes[rank].kind})" for rank in quiet)
        parts.append(_title(f"without failure: {listed}"))
    for rank, output in sorted(run.outputs.items()):
        if output.strip():
            parts.append(_title(f"output of rank {rank}"))
            parts.append(output.rstrip())
    return "\n".join(parts)


def _headline(run: Run, order: list[int]) -> str:
    if not order:
        ranks = ", ".join(map(str, sorted(run.stacks)))
        return f"the time-out of {run.timeout:g} s is over, and of {run.world} ranks these still run: {ranks}"
    first = run.outcomes[order[0]]
    return f"rank {order[0]} of {run.world} {_verb(first)} first: {first.summary}"


def _verb(outcome: Outcome) -> str:
    return "died" if outcome.kind == "died" else "failed"


def _title(text: str) -> str:
    return f"---- {text} ----"
