"""Ways to store the parameters of a model, of which the search tries each: what granularity each tensor then has."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .blocks import Rule, Storage, granularity

__all__ = ["Tensor", "Way", "ways"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter with its rule and the granularity of each kind of storage that it may have."""

    name: str
    """Full name."""
    shape: tuple[int, ...]
    """Its shape."""
    grains: dict[Storage, int]
    """By storage; no larger than the tensor."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @staticmethod
    def of(name: str, shape: tuple[int, ...], rule: Rule, allowed: Sequence[Storage]) -> Tensor:
        """Work out the granularities of a parameter under a rule, for the kinds of storage that are allowed."""
        kinds = (Storage.GIVEN,) if isinstance(rule, int) else rule.storages(shape)
        numel = max(1, math.prod(shape))
        grains = {
            kind: min(numel, granularity(rule, shape, kind))
            for kind in kinds
            if kind is Storage.GIVEN or kind in allowed
        }
        return Tensor(name, shape, grains)

    def turned(self) -> Storage:
        """Return the storage, of those that cost nothing, with the least granularity."""
        return min((Storage.GIVEN, Storage.TRANSPOSED), key=lambda kind: self.grains.get(kind, math.inf))


Way = tuple[Storage, ...]
"""The storage of each tensor of a model."""


def ways(tensors: Sequence[Tensor]) -> Iterator[Way]:
    """Yield ways to store the tensors of a model, each once, from the plainest on.

    As given; with those tensors transposed that have the largest blocks; with the granularity that most elements can
    have, so that few unlike blocks meet; and tile by tile where that can be.
    """
    given = tuple(Storage.GIVEN for _ in tensors)
    turned = [tensor.turned() for tensor in tensors]
    largest = max((t.grains[kind] for t, kind in zip(tensors, turned, strict=True)), default=1)
    least = tuple(
        Storage.GIVEN if tensor.grains[Storage.GIVEN] <= largest else kind
        for tensor, kind in zip(tensors, turned, strict=True)
    )
    common = _most_common(tensors)
    uniform = tuple(
        next((k for k in (Storage.GIVEN, Storage.TRANSPOSED) if tensor.grains.get(k) == common), kind)
        for tensor, kind in zip(tensors, least, strict=True)
    )
    tiles = tuple(
        Storage.TILES if Storage.TILES in tensor.grains else kind for tensor, kind in zip(tensors, least, strict=True)
    )
    yield from dict.fromkeys((given, least, uniform, tiles))


def _most_common(tensors: Sequence[Tensor]) -> int:
    elements: Counter[int] = Counter()
    for tensor in tensors:
        for grain in {tensor.grains.get(kind, 0) for kind in (Storage.GIVEN, Storage.TRANSPOSED)} - {0}:
            elements[grain] += tensor.numel
    return max(elements, key=lambda grain: (elements[grain], -grain), default=1)
