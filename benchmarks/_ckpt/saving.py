"""Rows about saves: what blocks the training, what is durable when, what is written, and what a running save slows."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from _timing import row
from torch import nn

from .measure import (
    TENSORS,
    Rounds,
    Setup,
    Spent,
    State,
    change,
    compare,
    folder_bytes,
    make_state,
    quiet,
    summary,
    timed_save,
)
from .systems import System, Vescale, make_systems

CHANGING = 6
"""Tensors of 64 that change from one save to the next: 9 %."""
SAVES = 10


def saves(setup: Setup) -> None:
    """Everything changes between saves, as in full training: blocking, total, bytes."""
    names = ("memcpy, warm", "raw file", "vescale", "vescale compressed", "vescale plain", "vescale async")
    names += ("dcp", "dcp tuned", "dcp async", "dcp async tuned", "torch.save", "safetensors")
    names += ("torch_checkpointing", "torch_checkpointing async")
    rounds = _measure(setup, names, torch.float32)
    report = setup.report

    report.heading("float32, everything changes between two saves: seconds over a raw file, written and synced")
    for name in names[1:]:
        summary(setup, rounds, name, "raw file", "save fp32")
    report.heading("asynchronous: seconds until the state may change again")
    goals = {"memcpy, warm": 1.10, "dcp async": 0.25, "dcp async tuned": 1.05, "torch_checkpointing async": None}
    for base, goal in goals.items():
        compare(setup, rounds, "vescale async", base, "blocking", goal, "blocking")
    report.heading("asynchronous: seconds until durable")
    for base in ("dcp async", "dcp async tuned", "torch_checkpointing async"):
        compare(setup, rounds, "vescale async", base, "async fp32")
    report.heading("synchronous: seconds until durable")
    goals = {"dcp": 1.00, "dcp tuned": 1.00, "torch.save": None, "safetensors": None, "torch_checkpointing": None}
    for base, goal in goals.items():
        compare(setup, rounds, "vescale", base, "sync fp32", goal)
    for ours in ("vescale compressed", "vescale plain"):
        compare(setup, rounds, ours, "dcp", "sync fp32")
    compare(setup, rounds, "vescale", "dcp", "sync fp32", None, "cpu")
    _bytes(setup, rounds, "sync fp32", 0.84)


def saves_bf16(setup: Setup) -> None:
    """The same for bfloat16, the main contenders only."""
    names = ("raw file", "vescale", "vescale compressed", "dcp", "dcp tuned")
    rounds = _measure(setup, names, torch.bfloat16)
    setup.report.heading("bfloat16, everything changes between two saves: seconds over a raw file, written and synced")
    for name in names:
        summary(setup, rounds, name, "raw file", "save bf16")
    setup.report.heading("bfloat16, synchronous: seconds until durable")
    for base in ("dcp", "dcp tuned"):
        compare(setup, rounds, "vescale", base, "sync bf16", 1.00)
    compare(setup, rounds, "vescale compressed", "dcp", "sync bf16")
    compare(setup, rounds, "vescale", "dcp", "sync bf16", None, "cpu")
    _bytes(setup, rounds, "sync bf16", 0.68)


def _measure(setup: Setup, names: tuple[str, ...], dtype: torch.dtype) -> Rounds:
    rounds, state = Rounds(), make_state(setup.size, dtype)
    with setup.scratch() as folder:
        systems = make_systems(names, folder, setup.skipped)
        for step, order in enumerate(setup.orders(list(systems), setup.rounds + 1)):
            change(state.values(), step)
            for name in order:
                spent = _save_once(setup, systems[name], folder / name.replace(" ", "-"), step, state)
                if step:  # the first save of all makes buffers and plans
                    rounds.add(name, spent)
                _drop(systems[name], step)
        for system in systems.values():
            system.close()
    return rounds


def _save_once(setup: Setup, system: System, root: Path, step: int, state: State) -> Spent:
    setup.warm_pages()
    return timed_save(lambda: system.save(step, state), system.wait, root)


def _drop(system: System, step: int) -> None:
    """Remove what was saved: of ours the step before, as the next save compares with this one."""
    system.drop(step - 1 if isinstance(system, Vescale) else step)


def _bytes(setup: Setup, rounds: Rounds, text: str, goal: float) -> None:
    name = "vescale compressed"
    label = f"{text}: {name}, bytes / the state's"
    if name not in rounds.spent:
        setup.report.add(row(label, None, goal, setup.skipped[name]))
    else:
        setup.report.add(row(label, rounds.median(name, "bytes") / setup.size, goal))


def frozen(setup: Setup) -> None:
    """Save ten times; between two saves 6 of 64 tensors change, other ones each time."""
    asynchronous = ("vescale async", "dcp async tuned")
    for dtype, short, goal, others in (
        (torch.float32, "fp32", 0.16, ("dcp tuned", *asynchronous)),
        (torch.bfloat16, "bf16", 0.13, ()),
    ):
        text = f"9% {short}"
        names = ("vescale", "vescale compressed", "dcp", *others)
        first, rounds = _ten_saves(setup, names, dtype)
        setup.report.heading(
            f"{SAVES} saves, {CHANGING} of {TENSORS} tensors change between two, {short}: seconds over dcp's"
        )
        for name in names:
            summary(setup, rounds, name, "dcp", text)
        compare(setup, rounds, "vescale", "dcp", text, 0.36)
        compare(setup, rounds, "vescale compressed", "dcp", text, 0.36)
        for ours, base in (("vescale", "dcp tuned"), ("vescale async", "dcp async tuned")):
            if others:
                compare(setup, rounds, ours, base, text)
        compare(setup, rounds, "vescale", "dcp", text, None, "cpu")
        for name, most in (("vescale", None), ("vescale compressed", goal)):
            label = f"{text}: {name} / dcp, bytes of all {SAVES}"
            if name not in rounds.spent:
                setup.report.add(row(label, None, most, setup.skipped[name]))
                continue
            ours, theirs = (first.sum(n) + rounds.sum(n) for n in (name, "dcp"))
            note = f"{ours / (1 << 30):.2f} / {theirs / (1 << 30):.2f} GiB"
            setup.report.add(row(label, ours / theirs, most, note))


def _ten_saves(setup: Setup, names: tuple[str, ...], dtype: torch.dtype) -> tuple[Rounds, Rounds]:
    first, rounds, state = Rounds(), Rounds(), make_state(setup.size, dtype)
    tensors = list(state.values())
    with setup.scratch() as folder:
        systems = make_systems(names, folder, setup.skipped)
        for step, order in enumerate(setup.orders(list(systems), SAVES)):
            changing = [tensors[(step * CHANGING + i) % TENSORS] for i in range(CHANGING)]
            change(changing, step)
            for name in order:
                spent = _save_once(setup, systems[name], folder / name.replace(" ", "-"), step, state)
                (rounds if step else first).add(name, spent)
                if not name.startswith("vescale"):  # ours refers to earlier steps, so they stay
                    systems[name].drop(step)
        for system in systems.values():
            system.close()
    return first, rounds


def scalars(setup: Setup, count: int = 1000) -> None:
    """A thousand tensors of four bytes, as steps and learning rates of an optimizer are."""
    names = ("vescale", "dcp", "torch.save", "safetensors", "torch_checkpointing")
    state = {f"state.{i}.step": torch.tensor(float(i)) for i in range(count)}
    setup.report.heading(f"bytes on disk per scalar, {count} tensors of 4 bytes; not a ratio")
    with setup.scratch() as folder:
        systems = make_systems(names, folder, setup.skipped)
        for name in names:
            goal = 150.0 if name == "vescale" else None
            if name not in systems:
                setup.report.add(row(f"scalars: {name}", None, goal, setup.skipped[name]))
                continue
            start = time.perf_counter()
            systems[name].save(0, state)
            systems[name].wait()
            spent = time.perf_counter() - start
            size = folder_bytes(folder / name.replace(" ", "-"))
            systems[name].close()
            setup.report.add(row(f"scalars: {name}", size / count, goal, f"{spent * 1e3:.0f} ms"))


def snapshot(setup: Setup) -> None:
    """What a snapshot by fork would cost instead of the copy: the call, and the next writing of every page."""
    state = make_state(setup.size)
    copy = {name: tensor.clone() for name, tensor in state.items()}
    times: dict[str, list[float]] = {}
    for step in range(setup.rounds + 1):
        setup.warm_pages()
        times.setdefault("memcpy", []).append(_seconds(lambda: [copy[n].copy_(t) for n, t in state.items()]))
        change(state.values(), step)
        write = partial(change, state.values(), step)
        plain = _seconds(write)
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            signal.pause()
        times.setdefault("fork", []).append(time.perf_counter() - start)
        try:
            shared = _seconds(write)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        times.setdefault("writing shared pages, extra", []).append(shared - plain)
    setup.report.heading("a snapshot by fork instead of the copy: seconds over a warm memcpy of the state")
    for name in ("fork", "writing shared pages, extra"):
        ratio = statistics.median(a / b for a, b in zip(times[name][1:], times["memcpy"][1:], strict=True))
        setup.report.add(row(f"snapshot: {name}", ratio, None, f"{statistics.median(times[name][1:]):.3f} s"))


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def training(setup: Setup) -> None:
    """Train a small model while a save of the whole state runs in the background: time per step over undisturbed."""
    names = ("vescale async", "dcp async", "dcp async tuned", "torch_checkpointing async")
    state = make_state(setup.size)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.ReLU())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    batch = torch.randn(32, 64)

    def train() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds_per_step(until: float) -> float:
        steps, start = 0, time.perf_counter()
        while (now := time.perf_counter()) < until:
            train()
            steps += 1
        return (now - start) / max(1, steps)

    slowed: dict[str, list[float]] = {}
    notes: dict[str, list[float]] = {}
    with setup.scratch() as folder, quiet():
        systems = make_systems(names, folder, setup.skipped)
        for step, order in enumerate(setup.orders(list(systems), min(setup.rounds, 3) + 1, seed=1)):
            change(state.values(), step)
            for name in order:
                setup.warm_pages()
                alone = seconds_per_step(time.perf_counter() + 0.5)
                during, took = _train_while(systems[name], step, state, train)
                if step:
                    slowed.setdefault(name, []).append(during / alone)
                    notes.setdefault(name, []).append(took)
                _drop(systems[name], step)
        for system in systems.values():
            system.close()
    setup.report.heading("training steps of small operators while a save runs, seconds per step over undisturbed")
    for name in names:
        value = statistics.median(slowed[name]) if name in slowed else None
        note = f"the save took {statistics.median(notes[name]):.2f} s" if name in notes else setup.skipped.get(name, "")
        setup.report.add(row(f"training: {name}", value, None, note))


def _train_while(system: System, step: int, state: State, train: Callable[[], None]) -> tuple[float, float]:
    system.save(step, state)
    done = threading.Event()

    def watch() -> None:
        system.wait()
        done.set()

    watcher = threading.Thread(target=watch)
    start, steps = time.perf_counter(), 0
    watcher.start()
    while not done.is_set():
        train()
        steps += 1
    took = time.perf_counter() - start
    watcher.join()
    return took / max(1, steps), took
