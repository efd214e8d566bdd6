"""Timing for benchmarks on machines that do other work too, and the rows that benchmarks report.

What is compared runs interleaved, in many short bursts; a ratio is the median of the ratios within the
rounds, so that a slow moment of the machine hits both sides or is outvoted.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

Function = Callable[[], object]
_now = time.perf_counter


@dataclass
class Times:
    """Seconds per call of several functions, one entry per round; entries of one round belong together."""

    rounds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds per call."""
        return statistics.median(self.rounds[name])

    def ratio(self, name: str, base: str) -> float:
        """Median over the rounds of how many times as long `name` takes as `base`."""
        return statistics.median(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))

    def extra(self, name: str, base: str) -> float:
        """Median over the rounds of the seconds that `name` takes longer than `base`."""
        return statistics.median(a - b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))

    def spread(self, name: str, base: str) -> float:
        """Half the interval that holds the median of the ratios with 95% certainty, from their ranks."""
        ratios = sorted(a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True))
        reach = 0.98 * len(ratios) ** 0.5
        low = ratios[max(0, int(len(ratios) / 2 - reach))]
        high = ratios[min(len(ratios) - 1, int(len(ratios) / 2 + reach))]
        return (high - low) / 2


def interleave(
    functions: Mapping[str, Function], *, seconds: float = 0.4, burst_seconds: float = 5e-4, warm_up: int = 5
) -> Times:
    """Time functions in turns.

    Args:
        functions: what to time, by name. Each is called many times.
        seconds: about how long to measure, all functions together.
        burst_seconds: length of one burst of calls of the fastest function; the others make the same
            number of calls, at least one.
        warm_up: calls of each function before the first measured one.
    """
    for function in functions.values():
        for _ in range(warm_up):
            function()
    singles = {name: min(_burst(function, 1) for _ in range(3)) for name, function in functions.items()}
    calls = max(1, round(burst_seconds / max(min(singles.values()), 1e-7)))
    turn = calls * sum(singles.values())
    num_rounds = max(11, min(400, round(seconds / turn)))
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions.items())
    with _no_garbage_collection():
        for number in range(num_rounds):
            for name, function in order if number % 2 else order[::-1]:
                times[name].append(_burst(function, calls))
    return Times(times)


def _burst(function: Function, calls: int) -> float:
    repeats = range(calls)
    start = _now()
    for _ in repeats:
        function()
    return (_now() - start) / calls


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class Row:
    """One measured fact."""

    name: str
    value: float | None
    """A ratio, lower is better; None where it could not be measured."""
    goal: float | None
    """What the ratio should stay below; None for a row that only informs."""
    ok: bool
    note: str = ""
    """Times behind the ratio, or why there is none."""


def row(name: str, value: float | None, goal: float | None = None, note: str = "") -> Row:
    """Make a row that is ok where the value reaches the goal."""
    ok = goal is None or (value is not None and value <= goal)
    return Row(name, None if value is None else round(value, 4), goal, ok, note)


class Report:
    """Collects rows, prints each as it comes, and writes them all."""

    def __init__(self, title: str) -> None:
        self.rows: list[Row] = []
        print(f"{title}\n{'':52} {'ratio':>8} {'goal':>7}", flush=True)

    def add(self, new: Row) -> None:
        """Print and keep a row."""
        self.rows.append(new)
        value = "-" if new.value is None else f"{new.value:.3f}"
        goal = "" if new.goal is None else f"{new.goal:.2f}"
        mark = "" if new.goal is None else ("ok" if new.ok else "SHORT")
        print(f"{new.name:52} {value:>8} {goal:>7} {mark:5} {new.note}", flush=True)

    def heading(self, text: str) -> None:
        """Print a heading."""
        print(f"\n{text}", flush=True)

    def finish(self, path: Path | None) -> None:
        """Print the sum and write the rows as JSON where a path is given."""
        judged = [r for r in self.rows if r.goal is not None]
        short = [r.name for r in judged if not r.ok]
        print(
            f"\n{len(judged) - len(short)} of {len(judged)} goals reached" + "".join(f"\n  short: {n}" for n in short)
        )
        if path is not None:
            path.write_text(json.dumps([asdict(r) for r in self.rows], indent=1) + "\n")


def parser(description: str) -> argparse.ArgumentParser:
    """Command line that every benchmark has: ``--json FILE``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    return made


def microseconds(*values: float) -> str:
    """Spell times for a note."""
    return " / ".join(f"{v * 1e6:.2g}" if abs(v) < 1e-6 else f"{v * 1e6:.1f}" for v in values) + " us"


__all__: Sequence[str] = ["Report", "Row", "Times", "interleave", "microseconds", "parser", "row"]
