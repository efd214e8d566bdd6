"""Record what a real process communicates: a dispatch mode sees the operators that torch.distributed calls.

It also sees those that C++ calls, in DistributedDataParallel and functional collectives. Collectives are waited for
at once, messages are not: their other half may be the next thing that this rank does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _python_dispatch

from .combine import OPERATIONS
from .recorder import Recording

__all__ = ["watching"]

# Parts of it have no types.
TorchDispatchMode: Any = _python_dispatch.TorchDispatchMode

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "all_gather_single_": "all_gather_into_tensor",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "all_gather_single_coalesced_": "all_gather_into_tensor_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_single_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced_": "reduce_scatter_tensor_coalesced",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "all_to_all_single_": "all_to_all_single",
    "barrier": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


class _Watch(TorchDispatchMode):  # type: ignore[misc]
    """Passes every operator on, and notes those that communicate."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "c10d" and name in NAMES:
            return self._message_or_collective(NAMES[name], func, args, kwargs)
        if namespace == "_c10d_functional" and name in FUNCTIONAL:
            return self._functional(FUNCTIONAL[name], func, args, kwargs)
        return func(*args, **kwargs)

    def _message_or_collective(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = _by_name(func, args, kwargs)
        group = dist.ProcessGroup.unbox(given["process_group"])
        ranks = dist.get_process_group_ranks(group)
        tensors, inputs, outputs = (_flat(given, prefix) for prefix in ("tensor", "input", "output"))
        root = given.get("root_rank", -1) == group.rank()
        if name == "barrier":
            tensors = []
        if name in ("send", "recv"):
            place = given.get("dst", given.get("src", -1))
            peer = ranks[place] if place >= 0 else -1
            self._recording.begin(name, "", ranks, tensors if name == "send" else [], peer, tensors)
            return func(*args, **kwargs)
        if name == "broadcast":
            inputs, outputs = (tensors if root else []), tensors
        elif name == "reduce":
            inputs, outputs = tensors, (tensors if root else [])
        elif tensors:
            inputs = outputs = tensors
        index = self._recording.begin(_plain(name, inputs), _reduction(given), ranks, inputs)
        result = func(*args, **kwargs)
        work = result[-1] if isinstance(result, (tuple, list)) else result
        dist.Work.unbox(work).wait()
        self._recording.end(index, outputs)
        return result

    def _functional(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        given = _by_name(func, args, kwargs)
        ranks = dist.get_process_group_ranks(_resolve(given["group_name"]))
        inputs = _flat(given, "input")
        is_source = name != "broadcast" or ranks[given["src"]] == dist.get_rank()
        index = self._recording.begin(
            _plain(name, inputs), str(given.get("reduce_op", "")), ranks, inputs if is_source else []
        )
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        for output in outputs:
            torch.ops._c10d_functional.wait_tensor(output)
        self._recording.end(index, outputs)
        return result


@contextmanager
def watching(recording: Recording) -> Iterator[Recording]:
    """Add to a recording what this process communicates in this block."""
    with _Watch(recording):
        yield recording


def _by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _flat(given: dict[str, Any], prefix: str) -> list[Tensor]:
    """Return the tensors in the arguments whose names begin with a prefix, as one list."""
    found: list[Tensor] = []
    waiting = [value for name, value in given.items() if name.startswith(prefix)]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            waiting[:0] = value
    return found


def _plain(name: str, tensors: Sequence[Tensor]) -> str:
    """Return the name without "coalesced" where there is one tensor only."""
    return name.removesuffix("_coalesced") if len(tensors) == 1 else name


def _reduction(given: dict[str, Any]) -> str:
    """Return the name of the reduction, or nothing for a call that has none."""
    if "reduce_op" not in given:
        return ""
    number = int(given["reduce_op"].op())
    return next((name for name in OPERATIONS if int(getattr(dist.ReduceOp, name.upper())) == number), "")


def _resolve(name: str) -> Any:
    native: Any = torch._C._distributed_c10d
    return native._resolve_process_group(name)
