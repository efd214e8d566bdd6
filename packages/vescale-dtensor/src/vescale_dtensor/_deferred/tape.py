"""What is written down while a model is constructed: memories, and the operators that wrote them.

A memory stands for the storage of a tensor that does not exist yet. Tensors of the meta device stand for views of it:
which memory one belongs to follows from its storage, and which elements from its own size and stride. So parameters
made of a tensor, views, detached tensors and `.data` need no record of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .._bytes import hash_of
from .._spec import contiguous_stride

_run = torch._C._disabled_torch_function_impl
_ticks = itertools.count()

OVERWRITES = frozenset(
    """fill_ zero_ copy_ normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_""".split()
)
"""In-place operators whose result does not depend on what was there."""


class Memory:
    """The storage of a tensor to come."""

    __slots__ = ("__weakref__", "device", "dtype", "last_read", "size", "stride", "writes")

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device):
        self.size, self.stride, self.dtype, self.device = size, stride, dtype, device
        self.writes: list[Node] = []
        """What made it, then what changed it, in order; without what nothing can depend on any more."""
        self.last_read = -1
        """Index of the last node that read it to write elsewhere."""

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie in the usual order."""
        return self.stride == contiguous_stride(self.size)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument: some elements of a memory."""

    memory: Memory
    """Where it lies."""
    size: tuple[int, ...]
    """Its sizes."""
    stride: tuple[int, ...]
    """Its strides."""
    offset: int
    """Its first element in the memory, in elements of its dtype."""
    dtype: torch.dtype
    """Its dtype."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its memory, as that was made."""
        m = self.memory
        return (self.size, self.stride, self.offset, self.dtype) == (m.size, m.stride, 0, m.dtype)


class Constant:
    """A real tensor among the arguments, as it was when the operator ran."""

    __slots__ = ("content", "tensor")
    _COPIED = 1 << 20
    """Elements up to which a copy is kept, so that later changes do not matter; of larger ones, a hash."""

    def __init__(self, tensor: Tensor) -> None:
        detached: Tensor = _run(Tensor.detach, (), (tensor,), {})
        copied = detached.numel() <= self._COPIED
        self.tensor = detached.clone() if copied else detached
        self.content = None if copied else hash_of(detached)

    def value(self) -> Tensor:
        """The tensor; raises if it was changed since."""
        if self.content is not None and hash_of(self.tensor) != self.content:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that the construction of a deferred module read was "
                "changed in place afterwards, before the module was materialized; change a clone() of it instead"
            )
        return self.tensor


@dataclass(slots=True, eq=False)
class Node:
    """One operator that ran while a model was constructed."""

    func: Any
    """The aten overload."""
    args: tuple[Any, ...]
    """Its arguments, with a `Ref` or a `Constant` for each tensor."""
    kwargs: dict[str, Any]
    """Its named arguments, the devices that were asked for among them."""
    written: tuple[Ref, ...] = ()
    """The arguments that it changed."""
    made: tuple[tuple[int, Memory], ...] = ()
    """(position among its results, memory) of the tensors that it made."""
    state: Tensor | None = None
    """State of the generator before it drew; None where it draws nothing."""
    index: int = 0
    """Place in the order of all nodes."""
    default_dtype: torch.dtype = torch.float32
    """The default dtype at that time, which decides the dtype of some results."""

    def __post_init__(self) -> None:
        self.index, self.default_dtype = next(_ticks), torch.get_default_dtype()
        written = {r.memory: None for r in self.written} | {m: None for _, m in self.made}
        for ref in self.refs:
            if ref.memory not in written or len(written) > 1:
                ref.memory.last_read = self.index
        for memory in written:
            if memory.writes and self.overwrites(memory):
                first, *later = memory.writes
                memory.writes = [first, *[w for w in later if w.index < memory.last_read]]
            memory.writes.append(self)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operator on real tensors."""
        now = torch.get_default_dtype()
        if now is self.default_dtype:
            return self.func(*args, **kwargs)
        torch.set_default_dtype(self.default_dtype)
        try:
            return self.func(*args, **kwargs)
        finally:
            torch.set_default_dtype(now)

    @property
    def name(self) -> str:
        """Base name of the operator, such as "normal_"."""
        return base_name(self.func)

    @property
    def refs(self) -> list[Ref]:
        """All its tensor arguments that are deferred."""
        return [v for v in leaves((self.args, self.kwargs)) if isinstance(v, Ref)]

    def overwrites(self, memory: Memory) -> bool:
        """Whether nothing of what was in `memory` before it ran matters afterwards."""
        if self.name not in OVERWRITES:
            return False
        first, *rest = self.args
        reads = [v for v in leaves((rest, self.kwargs)) if isinstance(v, Ref)]
        return first.memory is memory and first.is_whole and all(r.memory is not memory for r in reads)


def base_name(func: Any) -> str:
    """Name of an aten overload without namespace and overload."""
    return str(func._schema.name).rpartition("::")[2]


def leaves(value: Any) -> Iterable[Any]:
    """The values inside nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def mapped(value: Any, function: Any) -> Any:
    """Apply a function to the leaves of nested lists, tuples and dicts."""
    if isinstance(value, list | tuple):
        items = [mapped(v, function) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value  # keeps torch.Size and named tuples
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: mapped(v, function) for k, v in value.items()}
    return function(value)


