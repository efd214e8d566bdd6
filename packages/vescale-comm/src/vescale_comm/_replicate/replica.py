"""Data parallelism around a module that stays as it is: hooks reduce gradients and keep buffers equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._arguments import check_dtypes, check_megabytes, check_module
from .._compress import compressor_factory
from .._gradients import GradientReducer, Lane, local_of
from .._taken import give_up, refuse_taken, take
from .._transport import Transport, transport
from ..errors import CommError
from .groups import Groups, group_of, reduced, trainable
from .join import Joining, join
from .same import make_same
from .watch import ModuleWatch

__all__ = ["Replica", "ReplicaOptions", "forget_replica", "replicate", "replicated"]


@dataclass(frozen=True)
class ReplicaOptions:
    """How a module is replicated; see `DistributedDataParallel`."""

    transport: str | Transport = "auto"
    """Kind of transport, or one."""
    order: str | None = None
    """Order of sums."""
    bucket_mb: float = 25
    """Limit of a bucket, in MiB."""
    accumulate_dtype: torch.dtype | None = None
    """Dtype of sums."""
    average: bool = True
    """Whether sums are divided by the number of ranks."""
    compressor: Any = None
    """Name or factory."""
    compressor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of it."""
    broadcast_buffers: bool = True
    """Whether the buffers of the first rank are copied to the others before the first forward of each window."""
    sync_parameters: bool = True
    """Whether all ranks start with the parameters and buffers of the first one."""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """Other groups, by patterns of names."""
    view: bool = False
    """Whether autograd adds in the buffers from the start."""
    check_finite: bool = False
    """Whether to look for gradients that are not finite."""
    manual: bool = False
    """Whether only `finish_grad_sync` reduces."""

    def __post_init__(self) -> None:
        """Check what would go wrong far from here."""
        check_megabytes("bucket_mb", self.bucket_mb)
        check_dtypes(accumulate_dtype=self.accumulate_dtype)


class Replica:
    """The data parallelism of one module; made by `replicate` and `DistributedDataParallel`.

    Args:
        module: the module.
        group_or_mesh: the ranks that see different data.
        options: how.
    """

    def __init__(self, module: nn.Module, group_or_mesh: Any, options: ReplicaOptions) -> None:
        self.module = module
        self.options = options
        self.group = group_of(group_or_mesh)
        """The ranks that see different data."""
        parameters = trainable(module)
        if not parameters:
            raise CommError(f"{type(module).__name__} has no parameter that requires a gradient: nothing to replicate.")
        self._device = local_of(parameters[0][1]).device
        divisor = self.group.size() if options.average else 1
        self._groups = Groups(self.group, self._transport_of, options.groups, divisor)
        lanes = self._groups.lanes(parameters)
        self.reducer = GradientReducer(
            lanes[0].parameters,
            self.group,
            transport=lanes[0].transport,
            bucket_bytes=int(options.bucket_mb * 2**20),
            accumulate=options.accumulate_dtype,
            divisor=divisor,
            compressor=compressor_factory(options.compressor, options.compressor_options),
            view=options.view,
            wait=not options.manual,
            learn=True,
            check_finite=options.check_finite,
            others=lanes[1:],
        )
        """Reduces the gradients."""
        self.reducer.divides = options.average
        self._taken = {id(param) for lane in lanes for _, param in lane.parameters}
        self._ignored = {id(param) for _, param in parameters} - self._taken
        self._take(lanes)
        self._watch = ModuleWatch(module)
        self.joining: Joining | None = None
        """While ranks may run out of data."""
        self._weight: float | None = None
        self._handles: list[Any] = []
        if options.sync_parameters:
            for lane in lanes:
                make_same(lane.transport, lane.parameters)
            frozen = [(name, param) for name, param in module.named_parameters() if id(param) not in self._taken]
            make_same(self._groups.main, [one for one in frozen if id(one[1]) not in self._ignored])
            make_same(self._groups.main, module.named_buffers())
        self.attach(module)

    def _take(self, lanes: Sequence[Lane]) -> None:
        take((param for lane in lanes for _, param in lane.parameters), self)

    def _transport_of(self, group: dist.ProcessGroup) -> Transport:
        return transport(group, self.options.transport, order=self.options.order, device=self._device)

    def attach(self, module: nn.Module) -> None:
        """Act before each forward of a module: that of the replica, or one with some of the same parameters."""
        if not any(isinstance(hook, _Entry) and hook.replica is self for hook in module._forward_pre_hooks.values()):
            self._handles.append(module.register_forward_pre_hook(_Entry(self)))

    def before_forward(self) -> None:
        """Get ready for a forward with gradients."""
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes something once more
        if self._watch.changed():
            self._take_changes()
        source = 0
        if self.joining is not None:
            source = self.joining.announce(self.reducer.syncs or self.options.manual)
        fresh = self.reducer.idle
        self.reducer.prepare()
        if fresh:
            self.sync_buffers(source)

    def sync_buffers(self, source: int = 0) -> None:
        """Copy the buffers of one rank to the others, unless that is switched off."""
        if self.options.broadcast_buffers:
            make_same(self._groups.main, self.module.named_buffers(), source)

    def _take_changes(self) -> None:
        """Have the reducer take parameters that train now and did not when its buckets were made."""
        parameters = list(self.module.named_parameters())
        new = [param for _, param in parameters if param.requires_grad and id(param) not in self._taken]
        if all(id(param) in self._ignored for param in new):
            return
        lanes = self._groups.lanes([one for one in parameters if one[1].requires_grad or id(one[1]) in self._taken])
        if len(lanes) != len(self.reducer.lanes):
            raise CommError(
                "A parameter came that is reduced over ranks over which no other one is: make a new replica."
            )
        self.reducer.update(lanes)
        self._taken = {id(param) for lane in lanes for _, param in lane.parameters}
        self._ignored |= {id(param) for param in new} - self._taken
        self._take(lanes)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only add up gradients on this rank in backwards that run inside; the next one outside reduces all."""
        return nullcontext() if self.options.manual else self.reducer.no_sync()

    def finish_grad_sync(self) -> None:
        """Wait until `param.grad` holds the reduced gradients; at once if `backward()` has seen to it.

        Raises:
            CommError: see `DistributedDataParallel`.
        """
        self.reducer.finish(now=self.options.manual)

    def set_weight(self, weight: float | None) -> None:
        """Say how much this rank's gradients count from now on, such as its number of tokens.

        The result is then `sum(weight * gradient) / sum(weight)` over the ranks, or the sum alone without `average`.

        Args:
            weight: at least 0; on all ranks a number, or on all None: they count the same.
        """
        if weight is not None and not 0 <= weight < float("inf"):
            raise ValueError(f"weight is {weight}; it is at least 0 and finite.")
        self._weight = self.reducer.weight = weight

    @contextmanager
    def join(self, step: Callable[[], object]) -> Iterator[None]:
        """Let ranks run out of data at different times; see `DistributedDataParallel.join`."""
        self.joining = Joining(self._groups.main, self._device)
        before = self._weight
        if before is None:
            self.reducer.weight = 1.0
        try:
            with join(self, self.joining, step):
                yield
        finally:
            self.joining, self.reducer.weight = None, before

    def close(self) -> None:
        """Take the data parallelism away again: hooks are removed, transports closed; all ranks must call it."""
        for handle in self._handles:
            handle.remove()
        give_up((param for state in self.reducer.lanes for _, param in state.lane.parameters), self)
        self.reducer.close()
        self._groups.close()


class _Entry:
    """The hook before a forward."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.replica.before_forward()

    def __reduce__(self) -> Any:
        return _Copied, ()

    def __deepcopy__(self, memo: Any) -> _Copied:
        return _Copied()


