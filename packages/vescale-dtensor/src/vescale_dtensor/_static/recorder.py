"""What happens on local tensors while a call runs, in order.

A torch-function mode sees every operator: those on DTensors are dispatched as ever, and what they run on local tensors
comes by here again and is noted. Moves, collectives, custom autograd functions and draws, which no mode sees, come
through `_tap`, and `watch` tells what a step does below. The record holds descriptions (see `values`), so that the
memory of tensors is free as early as without one. Whatever cannot be repeated blindly ends the record with a
reason: a value that Python reads, a shape that depends on data, a tensor from elsewhere, another mode of autograd or
autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._comm import record as communication
from .._comm.move import move
from .._comm.plan import Plan, plan
from .._dispatch.call import function_name
from .._dispatch.policy import user_frame
from .._tap import slot
from .._tensor import DTensor
from . import fold
from .values import Value, Values, described, returned
from .watch import Effects, Watch, memory_of, tensors_of

__all__ = ["Op", "Recorder", "plain", "tensors_of"]

_run = torch._C._disabled_torch_function_impl
_on = torch._C._is_torch_function_enabled
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks

HOST_READS = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __dlpack__ __format__ "
    "__repr__ is_nonzero equal allclose data_ptr untyped_storage storage _typed_storage".split()
)
"""Functions that hand values, or where they lie, to Python."""
STATE_READS = frozenset(
    "grad _grad grad_fn _version retains_grad _base _is_view storage_offset output_nr is_shared is_pinned "
    "is_inference".split()
)
"""Attributes of tensors that change without a trace in what a call is given."""
DATA_SHAPES = frozenset(
    "nonzero argwhere masked_select unique unique_consecutive _unique2 unique_dim _pack_padded_sequence "
    "_pad_packed_sequence _nnz values _values indices _indices crow_indices ccol_indices col_indices row_indices "
    "is_coalesced".split()
)
"""Functions whose results have a shape that depends on data."""
SAFE_READS = frozenset(
    "full full_like new_full fill_ fill_diagonal_ masked_fill masked_fill_ add add_ sub sub_ addmm baddbmm lerp clamp "
    "clamp_ select index_fill index_fill_ quantile nanquantile normal normal_ multinomial".split()
)
"""Functions that read a number from a tensor, or check one, without consequence for the shape of their result."""
SIZES = {
    "full": (0, "size"),
    "new_full": (1, "size"),
    "normal": (2, "size"),
    "multinomial": (1, "num_samples"),
    "select": (1, "dim"),
    "quantile": (2, "dim"),
    "nanquantile": (2, "dim"),
}
"""Those of their arguments on which a shape does depend: position and name."""
UNSIZED = frozenset(
    "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_bsr_tensor sparse_bsc_tensor "
    "sparse_compressed_tensor".split()
)
"""Functions whose result is as large as the numbers in their first arguments say, if nobody names a size."""
ENGINE = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
"""Functions that run autograd, whose hooks must not run with dispatch off."""
UNSEEN = frozenset("_set_grad_enabled set_grad_enabled __hash__ is_floating_point is_complex dim".split())
"""Functions that leave no trace in a program."""
WRITES = frozenset("__setitem__ __set__ register_hook retain_grad register_post_accumulate_grad_hook".split())
"""Functions that change a tensor, besides those whose names end in an underscore."""
DRAWS = frozenset(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson dropout "
    "alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu manual_seed binomial".split()
)
"""Functions that move a generator, so that they count even if nobody uses their result."""


@dataclass(slots=True)
class Op:
    """One step on local tensors."""

    function: Callable[..., Any]
    """What was called."""
    args: tuple[Any, ...]
    """With what; containers are copies, with values in place of tensors."""
    kwargs: dict[str, Any]
    """By name."""
    result: Any
    """What came back: values, in containers if they were."""
    gradients: bool
    """Whether autograd was on."""
    keeps: bool
    """Whether it does more than to return its result."""

    @property
    def plan(self) -> Plan | None:
        """The plan of a move; None: this is none."""
        return plan(self.kwargs["spec"], self.args[1]) if self.function is move else None

    @property
    def is_free(self) -> bool:
        """Whether it is a move that leaves the value as it is, and no gradient has to be summed."""
        steps = self.plan
        return steps is not None and steps.kind in ("alias", "cast", "relabel") and not self.result.has_graph


class Recorder(TorchFunctionMode):
    """Notes what a call does.

    Args:
        known: tensors that the program will be given: inputs, parameters, buffers.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.reason: str | None = None
        """Why the call cannot be repeated blindly; None: it can."""
        self.values = Values()
        """Of the tensors that there are by now."""
        self._constants = fold.Constants()
        self._paused = 0
        self._watch = Watch(self._outside)
        self._autocast = _autocast()
        self._hooks = _saved_hooks(True)
        for tensor in known:
            value = self._know(tensor)
            value.given = tensor

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def start(self) -> None:
        """Begin: from now on taps come here."""
        slot.begin(self)
        communication.listeners.append(self._untapped)
        self._watch.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End."""
        self._watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        slot.end()
        communication.listeners.remove(self._untapped)
        del self._watch  # which refers back: what is recorded must not wait for the collector

    # -- operators

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.reason is not None:
            return func(*args, **kwargs)
        name = function_name(func)
        self._check(name, func, args, kwargs)
        if _on() and any(isinstance(t, DTensor) for t in tensors_of((args, kwargs))):
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        self._watch.begin()
        try:
            result = _run(func, types, args, kwargs)
        finally:
            effects = self._watch.end()
        if effects.reads and not _reads_safely(name, args, kwargs):
            self.refuse(f"{name} reads a value of a tensor ({effects.reads}), on which a shape may depend")
        if name not in UNSEEN:
            keeps = name in DRAWS or _writes(name) or "out" in kwargs or _counts(effects, args, kwargs)
            self._note(func, args, kwargs, result, keeps)
        return result

    def _check(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in HOST_READS:
            self.refuse(f"{name} hands a value of a tensor to Python")
        elif name in DATA_SHAPES or (name == "where" and len(args) + len(kwargs) == 1):
            self.refuse(f"the shape of what {name} returns depends on data")
        elif name in UNSIZED and not _has_size(name, args, kwargs):
            self.refuse(f"the shape of what {name} returns depends on data, as it is given no size")
        elif name == "__getitem__" and _has_mask(args[1]):
            self.refuse("the shape of what a boolean index returns depends on data")
        elif name in ("repeat_interleave", "tensor_split") and _is_split_by_data(args, kwargs):
            self.refuse(f"the shape of what {name} returns depends on data")
        elif func in ENGINE:
            self.refuse(f"{name} runs autograd")
        elif name in STATE_READS:
            self.refuse(f"{name} of a tensor is read, which may be another one next time")

    # -- what no mode sees

    def atomic(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool = False
    ) -> Any:
        """Run a function on local tensors as one step of the record."""
        before = self.pause()
        self._watch.begin()
        try:
            result = function(*args, **kwargs)
        finally:
            effects = self._watch.end()
            self.go_on(before)
        self._note(function, args, kwargs, result, writes or _counts(effects, args, kwargs))
        return result

    def move(self, x: DTensor, types: tuple[int, ...]) -> DTensor:
        """Move a DTensor as one step of the record; what was moved so before is not moved again."""
        before = self.pause()
        try:
            y = move(x, types)
        finally:
            self.go_on(before)
        before_x, before_y = self.values.find(x), self.values.find(y)
        if before_y is None or not before_y.known or (before_x is not None and before_y.first is before_x.first):
            self._note(move, (x, types), {"spec": x._spec}, y, False)
        return y

    def alias(self, alias: Tensor, of: Tensor) -> Tensor:
        """Take note of a second object for the same value."""
        if not self._paused and self.reason is None:
            source = self.values.look(of)
            if source.known:
                self._note(plain, (of,), {}, alias, False)
            second = self._know(alias)
            if not source.known or second.requires_grad == source.requires_grad:
                second.first = source.first
        return alias

    def refuse(self, reason: str) -> None:
        """Give up recording."""
        if self.reason is None and not self._paused:
            file, line = user_frame()
            self.reason = f"{reason} ({file}:{line})"
            self.ops.clear()
            self._constants.clear()

    def pause(self) -> Any:
        """Record nothing until `go_on`; returns what that takes."""
        self._paused += 1
        before, slot.recorder = slot.recorder, None
        return before

    def go_on(self, before: Any) -> None:
        """Record again."""
        slot.recorder = before
        self._paused -= 1

    def _untapped(self, event: communication.Collective) -> None:
        if not self._paused and slot.recorder is self:  # and not another thread's
            self.refuse(f"an operator sends data ({event.name}) in a way that no record shows")

    def _outside(self, operator: Any, effects: Effects) -> None:
        """Look at an operator that came by no function that is seen."""
        if self._paused or self.reason is not None:
            return
        if effects.reads:
            self.refuse(f"{operator} reads a value of a tensor")
        elif effects.draws:
            self.refuse(f"{operator} draws random numbers in a way that no record shows")
        elif effects.written & self.values.memory.keys():
            self.refuse(f"{operator} writes to a tensor in a way that no record shows")

    # -- the record

    def _know(self, tensor: Tensor) -> Value:
        """Take note of a tensor that there is from now on."""
        value = self.values.look(tensor)
        value.known = True
        return value

    def _note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, keeps: bool
    ) -> None:
        if self._paused or self.reason is not None:
            return
        for tensor in tensors_of((args, kwargs)):
            value = self.values.find(tensor)
            if value is None or not value.known:
                shape, name = list(_run(Tensor.size, (), (tensor,), {})), function_name(function)
                self.refuse(
                    f"{name} uses a tensor of shape {shape} that is no input, parameter, buffer or attribute of a "
                    f"module, and was not made in this call"
                )
                return
        if _autocast() != self._autocast:
            self.refuse("autocast is switched inside")
        if _saved_hooks(True) != self._hooks:
            self.refuse("saved tensors have hooks inside, as of a checkpoint: make the module inside of it static")
        if self.reason is not None:
            return
        for tensor in tensors_of(result):
            self._know(tensor)
        values = self.values
        given, named = described(args, values), described(kwargs, values)
        op = Op(function, given, named, returned(result, values), torch.is_grad_enabled(), keeps)
        self.ops.append(op)
        self._constants.note(op, result)


def plain(x: Tensor) -> Tensor:
    """Return a second object for the value of a tensor, as `_tap.alias` does."""
    y: Tensor = _run(Tensor.as_subclass, (), (x, Tensor), {})
    return y


def _counts(effects: Effects, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step does more than to return its result: it draws, or writes to what it was given."""
    if effects.draws:
        return True
    with torch._C.DisableTorchFunction():
        return bool(effects.written) and any(memory_of(t) in effects.written for t in tensors_of((args, kwargs)))


def _reads_safely(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in ("__getitem__", "__setitem__"):
        items = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        return not any(isinstance(i, slice) and tensors_of([i.start, i.stop, i.step]) for i in items)
    if name not in SIZES:
        return name in SAFE_READS
    at, key = SIZES[name]
    return not tensors_of([args[at] if at < len(args) else kwargs.get(key)])


def _has_size(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    before = 2 if name == "sparse_coo_tensor" else 3  # indices and values
    return kwargs.get("size") is not None or (len(args) > before and not isinstance(args[before], torch.dtype))


def _is_split_by_data(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    named = [value for key, value in kwargs.items() if key not in ("input", "self")]
    return any(isinstance(value, Tensor) for value in (*args[1:], *named))


def _writes(name: str) -> bool:
    if name in WRITES:
        return True
    if name.startswith("__i"):
        return name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_") and not name.endswith("__")


def _has_mask(index: Any) -> bool:
    items = index if isinstance(index, tuple | list) else (index,)
    masks = (torch.bool, torch.uint8)
    with torch._C.DisableTorchFunction():
        return any(isinstance(i, Tensor) and i.dtype in masks for i in items)


def _autocast() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
