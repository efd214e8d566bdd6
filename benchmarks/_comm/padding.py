"""Padding of plans for known models, beside FSDP2's row-wise sharding and an earlier planner's buffers per layer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from _timing import Row, row

from vescale_comm._plan import (
    MODELS,
    Block,
    Knobs,
    ModelPlan,
    Rows,
    Rule,
    TensorSpec,
    granularity,
    model_units,
    plan_model,
    plan_ragged,
    row_wise_numel,
)

WORLDS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1000, 1024)
TARGET = 0.1
RULES: dict[str, tuple[Rule, int, Knobs]] = {
    # what stays together, rows of row-wise sharding that keep it, what may be chosen
    "32 x 32 tiles": (Block(32, 32), 32, Knobs()),
    "128 x 128 tiles": (Block(128, 128), 128, Knobs()),
    "32 rows": (Rows(32), 32, Knobs(max_replicas=4)),
    "128 rows": (Rows(128), 128, Knobs(max_replicas=16)),
    "1 row": (Rows(1), 1, Knobs()),
}
GREEDY = {
    # the first planner that was tried, Llama-3-8B: one group per layer, all stored as given; worlds in the order of AT
    "32 x 32 tiles": (0.0085, 0.068, 0.18, 0.07, 0.07, 1.01, 1.96, 2.82, 2.88),
    "128 x 128 tiles": (0.068, 0.07, 0.54, 1.01, 2.88, 6.62, 10.43, 13.89, 14.11),
}
MANY = tuple(range(8, 1025, 23))
"""Worlds that nobody chose for being easy."""
AT = (8, 64, 96, 128, 256, 512, 768, 1000, 1024)


@dataclass(frozen=True)
class Case:
    """One model, rule and world."""

    world: int
    plan: ModelPlan
    row_wise: float
    """Padding of FSDP2's `Shard(0)` with blocks of rows, as a share."""


def one_buffer_per_unit(model: str, rule: Rule, world: int) -> float:
    """Return the padding of the simplest ragged plan: each unit one buffer, all stored as given."""
    shards: dict[tuple[tuple[int, ...], ...], int] = {}
    padded = used = 0
    for unit in model_units(model):
        shapes = tuple(shape for _, shape in unit.tensors)
        if shapes not in shards:
            specs = [TensorSpec(name, shape, granularity(rule, shape)) for name, shape in unit.tensors]
            shards[shapes] = plan_ragged(specs, world).shard
        padded += shards[shapes] * world
        used += unit.numel
    return padded / used - 1


def cases(model: str, name: str, worlds: Sequence[int] = WORLDS) -> list[Case]:
    """Plan a model at several worlds."""
    rule, rows, knobs = RULES[name]
    shapes = [shape for unit in model_units(model) for _, shape in unit.tensors]
    found = []
    for world in worlds:
        plan = plan_model(model, world, blocks=rule, knobs=knobs)
        found.append(Case(world, plan, row_wise_numel(shapes, world, rows) / plan.used - 1))
    return found


def table(model: str, name: str) -> str:
    """Return the padding at all worlds as text."""
    lines = [f"{model}, {name}: padding", f"{'ranks':>6} {'ours':>8} {'per unit':>9} {'Shard(0)':>9}  chosen"]
    for case in cases(model, name):
        simple = one_buffer_per_unit(model, RULES[name][0], case.world)
        lines.append(
            f"{case.world:>6} {case.plan.padding:>8.2%} {simple:>9.2%} {case.row_wise:>9.2%}  {case.plan.choice()}; "
            f"{case.plan.reason}"
        )
    return "\n".join(lines)


def rows() -> Iterator[Row]:
    """Yield the worst padding of each model and rule, and what it is to be compared with."""
    slowest = 0.0
    for model in MODELS:
        for name, (rule, _, knobs) in RULES.items():
            begun = time.process_time()
            plan_model(model, WORLDS[-1], blocks=rule, knobs=knobs)
            if model == "llama-3-70b":
                slowest = max(slowest, time.process_time() - begun)
            yield from _model_rows(model, name, cases(model, name))
    yield row(f"plan: llama-3-70b, {WORLDS[-1]} ranks, CPU-seconds", slowest, 5.0, "no ratio; the slowest of the rules")


def _model_rows(model: str, name: str, found: list[Case]) -> Iterator[Row]:
    worst = max(found, key=lambda case: case.plan.padding)
    simple = one_buffer_per_unit(model, RULES[name][0], worst.world)
    note = (
        f"at {worst.world} ranks: {worst.plan.choice()}; {worst.plan.reason}; Shard(0) {worst.row_wise:.2%}, "
        f"a buffer per unit {simple:.2%}"
    )
    copies = max(case.plan.replicas for case in found)
    if copies > 1:
        note += f"; up to {copies} copies at other worlds"
    yield row(f"padding: {model}, {name}, worst world", worst.plan.padding, TARGET, note)
    even = max((1 + case.plan.padding) / (1 + case.plan.even) for case in found)
    yield row(f"buffers over even layout: {model}, {name}", even, 1.0, f"worst of {len(found)} worlds")
    if "tiles" in name:
        least = max(cases(model, name, MANY), key=lambda case: case.plan.padding)
        note = f"at {least.world} of {len(MANY)} ranks from {MANY[0]} to {MANY[-1]}: {least.plan.choice()}"
        yield row(f"padding: {model}, {name}, any world", least.plan.padding, TARGET, note)
    if model == "llama-3-8b" and name in GREEDY:
        greedy = dict(zip(AT, GREEDY[name], strict=True))
        ratios = {case.world: case.plan.padding / greedy[case.world] for case in found if case.world in greedy}
        most = max(ratios, key=lambda world: ratios[world])
        yield row(f"padding over greedy: {model}, {name}", ratios[most], 1.0, f"worst: {most} ranks")


if __name__ == "__main__":
    for chosen in MODELS:
        for kind in RULES:
            print(table(chosen, kind), flush=True)
            print()
