"""`fully_shard`: each rank keeps a part of the parameters, gradients and optimizer state, and gathers what it needs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import check_dtypes, check_granularity, check_module, check_prefetch
from .._heap import keep_freed_memory
from .._plan import Blocks
from .._taken import refuse_taken
from .._transport import Transport
from ..errors import PlanError
from .build import Options, build, check_same, plan_units
from .channels import connect, groups_of
from .choose import choose_units
from .engine import Engine
from .meta import Initialize, fill, meta_modules
from .state import install

__all__ = ["engine_of", "full_parameters", "fully_shard", "no_sync"]

_engines: weakref.WeakKeyDictionary[nn.Module, Engine] = weakref.WeakKeyDictionary()


def fully_shard(
    module: nn.Module,
    mesh_or_group: DeviceMesh | ProcessGroup | None = None,
    *,
    units: str | Sequence[str | type[nn.Module]] = "auto",
    granularity: Blocks = 1,
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    cast_inputs: bool = True,
    average: bool = True,
    transport: str | Transport = "auto",
    order: str | None = None,
    offload: bool = False,
    prefetch: int = 1,
    check_finite: bool = False,
    initialize: Initialize | None = None,
) -> nn.Module:
    """Shard the parameters of a module among ranks (ZeRO-3), in place. Every rank calls this with the same module.

    Between steps `module.parameters()` are one-dimensional shards, on which any elementwise optimizer may run. The
    parameters of a unit are gathered before its forward and its backward; its gradients are reduced as soon as they
    are complete. Ranks may use different units and parameters.

    Clip with `vescale_comm.clip_grad_norm_`. That of torch sees the shards of its own rank only: each rank would get
    another norm and scale by another factor, without an error.

    Args:
        module: the whole model; submodules are sharded with it.
        mesh_or_group: the ranks: a group, a mesh of one axis, or one of two, (replicas, shards). None: all ranks.
        units: modules whose parameters are gathered together: "auto" (blocks, and what is as large), or names and
            classes. What is in no unit belongs to the root, which stays gathered from forward to backward.
        granularity: what must stay on one rank: a number of elements, `Rows`, `Block` or `Whole`, or a mapping from
            regular expressions of parameter names to these.
        reshard_after_forward: give the parameters of a unit back after its forward, and gather them again for backward.
            At most two units are gathered then (one more with each of `prefetch` above 1), besides the root's.
        param_dtype: dtype in which parameters are sent and used; None: their own.
        reduce_dtype: dtype in which gradients are kept and sent; None: that of the shards. Sums of 16-bit gradients are
            in float32.
        cast_inputs: with `param_dtype`: convert floating-point inputs of units to it.
        average: divide the sum of gradients by the number of ranks.
        transport: how parameters and gradients travel; see `vescale_comm.transport`.
        order: of sums: "canonical" or "native". Canonical sums have the bits of those of all other strategies; with
            replicas they go over shards first and then over replicas.
        offload: keep shards and their gradients in main memory.
        prefetch: how many units are gathered ahead.
        check_finite: look at all gradients for infinities and NaN, and raise an error that names parameter and rank.
        initialize: called with modules that were made on the meta device, to give them values; None: their
            `reset_parameters()`.

    Returns:
        The same module.

    Raises:
        PlanError: an argument that makes no sense, or a parameter that cannot be sharded, or whose gradients
            something else reduces already.
        TypeError: an argument of another type.
        MismatchError: the ranks pass different modules or arguments.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> file = tempfile.NamedTemporaryFile()
        >>> dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{file.name}")
        >>> model = fully_shard(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> [tuple(p.shape) for p in model.parameters()]
        [(12,), (3,), (6,), (2,)]
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    check_module("fully_shard", module)
    if any(inner in _engines for inner in module.modules()):
        raise PlanError("module: it, or a module inside of it, is sharded already; call fully_shard once, on the root.")
    refuse_taken("fully_shard", module, module.named_parameters())
    check_prefetch(prefetch)
    check_granularity(granularity)
    check_dtypes(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    groups = groups_of(mesh_or_group)
    if groups.device.type == "cpu":
        keep_freed_memory()
    options = Options(granularity, not reshard_after_forward, param_dtype, reduce_dtype, average, offload, check_finite)
    planned = plan_units(module, choose_units(module, units), groups.shard.size(), options)
    channels = connect(groups, transport, order)
    check_same(planned, options, groups, channels)
    empty = meta_modules(module)
    built = build(planned, options, groups, channels)
    fill(built, empty, initialize, groups.device)
    engine = Engine(module, built, channels, ahead=prefetch, cast_inputs=param_dtype if cast_inputs else None)
    for inner in module.modules():
        _engines[inner] = engine
    install(built)
    return module


def engine_of(module: nn.Module) -> Engine:
    """Return what runs a sharded module, or the sharded module that it is part of.

    Raises:
        PlanError: it is not sharded.
    """
    engine = _engines.get(module)
    if engine is None:
        raise PlanError(f"module: this {type(module).__name__} is not sharded; call fully_shard on it first.")
    return engine


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Let backwards inside the context keep their gradients, whole and not reduced, for the next one outside of it.

    That saves time and costs memory: elsewhere each backward reduces, and adds to the gradients of the shards.
    `zero_grad` clears what is kept, too.

    Args:
        module: a module that `fully_shard` has sharded.
    """
    return engine_of(module).no_sync()


@contextlib.contextmanager
def full_parameters(module: nn.Module, *, write: bool = False) -> Iterator[None]:
    """Gather all parameters for the time of the context: `module.parameters()` are whole then. Every rank enters it.

    Args:
        module: a module that `fully_shard` has sharded.
        write: take over into the shards what was written to the parameters; all ranks must write the same. Else
            writing is an error, when the context ends.

    Example:
        with full_parameters(model):
            torch.save(model.state_dict(), "model.pt")
    """
    engine = engine_of(module)
    engine.reset()
    changed = []
    try:
        for unit in engine.units:
            engine.sequencer.need(unit)
            for flat in unit.flats:
                for entry, full in zip(flat.entries, flat.full, strict=True):
                    for use in entry.uses:
                        changed.append((use, use.module._parameters[use.attribute]))
                        use.module._parameters[use.attribute] = full
        yield
        if write:
            for unit in engine.units:
                unit.accept_writes()
    finally:
        for use, shard in changed:
            use.module._parameters[use.attribute] = shard
        for unit in engine.units:
            unit.free()