# ------------------------------------------------------------------ from tensors to memories

_memories: dict[int, tuple[StorageWeakRef, Memory]] = {}
"""By the address of a storage, which a weak reference keeps from reuse."""
_limit = 4096


def storage_of(tensor: Tensor) -> StorageWeakRef:
    """Weak reference to a tensor's storage."""
    return StorageWeakRef(_run(Tensor.untyped_storage, (), (tensor,), {}))  # type: ignore[no-untyped-call]


def enter(tensor: Tensor, memory: Memory) -> None:
    """Let the storage of a meta tensor stand for `memory`."""
    global _limit
    storage = storage_of(tensor)
    _memories[storage.cdata] = storage, memory
    if len(_memories) > _limit:
        forget_freed()
        _limit = 2 * len(_memories) + 4096


def forget_freed() -> None:
    """Let go of the memories that no tensor stands for any more."""
    for address, (known, _) in list(_memories.items()):
        if known.expired():  # type: ignore[no-untyped-call]
            _memories.pop(address, None)


def on_meta(tensor: Tensor) -> bool:
    """Whether a tensor is on the meta device, whatever it says."""
    return bool(_run(_is_meta, (), (tensor,), {}))


def memory_of(tensor: Tensor) -> Memory | None:
    """The memory that a tensor stands for a view of; None for tensors that are what they seem."""
    if not _memories or not isinstance(tensor, Tensor) or not on_meta(tensor):
        return None
    if _run(_layout, (), (tensor,), {}) is not torch.strided:
        return None
    found = _memories.get(storage_of(tensor).cdata)
    return found[1] if found is not None else None


_is_meta = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]
_layout = torch._C.TensorBase.layout.__get__  # type: ignore[attr-defined]
_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
_dtype = torch._C.TensorBase.dtype.__get__  # type: ignore[attr-defined]


def is_deferred(tensor: Any) -> bool:
    """Whether a tensor was made in `deferred_init` and has no values yet."""
    return memory_of(tensor) is not None


def ref_of(tensor: Tensor) -> Ref | None:
    """What a tensor stands for; None if it is what it seems."""
    memory = memory_of(tensor)
    if memory is None:
        return None
    return Ref(
        memory,
        tuple(_run(_shape, (), (tensor,), {})),
        tuple(_run(Tensor.stride, (), (tensor,), {})),
        _run(Tensor.storage_offset, (), (tensor,), {}),
        _run(_dtype, (), (tensor,), {}),
    )


# ------------------------------------------------------------------ what a value needs


def needed(memory: Memory, before: float = float("inf")) -> list[Node]:
    """The nodes that the content of `memory` at a time follows from, in order; what was overwritten is left out."""
    chosen: set[Node] = set()
    known: set[tuple[Memory, int]] = set()
    stack: list[tuple[Memory, float]] = [(memory, before)]
    while stack:
        m, time = stack.pop()
        live = _live_writes(m, time)
        if not live or (m, live[-1].index) in known:
            continue
        known.add((m, live[-1].index))
        for node in live:
            if node in chosen:
                continue
            chosen.add(node)
            for ref in node.refs:
                if node.overwrites(ref.memory):
                    stack.append((ref.memory, ref.memory.writes[0].index + 1))
                else:
                    stack.append((ref.memory, node.index))
    return sorted(chosen, key=lambda n: n.index)


def _live_writes(memory: Memory, time: float) -> list[Node]:
    writes = [w for w in memory.writes if w.index < time]
    for i in range(len(writes) - 1, 0, -1):
        if writes[i].overwrites(memory):
            return [writes[0], *writes[i:]]
    return writes
