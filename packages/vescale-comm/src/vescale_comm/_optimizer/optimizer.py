"""`DistributedOptimizer`: any optimizer of torch with its states and updates sharded over data parallel ranks (ZeRO).

Gradients are reduce-scattered while backward runs, each rank updates its shard, and the new parameters are gathered
while the next forward runs. Source: Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
models" (2020), stages 1 and 2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .._arguments import check_dtypes, check_megabytes
from .._compress import compressor_factory
from .._taken import give_up, refuse_taken, take
from .._transport import Transport
from ..errors import CommError
from .bucketed import Buckets
from .groups import OWN_KEYS, Group, Params, check_class, named, read_group, read_groups
from .inner import Inner
from .norms import Term, clip_grad_norm_, owners
from .state import load_groups, load_states, states_of, whole_states
from .waiting import WaitingHooks

__all__ = ["DistributedOptimizer"]

BUCKET_MB = {1: 25.0, 2: 8.0}
"""Size of buckets by stage: few large ones cost least, and stage 2 holds three of them at a time."""


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer that shards its work over ranks, and is used like any other.

    The parameters become views of flat buffers; ranks start from the values of the first rank. After `step` only the
    owners have the new values. The others get them by an all-gather that is waited for when the module that owns such
    parameters is next called, or where they are read from it (`module.weight`, `model.parameters()`, a state_dict, a
    copy). Only code that kept a parameter itself from before the step must call `finish_param_sync` first; if such a
    parameter took part in a forward, the next step raises `StaleParameterError`.

    After backward, gradients are on their owners only: `param.grad` is None. Clip with `clip_grad_norm_` of this
    package.

    Bits: with a transport in canonical order, zero=1, zero=2 and `DistributedDataParallel` with the same optimizer
    class and implementation (`fused`, `foreach`) give the same parameters, whatever buckets and plan. On the CPU,
    torch's fused kernels do so only if all parameters have multiples of 64 bytes: they round the rest of a tensor
    differently.

    Args:
        params_or_model: the model, or what torch's optimizers take: parameters, pairs of names and parameters, or
            groups. A group may name its own "optimizer", a class, and "plan". Parameters that need no gradient are
            left alone.
        optimizer_cls: such as `torch.optim.AdamW`.
        zero: 1 keeps the buffers of whole gradients; 2 gives the memory of a bucket of them back as soon as it is
            reduced, so that beside the shards only a few buckets exist (not in shared memory, which stays).
        group_or_mesh: the ranks that share the work: a process group, a mesh of one dim, or None for all.
        transport: "auto", "native", "p2p", "shared", "emulated", or a `Transport` over the ranks.
        order: "canonical" or "native"; None: canonical where it costs nothing, which is everywhere but on NCCL.
        model: whose modules wait for parameters, if `params_or_model` is not the model itself. Without a model `step`
            waits for the gather.
        main_dtype: dtype in which parameters are updated, such as float32 for a bfloat16 model; None: their own.
        accumulate_dtype: dtype of gradient buffers and sums; None: `main_dtype`, or else that of the gradients (sums
            over ranks of 16 bits are in float32 where ranks add in their order).
        plan: "flat": cut anywhere, for optimizers that treat elements alone; "whole": each parameter on one rank, for
            those that look at matrices, such as `torch.optim.Muon`; a rule or a mapping from regular expressions of
            names to rules, for those that look at blocks; "auto": "flat" for the elementwise classes of torch.optim,
            "whole" for all others.
        bucket_mb: about how large a bucket is, in MiB; None: 25, or 8 for `zero=2`.
        average: divide the sum of gradients by the number of ranks.
        overlap: gather parameters while the next forward runs; False: `step` waits.
        share_parameters: where all ranks are on one host and the transport shares memory, keep parameters once for
            all of them. In-place changes by the user are then done once per rank.
        compressor, compressor_options: how gradients are compressed, as in `DistributedDataParallel`.
        **options: arguments of `optimizer_cls`. Where it has a fused implementation, that is the default on CUDA.

    Raises:
        ValueError: an argument that makes no sense, no parameters, one given twice, or reduced by others already.
        PlanError: a plan under which the optimizer would compute something else.
        MismatchError: ranks disagree on parameters.

    Example:
        >>> import os, torch.distributed as dist
        >>> store = dist.HashStore()
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DistributedOptimizer(model, torch.optim.AdamW, zero=2, lr=0.1)
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> float(optimizer.clip_grad_norm_(1.0)) > 1
        True
        >>> optimizer.step()
        >>> optimizer.zero_grad()
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        params_or_model: Params,
        optimizer_cls: type[torch.optim.Optimizer],
        *,
        zero: int = 1,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None = None,
        transport: str | Transport = "auto",
        order: str | None = None,
        model: nn.Module | None = None,
        main_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        plan: Any = "auto",
        bucket_mb: float | None = None,
        average: bool = True,
        overlap: bool = True,
        share_parameters: bool = False,
        compressor: Any = None,
        compressor_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if zero not in (1, 2):
            raise ValueError(f"zero: expected 1 or 2, but got {zero!r}; for 3 use vescale_comm.fully_shard.")
        bucket_mb = BUCKET_MB[zero] if bucket_mb is None else bucket_mb
        check_megabytes("bucket_mb", bucket_mb)
        check_dtypes(main_dtype=main_dtype, accumulate_dtype=accumulate_dtype)
        if isinstance(params_or_model, nn.Module):
            if model is not None and model is not params_or_model:
                raise ValueError("model: params_or_model is a model already; pass one of them.")
            model = params_or_model
        check_class("optimizer_cls", optimizer_cls)
        self._class, self._model, self._plan = optimizer_cls, model, plan
        self._groups = read_groups(params_or_model, model)
        refuse_taken("DistributedOptimizer", model, named(self._groups))
        self._buckets = Buckets(
            group_or_mesh,
            transport,
            order,
            zero=zero,
            main_dtype=main_dtype,
            accumulate_dtype=accumulate_dtype,
            bucket_bytes=int(bucket_mb * 2**20),
            average=average,
            share_parameters=share_parameters,
            compressor=compressor_factory(compressor, compressor_options or {}),
        )
        segments = self._buckets.add(self._groups, 0, optimizer_cls, plan)
        self._inner = Inner(optimizer_cls, options, self._groups, segments)
        self._overlap = overlap
        self._hooks: WaitingHooks | None = None
        self._finalizer: weakref.finalize[Any, Any]
        self._building = True
        outer = [self._outer(number, group) for number, group in enumerate(self._groups)]
        super().__init__(outer, self._inner.defaults)
        self._building = False
        self._connect()

    def _outer(self, number: int, group: Group) -> dict[str, Any]:
        found = {**self._inner.options(number), "params": list(group.parameters), "param_names": list(group.names)}
        if group.optimizer is not None:
            found["optimizer"] = group.optimizer
        return found

    def _connect(self) -> None:
        """Have modules wait for the parameters they own, and let norms find the gradients here."""
        if self._hooks is not None:
            self._finalizer.detach()
            self._hooks.remove()
            self._hooks = None
        if self._model is not None:
            self._hooks = WaitingHooks(self._model, self._buckets.wait, self._buckets.number_of)
        # An optimizer that is dropped must not go on reducing gradients.
        self._finalizer = weakref.finalize(self, _let_go, self._buckets, self._hooks)
        self._finalizer.atexit = False
        reference = weakref.ref(self)
        for group in self._groups:
            for parameter in group.parameters:
                owners[parameter] = reference
            take(group.parameters, self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters by the reduced gradients, and start to gather them.

        Args:
            closure: computes the loss and its gradients; called once before the update.

        Returns:
            What the closure returned.

        Raises:
            StaleParameterError: a parameter was used before its newest values had arrived.
            CommError: a parameter left its buffer, or one that was frozen is trained now.
            TransportError: ranks could not be reached.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_model()
            used = self._buckets.begin_update()
            self.finish_param_sync()
            for segment in list(self._inner.segments):
                some, every = self._buckets.used_parts(segment, used)
                if some and not every and len(segment.members) > 1:
                    self._inner.split(segment)
            for segment in self._inner.segments:
                some, _ = self._buckets.used_parts(segment, used)
                segment.tensor.grad = self._buckets.gradient(segment) if some else None
            self._inner.push(self.param_groups)
            try:
                self._inner.step()
            finally:
                for segment in self._inner.segments:
                    segment.tensor.grad = None
            self._inner.pull(self.param_groups)
            self._send(self._buckets.end_update)
        return loss

    def _send(self, send: Callable[[bool], None]) -> None:
        """Send new values, and see to it that they are waited for."""
        waits = not (self._overlap and self._hooks is not None and not self._hooks.is_compiled())
        send(waits)
        if not waits and self._hooks is not None:
            self._hooks.arm()

    def _check_model(self) -> None:
        replaced = None if self._hooks is None else self._hooks.replaced()
        if replaced is not None:
            raise CommError(
                f"The parameter {replaced} was replaced by another object after its optimizer was made, so updates do "
                f"not reach the model (load_state_dict(assign=True), module.weight = ...). Make the optimizer after it."
            )
        for group in self._groups:
            for name, parameter in group.frozen.items():
                if parameter.requires_grad:
                    raise CommError(
                        f"The parameter {name} needed no gradient when its optimizer was made, but does now, and would "
                        f'not be trained. Add it with add_param_group({{"params": [("{name}", parameter)]}}).'
                    )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, of this rank's parameters and of its shard.

        Args:
            set_to_none: False: leave zeros where a parameter has a gradient that was not reduced yet.
        """
        self._buckets.drop_gradients()
        super().zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward add to the gradients on this rank only; the next one outside reduces them together."""
        with self._buckets.reducer.no_sync():
            yield

    def finish_grad_sync(self) -> None:
        """Wait for the reduction of gradients; `step` and norms do it by themselves."""
        self._buckets.finish_gradients()

    def finish_param_sync(self) -> None:
        """Wait until all parameters have their newest values on this rank; modules do it by themselves."""
        self._buckets.wait_all()
        if self._hooks is not None:
            self._hooks.disarm()

    def accept_changes(self) -> None:
        """Take parameters that were changed in place since the last step as they are; see `share_parameters`."""
        self.finish_param_sync()
        for bucket in self._buckets.parameters:
            bucket.refresh()

    def gradient_terms(self, parameters: Sequence[Tensor] | None = None) -> list[Term]:
        """Return the reduced gradients on this rank, for norms.

        Args:
            parameters: some of this optimizer's; None: all.
        """
        self.finish_grad_sync()
        return self._buckets.gradient_terms(self._inner.segments, parameters)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale the gradients down so that their norm is at most `max_norm`; see the function of this name."""
        return clip_grad_norm_(self, max_norm, norm_type, error_if_nonfinite)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that were not among those of the optimizer, such as a layer that is trained from now on.

        Every rank must do it, between a step and the next forward: gradients that are there already are dropped.

        Args:
            param_group: as at construction.

        Raises:
            ValueError: a parameter is here already.
        """
        if self._building:
            super().add_param_group(param_group)
            return
        number = len(self._groups)
        group = read_group(param_group, number, self._model, self._groups)
        refuse_taken("DistributedOptimizer", None, named([group]))
        self.finish_param_sync()
        self._groups.append(group)
        segments = self._buckets.add([group], number, self._class, self._plan)
        self._inner.add(group, segments)
        self._building = True
        super().add_param_group(self._outer(number, group))
        self._building = False
        self._connect()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in terms of whole parameters; communicates nothing.

        Returns:
            "state": by name of the parameter, then by the optimizer's key: a `ShardTensor` with this rank's elements,
            or a number. A key "main" holds main parameters of another dtype. "param_groups": hyperparameters, and
            names under "params". vescale_ckpt saves and loads it, also into another number of ranks.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        found: dict[str, Any] = {
            "state": states_of(self._inner, self._buckets.wholes, self._buckets.with_main),
            "param_groups": [
                {key: value for key, value in group.items() if key not in OWN_KEYS}
                | {"params": list(group["param_names"])}
                for group in self.param_groups
            ],
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def full_state_dict(self) -> dict[str, Any]:
        """Return the state with whole tensors, on the CPU of every rank; every rank must call it."""
        own = self.state_dict()
        own["state"] = whole_states(own["state"], self._buckets.wholes, self._buckets.group)
        return own

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state. Every rank must call it, since main parameters are gathered.

        Args:
            state_dict: of this method's counterpart on as many ranks and with the same plan; what a checkpoint has
                filled; `full_state_dict` of any number of ranks; or that of an optimizer of torch over the same
                parameters in the same order.

        Raises:
            MismatchError: it is of other parameters, or sharded in another way.
        """
        state = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state)
            state = state if changed is None else dict(changed)
        self.finish_param_sync()
        names = load_groups(state["param_groups"], self.param_groups)
        states = {names[key]: values for key, values in state["state"].items() if key in names}
        with torch.no_grad():
            self._inner.push(self.param_groups)
            if load_states(self._inner, self._buckets.wholes, states):
                self._buckets.publish(wait=True)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def allocate_state(self, path: Sequence[Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Make a tensor to load a part of the state into that is not there yet; checkpoints call it.

        Args:
            path: keys in the state_dict.
            shape: of the whole tensor.
            dtype: of its elements.

        Returns:
            An uninitialized `ShardTensor` with the elements of this rank; None: any plain tensor will do.
        """
        if len(path) != 3 or path[0] != "state" or path[2] == "step" or path[1] not in self._buckets.wholes:
            return None
        return self._buckets.allocate(self._inner.segments, path[1], tuple(shape), dtype)

    def close(self) -> None:
        """Take all hooks away from the model; parameters keep their values, and no further step is possible."""
        self._finalizer()
        for group in self._groups:
            for parameter in group.parameters:
                owners.pop(parameter, None)  # type: ignore[no-untyped-call]
            give_up(group.parameters, self)

    def __getstate__(self) -> NoReturn:
        raise CommError("A DistributedOptimizer holds connections and cannot be copied: make one, load state_dict().")


def _let_go(buckets: Buckets, hooks: WaitingHooks | None) -> None:
    """Take away what an optimizer put on the model, after its last values have arrived."""
    buckets.wait_all()
    if hooks is not None:
        hooks.remove()
    buckets.close()