class _Copied:
    """What a copy of a replicated module has in place of the hook: its gradients would be those of one rank."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and any(param.requires_grad for param in module.parameters()):
            raise CommError(
                "This module is a copy of a replicated one, and is not replicated itself. To train it, call "
                "replicate(copy) after forget_replica(copy); to evaluate it, run it under torch.no_grad()."
            )


def forget_replica(module: nn.Module) -> None:
    """Make the copy of a replicated module an ordinary one.

    Args:
        module: a copy; a replicated module itself is left as it is.
    """
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Copied):
            del module._forward_pre_hooks[key]


def replicated(module: nn.Module) -> Replica:
    """Return what keeps a module replicated: its `no_sync`, `join`, `finish_grad_sync`, `set_weight` and `close`.

    Args:
        module: what `replicate` was called with.

    Raises:
        CommError: the module is not replicated.
    """
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _Entry):
            return hook.replica
    raise CommError(f"This {type(module).__name__} is not replicated: call replicate(module) first.")


def replicate(module: nn.Module, group_or_mesh: Any = None, **options: Any) -> nn.Module:
    """Make a module data parallel without a wrapper: names, methods and type stay, and gradients are reduced.

    All ranks must call it, with the same module.

    Args:
        module: the module.
        group_or_mesh: the ranks that see different data; None: all.
        options: those of `DistributedDataParallel`.

    Returns:
        The module; `replicated(module)` is the handle.

    Raises:
        CommError: it is replicated already, or see `DistributedDataParallel`.
        TypeError: an option that is not known, or of another type.
    """
    check_module("replicate", module)
    if any(isinstance(hook, _Entry) for hook in module._forward_pre_hooks.values()):
        raise CommError(f"This {type(module).__name__} is replicated already; close that first: replicated(m).close().")
    known = [one.name for one in fields(ReplicaOptions)]
    for name in options:
        if name not in known:
            raise TypeError(f"replicate: there is no option {name!r}; the options are {', '.join(known)}.")
    forget_replica(module)
    chosen = ReplicaOptions(**{name: value for name, value in options.items() if value is not None})
    refuse_taken("replicate", module, reduced(module, chosen.groups))
    Replica(module, group_or_mesh, chosen)
    return module
