"""Writing a construction down: `deferred_init` and the dispatch mode behind it.

Operators that make tensors give tensors of the meta device, and so do operators on those; what they would have
computed is kept in nodes. Where the construction needs a value (`.item()`, an index, a real tensor written from a
deferred one), the value is computed at once, as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._tensor import DTensor
from ..errors import UnsupportedOperationError
from . import draws
from .reads import read
from .tape import (
    Constant,
    Memory,
    Node,
    Ref,
    base_name,
    enter,
    forget_freed,
    leaves,
    mapped,
    memory_of,
    on_meta,
    ref_of,
    storage_of,
)
from .tensor import active, label
from .whole import whole

_WRITES_UNSAID = dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"), (3, 4))
"""Operators that change arguments of which their schema does not say so: the running statistics."""
_STORAGE_CHANGES = frozenset("resize_ resize_as_ set_ _resize_output_".split())
_EMPTY = frozenset("empty empty_strided empty_like new_empty new_empty_strided".split())
_FILLED = {
    "zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1,
    "full": None, "full_like": None, "new_full": None,
}  # fmt: skip
_ALIGNED = {"full": 1, "full_like": 1, "new_full": 2}
"""Where the operators that fill have their number."""


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules without values: within the block, tensors are written down instead of made.

    Afterwards `parallelize_module` (or `distribute_tensor`) makes on each rank what that rank holds, with the
    numbers that the construction would have given on one device under the same seed; `materialize` makes the whole
    on every rank. Until then, using a parameter or copying or pickling the module is an error. Generators move as
    in a normal construction, so numbers drawn after the block are the same too.

    The numbers are bit for bit those of one device with vescale-rng, or with `random_mode("whole")`, under which each
    rank draws every tensor whole, one after the other. Without either, each shard draws from a stream of its own, as
    random operators of this package do: reproducible, equal on replicas, and not the numbers of one device.

    A construction that reads values gets them: they are computed on the spot, as on one device. So does
    `nn.init.trunc_normal_`, which asks whether all that it drew is inside the bounds: with vescale-rng it takes the
    time of one device, but not its memory.

    >>> with deferred_init():
    ...     model = torch.nn.Linear(4, 4)
    >>> model.weight
    DeferredTensor(shape=[4, 4], dtype=torch.float32, parameter)
    """
    if active.recording:
        yield
        return
    active.recording = True
    try:
        with Recorder():  # type: ignore[no-untyped-call]
            yield
    finally:
        active.recording = False
        forget_freed()


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        active.recording = False  # torch's Python kernels for the meta device ask for the device, and need the truth
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return _dispatch(func, args, kwargs)
        finally:
            active.recording = True


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [v for v in leaves((args, kwargs)) if isinstance(v, Tensor)]
    deferred = [t for t in tensors if memory_of(t) is not None]
    if any(isinstance(t, DTensor) for t in tensors):
        raise UnsupportedOperationError(
            f"{base_name(func)} got a DTensor inside deferred_init, which writes down plain tensors only; distribute "
            "and use DTensors after the `with` block"
        )
    if base_name(func) == "_to_copy" and str(kwargs.get("device")) == "meta" and (deferred or not on_meta(tensors[0])):
        # torch brings indices and values of an assignment to the device that it believes the target to be on.
        memory = memory_of(tensors[0])
        kwargs = {**kwargs, "device": tensors[0].device if memory is None else memory.device}
        deferred = tensors
    device = _device(func, kwargs, tensors, deferred)
    if device is None or device.type == "meta":
        return func(*args, **kwargs)  # nothing deferred takes part, or nothing real is asked for
    written = [t for t in _written(func, args, kwargs) if isinstance(t, Tensor)]
    if any(memory_of(t) is None for t in written) or any(on_meta(t) and memory_of(t) is None for t in tensors):
        return _now(func, args, kwargs)
    if str(func) == "aten.set_.source_Tensor" and len(deferred) == 2:
        return func(*args)  # the tensor goes over to the other one's storage
    if base_name(func) in _STORAGE_CHANGES:
        raise UnsupportedOperationError(
            f"{base_name(func)} changes the storage of a deferred tensor; make the tensor in its size instead"
        )
    try:
        result = func(*mapped(args, _on_meta), **mapped({**kwargs, **_meta_device(kwargs)}, _on_meta))
    except RuntimeError:  # it depends on values; if it is the user's error, it comes again
        result = _now
    return _now(func, args, kwargs) if result is _now else _written_down(func, args, kwargs, device, written, result)


def _device(func: Any, kwargs: dict[str, Any], tensors: list[Tensor], deferred: list[Tensor]) -> torch.device | None:
    """Device that the results would be on; None if the operator neither makes tensors nor gets deferred ones."""
    if tensors and not deferred:
        return None
    asked = kwargs.get("device")
    if asked is not None:
        return torch.device(asked)
    if deferred:
        memory = memory_of(deferred[0])
        return deferred[0].device if memory is None else memory.device
    makes = any(a.name == "device" for a in func._schema.arguments) and not any(
        str(a.type).startswith(("Tensor", "List[Tensor", "Optional[Tensor")) for a in func._schema.arguments
    )
    return torch.get_default_device() if makes else None


