"""What happens on local tensors while a call runs, in order.

A torch-function mode sees every operator: those on DTensors are dispatched as ever, and what they run on local tensors
comes by here again and is noted. Moves, collectives, custom autograd functions and draws, which no mode sees, come
through `_tap`. Whatever cannot be repeated blindly ends the record with a reason: a value that Python reads, a shape
that depends on data, a tensor from elsewhere, another mode of autograd or autocast.
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
from .._dispatch.call import function_name
from .._dispatch.policy import user_frame
from .._tap import slot
from .._tensor import DTensor

__all__ = ["Op", "Recorder"]

_run = torch._C._disabled_torch_function_impl
_on = torch._C._is_torch_function_enabled
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks

HOST_READS = frozenset(
    "item tolist numpy __bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __dlpack__ __format__ "
    "is_nonzero equal allclose data_ptr".split()
)
"""Functions that hand values, or where they lie, to Python."""
DATA_SHAPES = frozenset("nonzero argwhere masked_select unique unique_consecutive _unique2 unique_dim".split())
"""Functions whose results have a shape that depends on data."""
ENGINE = frozenset([Tensor.backward, torch.autograd.backward, torch.autograd.grad])
"""Functions that run autograd, whose hooks must not run with dispatch off."""
UNSEEN = frozenset("_set_grad_enabled set_grad_enabled __hash__ is_floating_point is_complex dim __repr__".split())
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
    """With what; containers are copies."""
    kwargs: dict[str, Any]
    """By name."""
    result: Any
    """What came back."""
    gradients: bool
    """Whether autograd was on."""
    keeps: bool
    """Whether it does more than to return its result."""


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
        self._alive: list[Any] = []
        self._known: dict[int, int] = {}
        """Tensors that there are by now, by id, and the id of the first object for the same value."""
        self._paused = 0
        self._autocast = _autocast()
        self._hooks = _saved_hooks(True)
        for tensor in known:
            self._know(tensor)

    def __enter__(self) -> Recorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def start(self) -> None:
        """Begin: from now on taps come here."""
        slot.recorder = self
        communication.listeners.append(self._untapped)

    def stop(self) -> None:
        """End."""
        slot.recorder = None
        communication.listeners.remove(self._untapped)

    def first(self, tensor: Tensor) -> int:
        """Return the id of the first object for the value of a tensor."""
        return self._known.get(id(tensor), id(tensor))

    # -- operators

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.reason is not None:
            return func(*args, **kwargs)
        name = function_name(func)
        self._check(name, func, args)
        if _on() and any(isinstance(t, DTensor) for t in tensors_of((args, kwargs))):
            with self:
                return DTensor.__torch_function__(func, types, args, kwargs)
        result = _run(func, types, args, kwargs)
        if name not in UNSEEN:
            writes = _writes(name) or "out" in kwargs
            self._note(func, args, kwargs, result, writes or name in DRAWS)
        return result

    def _check(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name in HOST_READS:
            self.refuse(f"{name} hands a value of a tensor to Python")
        elif name in DATA_SHAPES or (name == "where" and len(args) == 1):
            self.refuse(f"the shape of what {name} returns depends on data")
        elif name == "__getitem__" and _has_mask(args[1]):
            self.refuse("the shape of what a boolean index returns depends on data")
        elif name == "repeat_interleave" and any(isinstance(a, Tensor) for a in args[1:]):
            self.refuse("the shape of what repeat_interleave returns depends on data")
        elif func in ENGINE:
            self.refuse(f"{name} runs autograd")

    # -- what no mode sees

    def atomic(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], writes: bool = False
    ) -> Any:
        """Run a function on local tensors as one step of the record."""
        before = self.pause()
        try:
            result = function(*args, **kwargs)
        finally:
            self.go_on(before)
        self._note(function, args, kwargs, result, writes)
        return result

    def move(self, x: DTensor, types: tuple[int, ...]) -> DTensor:
        """Move a DTensor as one step of the record; what was moved so before is not moved again."""
        before = self.pause()
        try:
            y = move(x, types)
        finally:
            self.go_on(before)
        if id(y) not in self._known or self.first(y) == self.first(x):
            self._note(move, (x, types), {"spec": x._spec}, y, False)
        return y

    def alias(self, alias: Tensor, of: Tensor) -> Tensor:
        """Take note of a second object for the same value."""
        if not self._paused and self.reason is None:
            self._alive.append(alias)
            self._known[id(alias)] = self.first(of)
        return alias

    def refuse(self, reason: str) -> None:
        """Give up recording."""
        if self.reason is None and not self._paused:
            file, line = user_frame()
            self.reason = f"{reason} ({file}:{line})"

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
        if not self._paused:
            self.refuse(f"an operator sends data ({event.name}) in a way that no record shows")

    # -- the record

    def _know(self, tensor: Tensor) -> None:
        self._alive.append(tensor)
        self._known.setdefault(id(tensor), id(tensor))

    def _note(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, keeps: bool
    ) -> None:
        if self._paused or self.reason is not None:
            return
        for tensor in tensors_of((args, kwargs)):
            if id(tensor) not in self._known:
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
        self.ops.append(Op(function, _copied(args), _copied(kwargs), result, torch.is_grad_enabled(), keeps))
        for tensor in tensors_of(result):
            self._know(tensor)


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    found: list[Tensor] = []
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif isinstance(one, dict):
            stack.extend(reversed(one.values()))
    return found


def _copied(value: Any) -> Any:
    """Copy containers, so that later changes of lists do not change the record."""
    if type(value) is list:
        return [_copied(v) for v in value]
    if type(value) is tuple:
        return tuple(_copied(v) for v in value)
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value


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
