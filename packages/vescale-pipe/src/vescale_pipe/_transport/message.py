"""Values as bytes: the signature of a list of values, and tensors flattened and put together again.

A signature says all about values but the numbers in their tensors: structure, shapes, strides, dtypes, whether a
gradient is required. Strides are kept because kernels choose their order of summation by them, so a value that
arrives with other strides can give other bits.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..errors import TransportError

__all__ = ["Layout", "Signature", "describe", "leaf_of", "local_copy", "tensors_of"]

Signature = tuple[Any, ...]
ALIGN = 64
PACK_BELOW = 1 << 16
PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
KNOWN = frozenset((Tensor, torch.nn.Parameter, torch.nn.Buffer))


def describe(values: Sequence[Any]) -> tuple[Signature, list[Tensor]]:
    """Return what two messages must have in common to be sent alike, and the tensors of this one.

    Args:
        values: of the message.

    Raises:
        TransportError: a tensor among them is not of strides, such as a sparse one, or a subclass.
    """
    signature: list[Any] = []
    tensors: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind in KNOWN:
            if value.dtype.is_complex or value.is_neg():
                value = value.resolve_conj().resolve_neg()
            if value.layout is not torch.strided:
                raise TransportError(_refusal(value))
            signature.append((value.shape, value.stride(), value.dtype, value.requires_grad))
            tensors.append(value)
        elif value is None:
            signature.append(None)
        elif kind in PLAIN:
            signature.append((kind, value))
        elif isinstance(value, Tensor):
            raise TransportError(_refusal(value))
        else:
            leaves, spec = _pytree.tree_flatten(value)
            if len(leaves) == 1 and leaves[0] is value:
                signature.append((object, _pickled(value)))
            else:
                inner, more = describe(leaves)
                signature.append((list, spec, inner))
                tensors.extend(more)
    return tuple(signature), tensors


def _pickled(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise TransportError(
            f"a value between stages is a {type(value).__name__}, which cannot be pickled ({error}); pass tensors, "
            "numbers, strings and containers of them, or make it anew in each stage."
        ) from error


def _refusal(value: Tensor) -> str:
    return (
        f"a value between stages is a {type(value).__name__} of layout {value.layout}; plain strided tensors can be "
        "sent. Make it one at the end of the stage (to_dense, to_local) and back at the start of the next."
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One tensor of a message."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """That it arrives with."""
    dtype: torch.dtype
    requires_grad: bool
    dense: bool
    """Whether its elements, each once, are one piece of memory."""
    numel: int
    """Elements that are sent: those that differ, where dimensions are expanded."""
    offset: int
    """In elements of its own dtype from the start of a packed message."""


@lru_cache(maxsize=4096)
def _piece(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[bool, int, tuple[int, ...]]:
    """Return whether a tensor's elements are one piece of memory, how many are sent, and the strides they get."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1 and step != 0)
    expected = 1
    for step, size in dims:
        if step != expected:
            break
        expected *= size
    else:
        if 0 not in shape:
            return True, expected, stride
    plain = [1] * len(shape)
    for place in range(len(shape) - 2, -1, -1):
        plain[place] = plain[place + 1] * max(shape[place + 1], 1)
    return False, math.prod(shape), tuple(plain)