def _meta_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {"device": "meta"} if kwargs.get("device") is not None else {}
    if kwargs.get("pin_memory"):
        changed["pin_memory"] = False
    if kwargs.get("generator") is not None:
        changed["generator"] = None
    return changed


def _on_meta(value: Any) -> Any:
    """Stand-in of a real tensor."""
    if not isinstance(value, Tensor) or on_meta(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        unsaid = i in _WRITES_UNSAID.get(base_name(func), ())
        if unsaid or (argument.alias_info is not None and argument.alias_info.is_write):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += leaves(value)
    return found


def _now(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on values, for it cannot wait."""

    def real(value: Any) -> Any:
        ref = ref_of(value) if isinstance(value, Tensor) else None
        return value if ref is None else read(ref)

    if any(isinstance(t, Tensor) and on_meta(t) and memory_of(t) is None for t in leaves((args, kwargs))):
        raise UnsupportedOperationError(
            f"{func} got a deferred tensor and one of the meta device, which has no values: inside deferred_init, make "
            "tensors on a real device, and give indices and numbers as tensors"
        )
    written = [t for t in _written(func, args, kwargs) if isinstance(t, Tensor)]
    result = func(*mapped(args, real), **mapped(kwargs, real))  # or the user's error
    if not any(memory_of(t) is not None for t in written):
        return result
    if len(written) > 1 or len(func._schema.returns) != 1 or draws.is_random(func):
        raise UnsupportedOperationError(
            f"{func} changes a deferred tensor in a way that depends on values; do it after materializing, or "
            "construct this module outside of deferred_init"
        )
    memory = memory_of(written[0])
    assert memory is not None
    return _written_down(func, args, kwargs, memory.device, written, written[0])  # again when values are wanted


def _written_down(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, written: list[Tensor], result: Any
) -> Any:
    known = {storage_of(t).cdata for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
    results = list(result) if isinstance(result, list | tuple) else [result]
    if any(isinstance(r, Tensor) and (r.is_conj() or r.is_neg() or not on_meta(r)) for r in results):
        return _now(func, args, kwargs)  # a lazy conjugate, say: not the elements of a memory as they stand
    fresh = [i for i, r in enumerate(results) if isinstance(r, Tensor) and storage_of(r).cdata not in known]
    made: list[tuple[int, Memory]] = []
    for i in fresh:
        r = results[i]
        memory = Memory(tuple(r.shape), tuple(r.stride()), r.dtype, device)
        enter(r, memory)
        made.append((i, memory))
    if made or (written and torch.Tag.inplace_view not in func.tags):
        _keep(func, args, kwargs, device, [r for t in written if (r := ref_of(t)) is not None], made, results)
    return mapped(result, label)


def _keep(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    written: list[Ref],
    made: list[tuple[int, Memory]],
    results: list[Any],
) -> None:
    name = base_name(func)
    if name in _EMPTY or name in _FILLED:
        ((_, memory),) = made
        _allocation(memory)
        number = _FILLED.get(name)
        if name in _ALIGNED:
            position = _ALIGNED[name]
            number = args[position] if len(args) > position else kwargs["fill_value"]
        if name in _FILLED:
            whole_of = Ref(memory, memory.size, memory.stride, 0, memory.dtype)
            Node(torch.ops.aten.fill_.Scalar, (whole_of, number), {}, (whole_of,))
        return
    state = None
    if draws.is_random(func):
        state = draws.generator_of(kwargs, device).get_state()
        drawn = results[0] if made else next(t for t in _written(func, args, kwargs) if isinstance(t, Tensor))
        moved = draws.advance(func, args, kwargs, drawn, device)
    kept_args, kept_kwargs = mapped((args, kwargs), _kept)
    node = Node(func, kept_args, kept_kwargs, tuple(written), tuple(made), state)
    if state is not None and not moved:
        _draw_once(node, device)


def _allocation(memory: Memory) -> None:
    args = (list(memory.size), list(memory.stride))
    Node(torch.ops.aten.empty_strided.default, args, {"dtype": memory.dtype, "device": memory.device},
         made=((0, memory),))  # fmt: skip


def _kept(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return ref_of(value) or Constant(value)


def _draw_once(node: Node, device: torch.device) -> None:
    """Move the generator by drawing the whole, whose values are dropped."""

    def real(value: Any) -> Any:
        if isinstance(value, Ref):
            if value in node.written:
                return torch.empty_strided(value.size, value.stride, dtype=value.dtype, device=device)
            return whole(value, before=node.index)
        return value.value() if isinstance(value, Constant) else value

    node.func(*mapped(node.args, real), **mapped(node.kwargs, real))
