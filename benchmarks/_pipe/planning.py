"""Rows without ranks: bubbles against formulas, the simulator, the cost of a split backward and of a span."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from _timing import Report, interleave, row
from torch import nn

from vescale_pipe import Costs, PipeEngine, PipePlan, build_schedule, manual, simulate, timeline

RANKS, MICROBATCHES = 8, 32
FORMULAS: dict[str, tuple[float, float]] = {
    # idle time of the makespan and of a rank's own span, F = I = W = 1 for the layers of a rank; see each builder
    "gpipe": ((RANKS - 1) * 3, (RANKS - 1) * 3),
    "1f1b": ((RANKS - 1) * 3, (RANKS - 1) * 3),
    "interleaved_1f1b": ((RANKS - 1) * 3 / 2, (RANKS - 1) * 3 / 2),
    "looped_bfs": ((RANKS - 1) * 3 / 2, (RANKS - 1) * 3 / 2),
    "zb_h1": (RANKS - 1, RANKS - 1),
    "zb_h2": (RANKS - 1, 0.0),
    "interleaved_zb": ((RANKS - 1) / 2, (RANKS - 1) / 2),
    "zb_v": ((RANKS - 1) / 2, 0.0),
}


def bubbles(report: Report) -> None:
    """Compare simulated idle time with the papers' formulas."""
    report.heading(f"bubble, {RANKS} ranks x {MICROBATCHES} micro-batches, F = I = W: simulated over the formula")
    for name, (whole, _) in FORMULAS.items():
        schedule = build_schedule(name, RANKS, MICROBATCHES)
        chunks = schedule.num_stages // RANKS
        found = simulate(schedule, Costs(forward=1 / chunks, input_grad=1 / chunks, weight_grad=1 / chunks))
        idle = found.makespan - 3 * MICROBATCHES
        note = f"bubble {found.bubble:.1%}, in the ranks' own span {found.own_bubble:.1%}"
        report.add(row(f"bubble: {name}", idle / whole, 1.0 + 1e-9, note))


def simulator(report: Report) -> None:
    """Time the simulation of a large pipeline, with making and encoding the schedule."""
    report.heading("1,024 ranks x 2,048 micro-batches, 1F1B: CPU-seconds, no ratio")
    begun = time.process_time()
    schedule = build_schedule("1f1b", 1024, 2048)
    built = time.process_time() - begun
    found = simulate(schedule, Costs(forward=1.0, input_grad=1.0, weight_grad=1.0, latency=0.01))
    spent = time.process_time() - begun
    report.add(row("simulate 4.2 million actions", spent, 5.0, f"{built:.2f} s of it to make the schedule"))
    report.add(row("its bubble", found.bubble, None))


def spans(report: Report) -> None:
    """Time the ways to record a span of the timeline."""
    report.heading("a span of the timeline: microseconds, no ratio")
    recorder = timeline.recorder

    def with_block() -> None:
        for _ in range(1000):
            with timeline.span("bench", "span"):
                pass

    def begin_and_end() -> None:
        begin, end = recorder.begin, recorder.end
        for _ in range(1000):
            end(begin("bench", "span"))

    def action() -> None:
        add = recorder.action
        for number in range(1000):
            add(0, 0, number, 0, 1)

    def nothing() -> None:
        for _ in range(1000):
            pass

    ways = {"an action of the runtime": action, "begin and end, as hooks do": begin_and_end, "with": with_block}
    off = interleave({**ways, "nothing": nothing})
    with timeline.record():
        on = interleave({**ways, "nothing": nothing})
    for name in ways:
        report.add(row(f"span, off: {name}", off.extra(name, "nothing") * 1e3, None))
        report.add(row(f"span, on: {name}", on.extra(name, "nothing") * 1e3, 0.5))


def split_backward(report: Report, rounds: int) -> None:
    """Time I and W of a stage of 16 blocks over its whole backward, in one process."""
    from .runtime import ROWS, stages_of

    report.heading("I and W of a stage of 16 blocks over its whole B: CPU of a step, one process acts out two ranks")
    count = 16
    x = torch.randn(count * ROWS, 16)
    engines: dict[str, Callable[[], object]] = {}
    for name in ("1f1b", "zb_h1"):
        plan = PipePlan(schedule=name, num_microbatches=count, loss="sum", keep_outputs=False)
        engine = PipeEngine(manual(stages_of(2, 16)), None, plan, nn.functional.mse_loss, act_out=2)
        engines[name] = lambda engine=engine: engine(x, target=x)  # type: ignore[misc]
    spent: dict[str, list[float]] = {name: [] for name in (*engines, "forward")}
    forward = nn.Sequential(*stages_of(2, 16))

    def forwards() -> None:
        for _ in range(count):
            forward(x[:ROWS])

    for number in range(rounds + 2):
        for name, run in {**engines, "forward": forwards}.items():
            begun = time.process_time()
            run()
            if number > 1:
                spent[name].append(time.process_time() - begun)
    ratios = [
        (split - ahead) / (whole - ahead)
        for split, whole, ahead in zip(spent["zb_h1"], spent["1f1b"], spent["forward"], strict=True)
    ]
    report.add(row("I + W over B, messages included", statistics.median(ratios), 1.5))