class Layout:
    """How the values of one signature lie in a message.

    Args:
        signature: as `describe` gives it.
        prefix: bytes before the first tensor of a packed message, a multiple of 64.
    """

    __slots__ = ("_padding", "nbytes", "packed", "parts", "signature", "simple")

    def __init__(self, signature: Signature, prefix: int = ALIGN) -> None:
        self.signature = signature
        self.parts: list[_Part] = []
        self._padding: list[int] = []
        where = prefix
        for shape, stride, dtype, requires_grad in _tensor_rows(signature):
            dense, numel, arrives = _piece(tuple(shape), stride)
            self.parts.append(_Part(tuple(shape), arrives, dtype, requires_grad, dense, numel, where // dtype.itemsize))
            size = numel * dtype.itemsize
            self._padding.append(-size % ALIGN)
            where += size + self._padding[-1]
        self.nbytes = where
        """Of a packed message."""
        self.packed = where < PACK_BELOW
        """Whether it goes as one piece of memory, which costs a copy and saves messages."""
        self.simple = all(one is None or one[0] is not list for one in signature)

    def header(self) -> bytes:
        """Return what the other end needs to make the same layout."""
        return pickle.dumps(_with_skeletons(self.signature))

    @classmethod
    def of_header(cls, header: bytes) -> Layout:
        """Make the layout that a header is of.

        Args:
            header: as the other end made it.
        """
        return cls(_with_specs(pickle.loads(header)))

    def flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the elements of tensors, each once, in the order of memory, without graphs.

        Args:
            tensors: of the signature of this layout.
        """
        return [
            one.detach().as_strided((part.numel,), (1,), one.storage_offset())
            if part.dense
            else one.detach().contiguous().view(-1)
            for one, part in zip(tensors, self.parts, strict=True)
        ]

    def pack(self, word: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """Return one message: `word`, then all tensors, each from a multiple of 64 bytes.

        Args:
            word: uint8, the start of the message.
            tensors: of the signature of this layout.
        """
        pieces = [word]
        for flat, padding in zip(self.flat(tensors), self._padding, strict=True):
            pieces.append(flat.view(torch.uint8))
            if padding:
                pieces.append(_zeros(padding, word.device))
        return torch.cat(pieces)

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a packed message; they share its memory.

        Args:
            message: uint8 of `nbytes` bytes.
        """
        return [
            _finish(message.view(part.dtype).as_strided(part.shape, part.stride, part.offset), part)
            for part in self.parts
        ]

    def empty(self, device: torch.device) -> list[Tensor]:
        """Return buffers for the elements of each tensor."""
        return [torch.empty(part.numel, dtype=part.dtype, device=device) for part in self.parts]

    def shaped(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of the elements that `flat` gave; they share memory.

        Args:
            flats: one 1-D tensor for each.
        """
        return [
            _finish(flat.as_strided(part.shape, part.stride, 0), part)
            for flat, part in zip(flats, self.parts, strict=True)
        ]

    def values(self, tensors: list[Tensor]) -> list[Any]:
        """Return the values that tensors were taken from.

        Args:
            tensors: in the order of `describe`.
        """
        if self.simple and len(tensors) == len(self.signature):
            return tensors
        return _build(self.signature, iter(tensors))


def _with_skeletons(signature: Signature) -> Signature:
    """Return a signature with containers of numbers in place of the specs of containers, for those can be pickled."""
    return tuple(
        (list, _pytree.tree_unflatten(range(one[1].num_leaves), one[1]), _with_skeletons(one[2]))
        if one is not None and one[0] is list
        else one
        for one in signature
    )


def _with_specs(signature: Signature) -> Signature:
    return tuple(
        (list, _pytree.tree_structure(one[1]), _with_specs(one[2])) if one is not None and one[0] is list else one
        for one in signature
    )


def _finish(tensor: Tensor, part: _Part) -> Tensor:
    return tensor.requires_grad_() if part.requires_grad else tensor


@lru_cache(maxsize=64)
def _zeros(size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _tensor_rows(signature: Signature) -> list[Any]:
    rows: list[Any] = []
    for one in signature:
        if one is None:
            continue
        if one[0] is list:
            rows.extend(_tensor_rows(one[2]))
        elif not isinstance(one[0], type):
            rows.append(one)
    return rows


def _build(signature: Signature, tensors: Any) -> list[Any]:
    values: list[Any] = []
    for one in signature:
        if one is None:
            values.append(None)
        elif one[0] is list:
            values.append(_pytree.tree_unflatten(_build(one[2], tensors), one[1]))
        elif one[0] is object:
            values.append(pickle.loads(one[1]))
        elif isinstance(one[0], type):
            values.append(one[1])
        else:
            values.append(next(tensors))
    return values


def leaf_of(value: Any) -> Any:
    """Return a value for another stage of the same rank: its memory, without its graph.

    Args:
        value: a tensor, or a container of tensors.
    """
    if isinstance(value, Tensor):
        leaf = value.detach()
        return leaf.requires_grad_() if value.requires_grad else leaf
    if type(value) in PLAIN:
        return value
    return _pytree.tree_map_only(Tensor, leaf_of, value)


def local_copy(values: Sequence[Any]) -> list[Any]:
    """Return values as another process would receive them: copies, of the same strides, without graphs.

    Args:
        values: of a message.
    """
    signature, tensors = describe(values)
    layout = Layout(signature)
    return layout.values(layout.shaped([flat.clone() for flat in layout.flat(tensors)]))


def tensors_of(values: Sequence[Any]) -> list[Tensor | None]:
    """Return the tensors among values and in their containers, in order; None where a value is none.

    Both ends of a message get lists of the same length, so that gradients can be matched by place.

    Args:
        values: of a message.
    """
    found: list[Tensor | None] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in PLAIN:
            found.append(None)
        else:
            found.extend(one if isinstance(one, Tensor) else None for one in _pytree.tree_leaves(value))
    return found
