"""`auto_plan`: a parallel plan for any model, from one call on the meta device and a cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._dispatch.engine import clear_caches
from .._mesh import mesh_info
from .._modules.agreement import disagreements
from .._modules.forward import children
from .._modules.plan import Path
from .._tensor import DTensor
from ..errors import PlanError
from .cost import DEVICES, Cost, Machine
from .mesh import RehearsalMesh
from .plan import AutoPlan, sections_of
from .rehearse import Example, Key, Rehearsal, choices_of, failure
from .search import Search
from .skeleton import Skeleton, skeleton
from .trace import Spot, Trace, Unit, Value


def auto_plan(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Any,
    *,
    memory: int | None = None,
    machine: Machine | None = None,
) -> AutoPlan:
    """Find placements for the parameters of a model and for what flows between its modules.

    The model runs on the meta device, without data, as it would on the mesh, under one candidate after the other;
    what each sends, computes and keeps is counted. Nothing is known by name: parameters are grouped by who reads
    which tensor, the batch is found in the example inputs, and repeated layers are planned once. Every axis may
    carry data, tensor or sequence parallelism. The plan with the least repeated work wins, then the one that fits
    into memory, then the fastest. Every rank of the mesh must make this call, with inputs of the same shapes.

    Args:
        model: a module that is not parallelized, on any device; the meta device will do. It is not changed.
        mesh: a mesh with names for its axes.
        example_inputs: one batch for the whole mesh: a tensor or dataclass, a tuple of arguments, or a mapping of
            named ones.
            Only shapes and types count, and values of whole numbers and masks where the model asks whether
            something holds of them, if they are the same on all ranks. DTensors fix which axes carry data.
        memory: bytes that a rank has; plans beyond it lose.
        machine: speeds of the ranks and of the mesh axes; default: orders of magnitude by type of device.

    Returns:
        The plan, for `parallelize_module`; print it to see and edit it.

    Raises:
        PlanError: the model does not run on the meta device, or ranks find different plans.

    >>> plan = auto_plan(model, mesh, torch.zeros(8, 128, dtype=torch.long), memory=80 << 30)  # doctest: +SKIP
    """
    info = mesh_info(mesh)
    if not mesh.mesh_dim_names:
        raise PlanError(f"{info!r} has no names for its axes, which a plan refers to; make it with mesh_dim_names")
    example = _example(example_inputs)
    if machine is None:
        machine = DEVICES.get(info.device_type, Machine())
    rehearsal_mesh = RehearsalMesh(mesh)
    bones, trace = _traced(model, example)
    if trace.answers and disagreements(info, {"answers": repr(trace.answers)}):
        bones, trace = _traced(model, example, data=False)
    rehearsal = Rehearsal(bones, rehearsal_mesh, example, machine, trace.answers)
    try:
        nothing = rehearsal.cost({})
    except Exception as error:
        raise failure(error) from error
    units = trace.units()
    main = _main(units)
    search = Search(rehearsal, units, *_batch(example, rehearsal_mesh, main), main, nothing.flops, memory)
    choices = search.run()
    cost = rehearsal.cost(choices, memory=True)
    title = f"auto plan for {type(model).__name__} on {info!r}"
    if trace.guesses:
        title += f"; the model reads its data {trace.guesses} times for a yes or no, and the prediction takes no"
    plan = AutoPlan(sections_of(choices, bones, mesh), cost, title)
    clear_caches()  # entries for the rehearsal's mesh
    different = disagreements(info, {"plan": plan.source()})
    if different:
        lines = "; ".join(f"rank at {c}: {text!r}" for c, text in different["plan"])
        raise PlanError(
            f"the ranks of {info!r} found different plans for {type(model).__name__}; give all the same model, "
            f"example_inputs of the same shapes, memory and machine ({lines})"
        )
    return plan


def predict(
    model: nn.Module, mesh: DeviceMesh, plan: Any, example_inputs: Any, *, machine: Machine | None = None
) -> Cost:
    """What a training step of a model costs a rank under a plan, without running it.

    The loss is the sum of the scalars that the model returns, or else of the squares of all that has a gradient.

    Args:
        model: a module that is not parallelized; it is not changed.
        mesh: the mesh.
        plan: what `parallelize_module` takes.
        example_inputs: as for `auto_plan`.
        machine: as for `auto_plan`.

    Raises:
        PlanError: the plan does not fit, or the model does not run on the meta device.
    """
    from .._modules.parallelize import read

    info = mesh_info(mesh)
    example, rehearsal_mesh = _example(example_inputs), RehearsalMesh(mesh)
    requests = read(plan, model, info)
    bones, trace = _traced(model, example)
    machine = machine or DEVICES.get(info.device_type, Machine())
    rehearsal = Rehearsal(bones, rehearsal_mesh, example, machine, trace.answers)
    choices = choices_of(requests, bones, rehearsal_mesh)
    try:
        return rehearsal.cost({rehearsal.known_as(k): v for k, v in choices.items()}, memory=True)
    except Exception as error:
        raise failure(error) from error
    finally:
        clear_caches()


def _example(inputs: Any) -> Example:
    if isinstance(inputs, Tensor) or (is_dataclass(inputs) and not isinstance(inputs, Mapping)):
        return Example((inputs,), {})
    if isinstance(inputs, Mapping):
        return Example((), dict(inputs))
    if isinstance(inputs, tuple | list):
        return Example(tuple(inputs), {})
    raise TypeError(
        f"example_inputs must be a tensor, a dataclass, a tuple of arguments or a mapping of named ones, "
        f"got {type(inputs).__name__}; one batch such as the model is called with will do"
    )


def _traced(model: nn.Module, example: Example, *, data: bool = True) -> tuple[Skeleton, Trace]:
    """The skeleton with repeated layers left out; whole where the model does not run without them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if getattr(model, "_vescale_root", None) is not None:
        raise PlanError(f"{type(model).__name__} is parallelized already; make the plan before")
    apart: set[str] = set()
    try:
        while (pairs := skeleton(model, kept=2, apart=apart)).runs:
            trace = Trace(pairs, example, data=data)
            more = {name for run in pairs.runs for name in trace.apart(run)}
            if not more:
                bones = skeleton(model, apart=apart)
                return bones, Trace(bones, example, data=data)
            apart |= more  # and what is repeated inside of them
    except PlanError:  # its forward counts on all layers being there; else what follows says so again
        pass
    bones = skeleton(model, kept=None)
    return bones, Trace(bones, example, data=data)


