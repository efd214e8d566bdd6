"""Counting what a rehearsal sends, computes, writes and keeps; what stands for many layers counts as many times."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._comm.record import Collective, listeners
from .._explain import _cause
from .cost import Machine, Totals, wire_bytes
from .shapes import kind_of, results

_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_LEAF = 1 << 60


class TooMuch(Exception):
    """The step costs more than anybody would pay."""


@dataclass(frozen=True, slots=True)
class Most:
    """Beyond what a step ends with `TooMuch`."""

    seconds: float = math.inf
    """Of communication."""
    flops: float = math.inf
    """In matrix products and convolutions."""
    memory: float = math.inf
    """Bytes of what is held."""

    def within(self, other: Most) -> bool:
        """Whether nothing more is allowed than there."""
        return self.seconds <= other.seconds and self.flops <= other.flops and self.memory <= other.memory


_ANYTHING = Most()


class Meter(TorchDispatchMode):
    """Context manager that counts, for one forward and backward on meta tensors.

    Args:
        weights: how many layers a module stands for, by module.
        machine: for the seconds of collectives.
        memory: whether to count what autograd keeps, which takes longer.
        most: beyond what it ends with `TooMuch`.
        held: bytes that are held already.
    """

    def __init__(
        self,
        weights: Mapping[nn.Module, int],
        machine: Machine,
        *,
        memory: bool = False,
        most: Most = _ANYTHING,
        held: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights, self._machine, self._memory, self._most = weights, machine, memory, most
        self._spare = most.memory - held
        self.flops = self.touched = self.sent = self.seconds = 0.0
        self.implicit = self.kept = 0
        self.count: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        self._now = 1
        self._starts: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        self._seen: dict[int, Any] = {}

    def __enter__(self) -> Meter:
        for module in self._weights:
            self._handles.append(module.register_forward_pre_hook(self._begin, prepend=True))
            self._handles.append(module.register_forward_hook(self._finish, always_call=True))
        listeners.append(self._sent)
        if self._memory:
            self._keeping = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t)
            self._keeping.__enter__()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._memory:
            self._keeping.__exit__(*error)
        listeners.remove(self._sent)
        for handle in self._handles:
            handle.remove()
        self._seen.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator a wrapper whose purpose is not to be compiled."""
        return False

    @property
    def totals(self) -> Totals:
        """Number and bytes of collectives by kind and axes."""
        return {key: (n, size) for key, (n, size) in self.count.items()}

    # ---------------------------------------------------------------- which layer it is

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._now = self._weights[module]
        self._starts.append(_sequence_number())

    def _finish(self, module: nn.Module, args: Any, output: Any) -> None:
        self._spans.append((_sequence_number(), self._now))
        self._now = 1

    def _weight(self) -> int:
        """How many times what happens now counts: by the running module, or by the one that made the running node."""
        node = _current_node()
        if node is None or not self._starts:
            return self._now
        number = node._sequence_nr()
        if number >= _LEAF:
            return 1
        position = bisect.bisect_right(self._starts, number) - 1
        if position < 0 or position >= len(self._spans):
            return 1
        end, weight = self._spans[position]
        return weight if number < end else 1

    # ---------------------------------------------------------------- what is counted

    def _sent(self, event: Collective) -> None:
        weight, mesh = self._weight(), event.mesh
        ranks, axes = mesh.size_of(event.axes), tuple(mesh.axis_name(a) for a in event.axes)
        entry = self.count.setdefault((event.name, axes), [0, 0])
        entry[0] += weight
        entry[1] += weight * event.num_bytes
        self.sent += weight * wire_bytes(event.name, event.num_bytes, ranks)
        self.seconds += weight * self._machine.seconds(event.name, event.num_bytes, ranks, axes)
        if self.seconds > self._most.seconds:
            raise TooMuch
        if _cause()[0] in ("implicit", "fallback"):
            self.implicit += weight

    def _keep(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if not isinstance(t, nn.Parameter) and storage._cdata not in self._seen:
            self._seen[storage._cdata] = t  # keeps the address from being used again
            self.kept += self._weight() * t.element_size() * _elements(t)
            if self.kept > self._spare:
                raise TooMuch
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self._run_local, (), (func, args, kwargs or {}), {})  # DTensors are their local parts here

    def _run_local(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = kind_of(func)
        if kind.view:
            return func(*args, **kwargs)
        out = results(func, kind, args, kwargs)
        weight = self._weight()
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, Tensor):
                self.touched += weight * t.element_size() * t.numel()
        if kind.flops is not None:
            self.flops += weight * kind.flops(args, out)
            if self.flops > self._most.flops:
                raise TooMuch
        return out


_size = torch._C.TensorBase.numel
_run = torch._C._disabled_torch_function_impl


def _elements(t: Tensor) -> int:
    """Elements of the local part."""
    return int(_run(_size, (), (t,), {}))
