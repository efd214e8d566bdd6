"""The wrapper class, for programs written for torch's `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from .._arguments import check_module
from .._taken import refuse_taken
from .._transport import Transport
from ..errors import CommError
from .groups import reduced
from .replica import Replica, ReplicaOptions

__all__ = ["DistributedDataParallel"]

PREFIX = "module."


class DistributedDataParallel(nn.Module):
    """Data parallelism: each rank runs the module on its own data, and `backward()` leaves averaged gradients.

    Parameters that a backward does not use, on some ranks or on all, need no option: where no rank used one, its
    gradient stays None. Neither do shared weights, checkpoints of either kind, or parameters that come, go, freeze or
    unfreeze between steps on all ranks. All ranks must run the same number of backwards that reduce.

    Keys of `state_dict()` are those of the module, without "module."; `load_state_dict` takes both.

    Args:
        module: the module; all ranks must give the same one.
        group_or_mesh: the ranks that see different data: a process group, a mesh (all its dimensions together), or None
            for all ranks.
        transport: "auto", or the kind of transport over which gradients travel, or one.
        order: "canonical": sums add in rank order, the same bits for every transport and bucket size; "native": as the
            backend adds; None: canonical wherever it costs nothing, which is off NCCL.
        bucket_mb: limit of a bucket, in MiB.
        accumulate_dtype: dtype of sums, over ranks and over the backwards of a window, such as torch.float32 for
            parameters of bfloat16; None: that of each gradient, but where ranks add in their order, the sum over ranks
            of gradients of 16 bits is in float32.
        average: whether sums are divided by the number of ranks.
        compressor: "bf16", "fp16", "int8", "powersgd", "topk", the name of a plugin's, or a function of plan, dtype and
            device that makes the compressor of a bucket; None: gradients travel as they are.
        compressor_options: of the compressor, such as {"rank": 4}.
        broadcast_buffers: whether the first rank's buffers are copied to all before the first forward of each window.
        sync_parameters: whether all ranks start with the first rank's parameters and buffers.
        groups: other groups or meshes for some parameters, such as experts, by patterns that fit their whole names;
            None as the group: not reduced at all. Sums are divided by the number of ranks of `group_or_mesh`, for that
            many see different data.
        view: let autograd add in the buffers; saves a copy of the gradients where a window has several backwards.
        check_finite: look for gradients that are not finite, on each rank before they are summed.
        manual: reduce in `finish_grad_sync` only, all backwards since the last one at once.

    Raises:
        MismatchError: the ranks have different parameters; the text names the first one.
        PlanError: a pattern in `groups` that fits no parameter, or one whose gradients something else reduces already.

    Errors in `backward()`, which all are `CommError`s: `TransportError` if a rank is gone or did not come within the
    time-out of the group; `MismatchError` if the backward of another rank failed, its parameters became others, or only
    some ranks updated theirs since the last window; `NotFiniteError`. After the latter two all ranks can go on with the
    next step.
    """

    def __init__(
        self,
        module: nn.Module,
        group_or_mesh: Any = None,
        *,
        transport: str | Transport = "auto",
        order: str | None = None,
        bucket_mb: float = 25,
        accumulate_dtype: torch.dtype | None = None,
        average: bool = True,
        compressor: Any = None,
        compressor_options: Mapping[str, Any] | None = None,
        broadcast_buffers: bool = True,
        sync_parameters: bool = True,
        groups: Mapping[str, Any] | None = None,
        view: bool = False,
        check_finite: bool = False,
        manual: bool = False,
    ) -> None:
        check_module("DistributedDataParallel", module)
        super().__init__()
        self.module = module
        """The module, with the same parameters as before."""
        options = ReplicaOptions(
            transport=transport,
            order=order,
            bucket_mb=bucket_mb,
            accumulate_dtype=accumulate_dtype,
            average=average,
            compressor=compressor,
            compressor_options={} if compressor_options is None else compressor_options,
            broadcast_buffers=broadcast_buffers,
            sync_parameters=sync_parameters,
            groups={} if groups is None else groups,
            view=view,
            check_finite=check_finite,
            manual=manual,
        )
        refuse_taken("DistributedDataParallel", module, reduced(module, options.groups))
        self.replica = Replica(module, group_or_mesh, options)
        """Does the work; the same as `replicated(module)`."""
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Only add up gradients on this rank in backwards that run inside; the next one outside reduces all."""
        return self.replica.no_sync()

    def finish_grad_sync(self) -> None:
        """Wait for reduced gradients. Needed with `manual`, and after a loss that no parameter of this rank is part of.

        Such a rank has no backward that could take part in the reduction of the others; it joins with zeros here.
        """
        self.replica.finish_grad_sync()

    def join(self, step: Callable[[], object]) -> AbstractContextManager[None]:
        """Let ranks run out of data at different times.

        A rank that leaves the block goes on, inside its end, with the steps of the others: its gradients are zero with
        weight zero, so averages are over the ranks that still have data. It calls `step` after each reduction, so that
        parameters and states of optimizers stay equal on all ranks.

        Args:
            step: what the loop does after its backward, such as `optimizer.step` followed by `optimizer.zero_grad`.
        """
        return self.replica.join(step)

    def set_weight(self, weight: float | None) -> None:
        """Say how much this rank's gradients count from now on, such as its number of tokens.

        The result is then `sum(weight * gradient) / sum(weight)` over the ranks, or the sum alone without `average`.

        Args:
            weight: at least 0; on all ranks a number, or on all None: they count the same.
        """
        self.replica.set_weight(weight)

    def close(self) -> None:
        """Take the data parallelism away again; all ranks must call it. The module itself stays as it is."""
        self.replica.close()

    def __getstate__(self) -> NoReturn:
        raise CommError("A DistributedDataParallel holds connections and cannot be copied or saved: take its .module.")


def _without_prefix(module: nn.Module, state: Any, prefix: str, local_metadata: Any) -> None:
    """Drop "module." from the keys of a wrapper, wherever it stands in a larger module."""
    old = prefix + PREFIX
    for table in (state, getattr(state, "_metadata", {})):
        for key in [key for key in table if key.startswith(old) or key == old[:-1]]:
            new = prefix + key[len(old) :] if key.startswith(old) else prefix[:-1]
            if key == old[:-1] and new in table:
                del table[key]
            else:
                table[new] = table.pop(key)


def _with_prefix(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    """Give keys the "module." that children of a wrapper have, unless all have it, as torch's wrapper saves them."""
    own = [key for key in state if key.startswith(prefix)]
    nested = isinstance(module, DistributedDataParallel) and hasattr(module.module, PREFIX[:-1])
    if not nested and all(key.startswith(prefix + PREFIX) for key in own):
        return
    for key in own:
        state[prefix + PREFIX + key[len(prefix) :]] = state.pop(key)
