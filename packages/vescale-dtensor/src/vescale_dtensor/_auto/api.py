"""`auto_plan`: a parallel plan for any model, from one call on the meta device and a cost model."""

from __future__ import annotations

from collections.abc import Mapping
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
from .trace import Trace


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
        example_inputs: one batch for the whole mesh: a tensor, a tuple of arguments, or a mapping of named ones.
            Only shapes and types count. DTensors fix which axes carry data.
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
    rehearsal = Rehearsal(bones, rehearsal_mesh, example, machine)
    try:
        nothing = rehearsal.cost({})
    except Exception as error:
        raise failure(error) from error
    batch, fixed = _batch(example, rehearsal_mesh)
    search = Search(rehearsal, trace.units(), batch, fixed, nothing.flops, memory)
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
    bones, _ = _traced(model, example)
    rehearsal = Rehearsal(bones, rehearsal_mesh, example, machine or DEVICES.get(info.device_type, Machine()))
    choices = choices_of(requests, bones, rehearsal_mesh)
    try:
        return rehearsal.cost({rehearsal.known_as(k): v for k, v in choices.items()}, memory=True)
    except Exception as error:
        raise failure(error) from error
    finally:
        clear_caches()


def _example(inputs: Any) -> Example:
    if isinstance(inputs, Tensor):
        return Example((inputs,), {})
    if isinstance(inputs, Mapping):
        return Example((), dict(inputs))
    if isinstance(inputs, tuple | list):
        return Example(tuple(inputs), {})
    raise TypeError(
        f"example_inputs must be a tensor, a tuple of arguments or a mapping of named ones, "
        f"got {type(inputs).__name__}; one batch such as the model is called with will do"
    )


def _traced(model: nn.Module, example: Example) -> tuple[Skeleton, Trace]:
    """The skeleton with repeated layers left out; whole where the model does not run without them."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if getattr(model, "_vescale_root", None) is not None:
        raise PlanError(f"{type(model).__name__} is parallelized already; make the plan before")
    bones = skeleton(model)
    if bones.runs:
        try:
            return bones, Trace(bones, example)
        except PlanError:  # its forward counts on all layers being there
            bones = skeleton(model, shorten=False)
    return bones, Trace(bones, example)


def _batch(example: Example, mesh: RehearsalMesh) -> tuple[dict[int, list[Key]], dict[int, int]]:
    """Where the inputs may be cut, by layout of the stream, and the axes along which DTensors among them are cut."""
    given: list[tuple[Path, Tensor]] = []
    for name, value in (*((str(i), a) for i, a in enumerate(example.args)), *example.kwargs.items()):
        _tensors(value, (name,), given)
    fixed = {
        axis: kind for _, t in given if isinstance(t, DTensor) for axis, kind in enumerate(t._spec.types) if kind >= 0
    }
    rows = max((t.shape[0] for _, t in given if t.ndim), default=1)
    batch = [path for path, t in given if t.ndim and t.shape[0] == rows]
    layouts: dict[int, list[Key]] = {}
    if rows > 1:
        whole = len(batch) == len(given)
        layouts[0] = [Key("input", "", ())] if whole else [Key("input", "", path) for path in batch]
    if all(t.ndim > 1 for _, t in given):
        layouts[1] = []  # the sequence is cut behind the first modules, not at the input
    return layouts, fixed


def _tensors(value: Any, path: Path, into: list[tuple[Path, Tensor]]) -> None:
    if isinstance(value, Tensor):
        into.append((path, value))
        return
    for key, item in children(value):
        _tensors(item, (*path, key), into)


__all__ = ["auto_plan", "predict"]
