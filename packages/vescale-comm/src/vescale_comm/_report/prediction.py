"""Predicted time and memory of a training step, for worlds of any size, from costs of its collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._plan import Unit, model_units
from ..errors import PlanError
from .costs import AxisCost, MeshCosts
from .simulate import COMPUTE, Span, simulate
from .steps import STRATEGIES, Setup, build_step

__all__ = ["Prediction", "predict"]

BACKWARD = 2 / 3
"""Share of the backward in the time of forward and backward: it has two products of matrices for each one."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one rank does in a step, far from the first one."""

    strategy: str
    """How the model is trained."""
    mesh: Mapping[str, int]
    """Sizes of the data parallel axes."""
    seconds: float
    """Of the step."""
    computing: float
    """Seconds of forward, backward, copies, hooks and update, undisturbed."""
    communicating: Mapping[str, float]
    """By group, seconds in which it is busy; a group is named for its mesh axes."""
    sent: Mapping[str, float]
    """By group, bytes that the rank sends."""
    peak_bytes: float
    """Most memory in use: parameters, gradients, optimizer state, gathered units, and activations if given."""
    fixed_bytes: float
    """The part of it that is in use all the time."""
    spans: tuple[Span, ...]
    """What ran when."""

    @property
    def exposed(self) -> float:
        """Seconds by which communication makes the step longer."""
        return self.seconds - self.computing

    def explain(self) -> str:
        """Return a few lines of text."""
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = [
            f"{self.strategy} on {mesh}: {self.seconds * 1e3:.1f} ms per step, of which {self.exposed * 1e3:.1f} ms "
            f"({self.exposed / self.seconds if self.seconds else 0:.1%}) wait for communication",
            f"memory: {self.peak_bytes / 2**30:.2f} GiB at most, {self.fixed_bytes / 2**30:.2f} GiB of it all the time",
        ]
        lines += [
            f"group {name}: busy for {seconds * 1e3:.1f} ms, sends {self.sent[name] / 1e9:.2f} GB per rank"
            for name, seconds in self.communicating.items()
        ]
        return "\n".join(lines)


def predict(
    model: Any,
    mesh: Mapping[str, int],
    strategy: str,
    costs: MeshCosts | Mapping[str, AxisCost],
    *,
    compute_seconds: float | Sequence[tuple[float, float]],
    update_seconds: float = 0.0,
    overlap: float | None = None,
    **options: Any,
) -> Prediction:
    """Predict a training step by simulation: one stream computes, one queue per group of ranks communicates.

    Needs no process group, and takes no longer for more ranks.

    Args:
        model: a module of torch, a name such as "llama-3-8b", a config, or units as of `model_units`.
        mesh: sizes of the data parallel axes, by name, outermost first. fsdp cuts parameters along the last one, and
            keeps replicas along those before it; the others take all axes together.
        strategy: "ddp", "zero1", "zero2" or "fsdp".
        costs: of the axes, and of what a rank does besides, from `calibrate`; or of axes, from `AxisCost.of_link`.
        compute_seconds: of forward and backward on one rank, which is spread over units by their elements; or a pair
            of them for each unit.
        update_seconds: in which one rank would update all parameters.
        overlap: speed of computation while communication goes on, from 0 (it needs the same processor) to 1. None: as
            measured, if `costs` know it, else 1.
        **options: other fields of `Setup`: bucket_bytes, param_bytes, grad_bytes, state_bytes, activation_bytes,
            prefetch, reshard, copy.

    Raises:
        PlanError: an argument makes no sense.

    Example:
        >>> costs = {"shard": AxisCost.of_link(alpha=5e-6, bandwidth=45e9)}
        >>> found = predict("llama-3-8b", {"shard": 64}, "fsdp", costs, compute_seconds=2.0, param_bytes=2)
        >>> round(found.seconds, 2), round(found.peak_bytes / 2**30, 1)
        (2.1, 5.4)
    """
    if strategy not in STRATEGIES:
        raise PlanError(f"strategy: needs one of {', '.join(STRATEGIES)}; got {strategy!r}.")
    if not mesh or any(not isinstance(size, int) or size < 1 for size in mesh.values()):
        raise PlanError(f"mesh: needs the size of one axis or more, from 1 on; got {dict(mesh)}.")
    if overlap is not None and not 0 <= overlap <= 1:
        raise PlanError(f"overlap: needs a share from 0 to 1; got {overlap}.")
    units = _units(model)
    forward, backward = _spread(units, compute_seconds)
    by_axis = costs if isinstance(costs, MeshCosts) else MeshCosts({(name,): cost for name, cost in costs.items()})
    try:
        setup = Setup(
            units,
            dict(mesh),
            by_axis,
            tuple(forward),
            tuple(backward),
            _positive("update_seconds", update_seconds),
            measured_overlap=overlap is None,
            **options,
        )
    except TypeError as error:
        raise PlanError(f"predict: {error}") from None
    step = build_step(setup, strategy)
    found = simulate(step.tasks, 1.0 if overlap is None else overlap)
    busy: dict[str, float] = dict.fromkeys(step.sent, 0.0)
    computing = 0.0
    for task in step.tasks:
        if task.stream == COMPUTE:
            computing += task.seconds
        else:
            busy[task.stream] += task.seconds
    return Prediction(
        strategy,
        dict(mesh),
        found.seconds,
        computing,
        busy,
        step.sent,
        step.fixed + found.peak,
        step.fixed,
        found.spans,
    )


def _positive(name: str, seconds: float) -> float:
    if not (math.isfinite(seconds) and seconds >= 0):
        raise PlanError(f"{name}: needs seconds from 0 on; got {seconds}.")
    return seconds


def _spread(units: Sequence[Unit], seconds: float | Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    if isinstance(seconds, int | float):
        _positive("compute_seconds", seconds)
        total = sum(unit.numel for unit in units)
        shares = [seconds * unit.numel / total for unit in units]
        return [share * (1 - BACKWARD) for share in shares], [share * BACKWARD for share in shares]
    if len(seconds) != len(units):
        raise PlanError(f"compute_seconds: there are {len(units)} units, but times of {len(seconds)}.")
    for pair in seconds:
        for one in pair:
            _positive("compute_seconds", one)
    return [pair[0] for pair in seconds], [pair[1] for pair in seconds]


def _units(model: Any) -> tuple[Unit, ...]:
    if isinstance(model, str | Mapping):
        return model_units(model)
    if isinstance(model, Sequence):
        found = tuple(model)
    else:
        from .modules import module_units

        found = module_units(model)
    if not found or not sum(unit.numel for unit in found):
        raise PlanError("model: there are no parameters in it.")
    return found