def _batch(
    example: Example, mesh: RehearsalMesh, main: tuple[int, ...]
) -> tuple[dict[int, dict[Key, int]], list[Spot], dict[int, int]]:
    """How the inputs are cut, by layout of the stream; all of them; the axes along which DTensors are cut already.

    The stream tells the sizes of its dims; of the inputs those dims are cut that have these sizes. Where it has no
    dim in common with them, the largest first dim is taken for the batch.
    """
    given: list[tuple[Path, Tensor]] = []
    for name, value in (*((str(i), a) for i, a in enumerate(example.args)), *example.kwargs.items()):
        _tensors(value, (name,), given)
    fixed = {
        axis: kind for _, t in given if isinstance(t, DTensor) for axis, kind in enumerate(t._spec.types) if kind >= 0
    }
    spots = [Spot("input", "", Value(path, id(t), tuple(t.shape), t.is_floating_point())) for path, t in given]
    rows = max((s.value.shape[0] for s in spots if s.value.shape), default=1)
    layouts: dict[int, dict[Key, int]] = {}
    cut = _cut(spots, 0, main[0]) if main and main[0] > 1 else {}
    cut = cut or {k: d for k, d in _cut(spots, 0, rows).items() if d == 0}
    if rows > 1 and cut:
        layouts[0] = {Key("input", "", ()): 0} if len(cut) == len(given) and not any(cut.values()) else cut
    if len(main) > 2 and main[1] > 1:  # tokens are cut behind the first modules
        layouts[1] = _cut([s for s in spots if s.value.flows and len(s.value.shape) > 2], 1, main[1])
        if layouts[1]:
            layouts[1] |= _cut([s for s in spots if not s.value.flows], 1, main[1])
    return layouts, spots, fixed


def _main(units: list[Unit]) -> tuple[int, ...]:
    """The most common shape of the stream."""
    shapes = Counter(v.shape for unit in units for v in unit.outputs)
    return max(shapes, key=lambda s: shapes[s], default=())


def _cut(spots: list[Spot], dim: int, size: int) -> dict[Key, int]:
    """Where each input has a dim of this size: at the same place, or else at the only one."""
    found = {}
    for spot in spots:
        shape = spot.value.shape
        where = [dim] if len(shape) > dim and shape[dim] == size else [d for d, n in enumerate(shape) if n == size]
        if len(where) == 1:
            found[Key("input", "", spot.value.path)] = where[0]
    return found


def _tensors(value: Any, path: Path, into: list[tuple[Path, Tensor]]) -> None:
    if isinstance(value, Tensor):
        into.append((path, value))
        return
    for key, item in children(value):
        _tensors(item, (*path, key), into)


__all__ = ["auto_plan", "predict"]
