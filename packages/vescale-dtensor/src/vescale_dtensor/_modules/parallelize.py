"""`parallelize_module`: distribute a module's parameters and buffers, and hook its forwards, by a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._api import distribute_tensor
from .._comm.move import forget_casts_of
from .._deferred import finish, gradient, is_deferred, require_outside
from .._dispatch import policy
from .._mesh import MeshInfo, mesh_info
from .._spec import spec_of
from .._tensor import DTensor
from ..errors import PlanError
from ..placements import AxisTypes, P, Placement, Replicate, short, to_axis_types, to_placement
from .agreement import digest, disagreements
from .forward import EnterHook, InputHook, LeaveHook, OutputHook, Root
from .plan import Axes, Request, Requests, merged, read_plan, require_matches
from .registry import Plan, find_plan
from .state import align_state_dict

AnyPlan = str | Plan | Callable[[nn.Module, DeviceMesh], Plan] | Sequence["str | Plan"]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: AnyPlan,
    *,
    src_data_rank: int | None = None,
    check: bool = True,
    example_inputs: Any = None,
) -> nn.Module:
    """Distribute a module in place by a plan, and return it. Its code stays that of one device.

    A plan is ``{"parameter": {pattern: placements}, "buffer": {...}, "forward": {pattern: placements}}``.
    Patterns are regular expressions that match whole names. Keys of "forward" end in ``.input`` or
    ``.output``, and perhaps in ``.<argument name or index>`` for one of several values. Placements are a
    list with one per mesh axis, or a mapping by the name of the axis. Values of "forward" may be containers
    of placements that mirror the arguments, with None for what stays. Where several entries match, the
    later one wins, axis by axis. Axes that no entry names are `Replicate()` for parameters and buffers;
    inputs and outputs stay on them as they are.

    Parameters without an entry are replicated; their gradients come out reduced. Tied parameters stay
    tied. Plain tensors that the module's code makes while it runs are taken as the same on every rank;
    plain inputs are too, and are compared over the mesh at the calls 1, 2, 4, 8 and so on. Every rank must
    make this call. Parameters become other objects: make the optimizer afterwards.

    Args:
        module: the module, the same on every rank. On the meta device only shapes are distributed; one that was
            made inside `deferred_init` gets its values here, each rank's part on that rank.
        device_mesh: the mesh.
        plan: a plan, the name of a registered one, a function of module and mesh that returns one, "auto" for
            one that `auto_plan` finds, or a list of these, merged in order.
        src_data_rank: rank within each mesh axis whose parameters count; they are broadcast. None
            (default) communicates no parameters.
        check: compare hashes of the parameters over the mesh (without `src_data_rank`).
        example_inputs: one batch for the whole mesh, for "auto" (see `auto_plan`); only its shapes count.

    Raises:
        PlanError: a key matches nothing, a placement does not fit, a section or axis is unknown, or the
            module is parallelized already.
        ValueError: the ranks hold different parameters.

    >>> plan = {"parameter": {"fc1.weight": {"tp": Shard(0)}}, "forward": {"input": {"dp": Shard(0)}}}  # doctest: +SKIP
    """
    require_outside("parallelize_module")
    info = mesh_info(device_mesh)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if getattr(module, "_vescale_root", None) is not None:
        raise PlanError(
            f"{type(module).__name__} is parallelized already; merge the plans in one call: "
            f"parallelize_module(module, mesh, [plan, other])"
        )
    requests = read(plan, module, info, example_inputs)
    hooks = _plan_hooks(module, info, requests.forward)
    targets = _targets(module, info, requests)
    if check and src_data_rank is None:
        _check_parameters(module, info)
    made = {id(target[2]): _replace(*target, info, src_data_rank) for target in targets}
    finish(module, made)
    root = Root(info, module)
    module._vescale_root = root  # type: ignore[assignment]
    module.register_forward_pre_hook(EnterHook(root), prepend=True, with_kwargs=True)
    for owner, hook in hooks:
        if isinstance(hook, InputHook):
            owner.register_forward_pre_hook(hook, with_kwargs=True)
        else:
            owner.register_forward_hook(hook)
    module.register_forward_hook(LeaveHook(root), always_call=True)
    module.register_load_state_dict_pre_hook(align_state_dict)  # type: ignore[no-untyped-call]
    policy.state.modules_exist = 1
    # What a forward without a backward left holds parameters by way of autograd, where no garbage collector looks.
    weakref.finalize(module, forget_casts_of, [weakref.ref(p) for p in module.parameters()]).atexit = False
    return module


def read(plan: AnyPlan, module: nn.Module, mesh: MeshInfo, example_inputs: Any = None) -> Requests:
    """Read what `parallelize_module` takes as a plan."""
    plans: Sequence[Any] = [plan] if isinstance(plan, str | Mapping) or callable(plan) else plan
    if not isinstance(plans, Sequence):
        raise PlanError(f"plan = {plan!r}: expected a mapping, the name of a plan, or a list of these")
    total = Requests([], [], [])
    for one in plans:
        if one == "auto" and example_inputs is not None:
            from .._auto import auto_plan

            found = read_plan(auto_plan(module, mesh.device_mesh, example_inputs), mesh)
        elif isinstance(one, str):
            found = read_plan(find_plan(one, module, mesh.device_mesh), mesh, optional=True)
        else:
            found = read_plan(one(module, mesh.device_mesh) if callable(one) else one, mesh)
        total.parameter += found.parameter
        total.buffer += found.buffer
        total.forward += found.forward
    return total


# ------------------------------------------------------------------ parameters and buffers

_Target = tuple[list[nn.Module], list[str], Tensor, AxisTypes]


def _targets(module: nn.Module, mesh: MeshInfo, requests: Requests) -> list[_Target]:
    """What to distribute: each tensor once, with all places where it stands and its types."""
    found: list[_Target] = []
    for what, of in (("parameter", requests.parameter), ("buffer", requests.buffer)):
        places = _places(module, what)
        require_matches(of, [name for name, _, _, _ in places], what)
        by_tensor: dict[int, list[tuple[str, nn.Module, str, Tensor]]] = {}
        for place in places:
            by_tensor.setdefault(id(place[3]), []).append(place)
        for same in by_tensor.values():
            tensor = same[0][3]
            types = _types([n for n, _, _, _ in same], tensor, of, mesh, what)
            if types is not None:
                found.append(([m for _, m, _, _ in same], [a for _, _, a, _ in same], tensor, types))
    return found


def _places(module: nn.Module, what: str) -> list[tuple[str, nn.Module, str, Tensor]]:
    """(full name, owner, attribute, tensor) of all parameters or buffers, under every name that leads to them."""
    return [
        (f"{prefix}.{name}" if prefix else name, owner, name, tensor)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, tensor in (owner._parameters if what == "parameter" else owner._buffers).items()
        if tensor is not None
    ]


def _types(names: list[str], tensor: Tensor, requests: list[Request], mesh: MeshInfo, what: str) -> AxisTypes | None:
    """Types of one tensor, known under `names`; None if it is distributed already."""
    if torch.nn.parameter.is_lazy(tensor):
        raise PlanError(f"{what} {names[0]!r} has no shape yet; run a lazy module once before parallelizing it")
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise PlanError(
            f"{what} {names[0]!r} has gradient hooks, which would stay with the tensor that it was before; "
            "register them after parallelize_module"
        )
    wanted: dict[str, Axes] = {}
    for name in names:
        matched = [r for r in requests if r.pattern.fullmatch(name)]
        if matched:
            wanted[name] = merged((r.axes for r in matched), mesh)
    if len(set(map(str, wanted.values()))) > 1:
        lines = "; ".join(f"{n}: {list(a)}" for n, a in wanted.items())
        raise PlanError(
            f"one tied {what} is given different placements under its names: {lines}. Give all its names the same"
        )
    axes = next(iter(wanted.values()), (None,) * mesh.ndim)
    placements: list[Placement] = [p if p is not None else Replicate() for p in axes]
    ndim = tensor.ndim
    try:
        types = to_axis_types(placements, mesh_ndim=mesh.ndim, ndim=ndim)
        spec_of(mesh, tensor.shape, types)
    except ValueError as error:
        raise PlanError(f"the plan does not fit {what} {names[0]!r} of shape {list(tensor.shape)}: {error}") from None
    if P in types:
        raise PlanError(
            f"the plan gives {what} {names[0]!r} the placements {placements}: only results can be pending sums"
        )
    if not isinstance(tensor, DTensor):
        return types
    spec = tensor._spec
    if spec.mesh is not mesh or (wanted and spec.types != types):
        raise PlanError(
            f"{what} {names[0]!r} is distributed already, as ({short(spec.types)}) on {spec.mesh!r}; the plan wants "
            f"{[to_placement(t) for t in types]} on {mesh!r}"
        )
    return None


def _replace(
    owners: list[nn.Module], names: list[str], tensor: Tensor, types: AxisTypes, mesh: MeshInfo, source: int | None
) -> DTensor:
    placements = [to_placement(t) for t in types]
    source = None if tensor.is_meta and not is_deferred(tensor) else source
    new = distribute_tensor(tensor, mesh.device_mesh, placements, src_data_rank=source)
    for key, value in tensor.__dict__.items():  # what users attach to parameters
        if key != "_is_param":
            setattr(new, key, value)
    grad = gradient(tensor)
    if grad is not None:
        new.grad = distribute_tensor(grad, mesh.device_mesh, new.grad_placements)
    for owner, name in zip(owners, names, strict=True):
        held = owner._parameters if name in owner._parameters else owner._buffers
        held[name] = new  # type: ignore[assignment]
    return new


def _check_parameters(module: nn.Module, mesh: MeshInfo) -> None:
    mine = {
        name: digest(t)
        for what in ("parameter", "buffer")
        for name, _, _, t in _places(module, what)
        if not isinstance(t, DTensor) and not torch.nn.parameter.is_lazy(t)
    }
    different = disagreements(mesh, mine)
    if different:
        name, said = next(iter(different.items()))
        lines = "; ".join(f"rank at {c}: {text}" for c, text in said)
        raise ValueError(
            f"{len(different)} of {len(mine)} parameters and buffers differ "
            f"between the ranks of {mesh!r}, first {name!r} ({lines}). "
            "Seed every rank alike before the module is made (torch.manual_seed), or pass src_data_rank=0 to broadcast"
        )


# ------------------------------------------------------------------ forwards


def _plan_hooks(
    module: nn.Module, mesh: MeshInfo, requests: list[Request]
) -> list[tuple[nn.Module, InputHook | OutputHook]]:
    """Hooks for the modules that the plan names, one per module and side."""
    named = list(module.named_modules(remove_duplicate=False))
    require_matches(requests, [name for name, _ in named], "submodule")
    hooks: list[tuple[nn.Module, InputHook | OutputHook]] = []
    names: dict[nn.Module, list[str]] = {}
    for name, owner in named:
        names.setdefault(owner, []).append(name)
    for owner, known_as in names.items():
        wanted = [r for r in requests if any(r.pattern.fullmatch(n) for n in known_as)]
        inputs, outputs = [r for r in wanted if r.side == "input"], [r for r in wanted if r.side == "output"]
        if inputs:
            hooks.append((owner, InputHook(mesh, known_as[0], owner, inputs)))
        if outputs:
            hooks.append((owner, OutputHook(mesh, known_as[0], outputs)))
    return hooks
