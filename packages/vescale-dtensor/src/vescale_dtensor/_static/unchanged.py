"""Whether tensors and arguments are, apart from values, what they were in a call before: the quick way to a program.

What is asked is what a signature holds, but nothing is made of the answers that could be kept: a call whose signature
is that of one before costs a few comparisons in C. Where they fail the signature is made, and decides.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from .._tensor import DTensor

__all__ = ["Arguments", "Metadata"]

_CONSTANTS = (bool, int, str, type(None), torch.dtype, torch.device)
"""Types of plain values that are compared as objects; others take the longer way."""
_spec_of = operator.attrgetter("_spec")
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_is_leaf = Tensor.is_leaf.__get__  # type: ignore[attr-defined]
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]
_device = Tensor.device.__get__
_shape = Tensor.shape.__get__  # type: ignore[attr-defined]


def _guards(tensors: Sequence[Tensor]) -> Any:
    """Return torch's own check of types, dtypes, sizes, strides, devices and `requires_grad`; None: it has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            make: Any = torch._C._dynamo.guards.TensorGuards
            guards: Any = make(
                *tensors,
                dynamic_dims_sizes=[list(t.size()) for t in tensors],
                dynamic_dims_strides=[list(t.stride()) for t in tensors],
            )
            return guards if guards.check(*tensors) is True else None
    except (AttributeError, TypeError, RuntimeError, SystemError):  # not part of what torch promises
        return None


class Metadata:
    """What tensors are apart from their values, and from which objects they are.

    Args:
        tensors: to be compared with; nothing keeps them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._types = list(map(type, tensors))
        self._ours = [cls is DTensor for cls in self._types]
        self._specs = list(map(_spec_of, compress(tensors, self._ours)))
        guards = _guards(tensors) if tensors else None
        self._check = None if guards is None else guards.check
        self._facts = self._read(tensors) if guards is None else []

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether others, as many, are alike; with dispatch off."""
        if list(map(type, tensors)) != self._types:
            return False
        if list(map(_spec_of, compress(tensors, self._ours))) != self._specs:
            return False
        if self._check is None:
            return self._read(tensors) == self._facts
        return bool(self._check(*tensors))

    @staticmethod
    def _read(tensors: Sequence[Tensor]) -> list[Any]:
        with torch._C.DisableTorchFunctionSubclass():
            return [
                list(map(read, tensors))
                for read in (_dtype, _requires_grad, _device, _shape, Tensor.stride, Tensor.is_conj, Tensor.is_neg)
            ]


class Arguments:
    """Arguments of a call, none of which is a container.

    Args:
        args: by position.
        kwargs: by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        flat = (*args, *kwargs.values())
        self._num, self._names = len(flat), tuple(kwargs)
        self._are_tensors = [isinstance(value, Tensor) for value in flat]
        self._are_plain = [not t for t in self._are_tensors]
        tensors = list(compress(flat, self._are_tensors))
        self._plain = list(compress(flat, self._are_plain))
        with torch._C.DisableTorchFunctionSubclass():
            self._metadata = Metadata(tensors)
            self._grown = [t.requires_grad for t in tensors]
            self._leaves = list(map(_is_leaf, compress(tensors, self._grown)))

    @staticmethod
    def possible(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether arguments can be compared so: tensors, each one once, and plain values."""
        flat = (*args, *kwargs.values())
        tensors = [value for value in flat if isinstance(value, Tensor)]
        alone = len(set(map(id, tensors))) == len(tensors)
        return alone and all(type(value) in _CONSTANTS for value in flat if not isinstance(value, Tensor))

    def tensors_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor] | None:
        """Return the tensors of a call whose arguments are alike, in their order; None: it may be another call.

        With dispatch off.
        """
        flat = (*args, *kwargs.values()) if kwargs else args
        if len(flat) != self._num or tuple(kwargs) != self._names:
            return None
        tensors: list[Tensor] = list(compress(flat, self._are_tensors))
        if self._plain and not all(map(operator.is_, compress(flat, self._are_plain), self._plain)):
            return None
        if not self._metadata.same(tensors) or (len(tensors) > 1 and len(set(map(id, tensors))) != len(tensors)):
            return None
        if self._leaves and list(map(_is_leaf, compress(tensors, self._grown))) != self._leaves:
            return None
        return tensors
