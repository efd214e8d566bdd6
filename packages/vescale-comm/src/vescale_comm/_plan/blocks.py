"""What of a parameter must stay on one rank: rows, tiles or whole matrices; and what this asks of its storage.

A rule turns a shape into the granularity of a `TensorSpec`. Tiles leave the planner a choice of storage: row by row,
so that a band of tiles stays together; transposed, so that a column of tiles does; or tile by tile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import PlanError

__all__ = ["Block", "Blocks", "Rows", "Rule", "Storage", "Whole", "granularity", "rules_for"]


class Storage(Enum):
    """How the elements of a matrix follow each other."""

    GIVEN = "as given"
    """Row by row, as torch stores a contiguous tensor."""
    TRANSPOSED = "transposed"
    """Column by column; the parameter is a transposed view, which costs nothing to use."""
    TILES = "tile by tile"
    """Each tile contiguous; kernels that do not read tiles need a copy of the gathered tensor."""


@dataclass(frozen=True, slots=True)
class Rows:
    """So many rows stay together; a row is the last dim, and rows of different matrices of a stack never mix.

    Example:
        >>> Rows(2).granularity((6, 10)), Rows(2).granularity((10,)), Rows(4).granularity((8, 6, 10))
        (20, 2, 60)
    """

    rows: int = 1
    """How many; of a vector, its elements."""

    def __post_init__(self) -> None:
        """Refuse what is no number of rows."""
        _check_positive(self, self.rows)

    def granularity(self, shape: Sequence[int], storage: Storage = Storage.GIVEN) -> int:
        """Return the elements that stay together; see the function `granularity`."""
        _check_storage(self, shape, storage, (Storage.GIVEN,))
        return _band(shape, self.rows)

    def storages(self, shape: Sequence[int]) -> tuple[Storage, ...]:
        """Return the kinds of storage in which such blocks are contiguous."""
        del shape
        return (Storage.GIVEN,)


@dataclass(frozen=True, slots=True)
class Block:
    """Tiles of so many rows and columns stay together, such as those that share a scale in block quantization.

    Example:
        >>> tile = Block(32, 32)
        >>> [tile.granularity((4096, 14336), storage) for storage in tile.storages((4096, 14336))]
        [458752, 131072, 1024]
    """

    rows: int
    """Rows of a tile; tiles at the lower border may have fewer."""
    columns: int
    """Columns of a tile, and elements of a block of a vector; tiles at the right border may have fewer."""

    def __post_init__(self) -> None:
        """Refuse what is no size of a tile."""
        _check_positive(self, self.rows, self.columns)

    def granularity(self, shape: Sequence[int], storage: Storage = Storage.GIVEN) -> int:
        """Return the elements that stay together; see the function `granularity`."""
        _check_storage(self, shape, storage, self.storages(shape))
        if storage is Storage.TILES:
            return self.rows * self.columns
        if storage is Storage.TRANSPOSED:
            return _band((*shape[:-2], shape[-1], shape[-2]), self.columns)
        return _band(shape, self.rows if len(shape) > 1 else self.columns)

    def storages(self, shape: Sequence[int]) -> tuple[Storage, ...]:
        """Return the kinds of storage to choose from: tile by tile only where no tile is smaller than the others."""
        if len(shape) < 2:
            return (Storage.GIVEN,)
        if shape[-2] % self.rows or shape[-1] % self.columns:
            return (Storage.GIVEN, Storage.TRANSPOSED)
        return (Storage.GIVEN, Storage.TRANSPOSED, Storage.TILES)


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole tensor stays on one rank; of a stack of matrices, with three dims, each matrix does.

    Example:
        >>> Whole().granularity((6, 10)), Whole().granularity((8, 6, 10)), Whole().granularity(())
        (60, 60, 1)
    """

    def granularity(self, shape: Sequence[int], storage: Storage = Storage.GIVEN) -> int:
        """Return the elements that stay together; see the function `granularity`."""
        _check_storage(self, shape, storage, (Storage.GIVEN,))
        return max(1, math.prod(shape[1:] if len(shape) == 3 else shape))

    def storages(self, shape: Sequence[int]) -> tuple[Storage, ...]:
        """Return the kinds of storage in which such blocks are contiguous."""
        del shape
        return (Storage.GIVEN,)


Rule = Rows | Block | Whole | int
"""What stays together; a number is that many elements in storage order."""
Blocks = Rule | Mapping[str, Rule]
"""One rule for all parameters, or rules by regular expressions for the whole name, of which the first counts."""


def granularity(rule: Rule, shape: Sequence[int], storage: Storage = Storage.GIVEN) -> int:
    """Return how many elements of a tensor, in storage order, stay together under a rule.

    Args:
        rule: what stays together.
        shape: of the tensor.
        storage: how its elements follow each other.

    Raises:
        PlanError: such blocks are not contiguous in this storage.
    """
    if isinstance(rule, int):
        _check_positive(rule, rule)
        return rule
    return rule.granularity(shape, storage)


def rules_for(names: Sequence[str], blocks: Blocks) -> list[Rule]:
    r"""Return the rule of each parameter; 1, any element by itself, where no pattern matches its name.

    Raises:
        PlanError: a pattern matches no name.

    Example:
        >>> rules_for(["0.w", "0.b", "1.w"], {r".*\.w": Rows(2)})
        [Rows(rows=2), 1, Rows(rows=2)]
    """
    if not isinstance(blocks, Mapping):
        return [blocks] * len(names)
    patterns = [(_compiled(pattern), rule) for pattern, rule in blocks.items()]
    unused = {pattern.pattern for pattern, _ in patterns}
    found: list[Rule] = []
    for name in names:
        matches = [(pattern.pattern, rule) for pattern, rule in patterns if pattern.fullmatch(name)]
        unused.difference_update(pattern for pattern, _ in matches)
        found.append(matches[0][1] if matches else 1)
    if unused:
        raise PlanError(
            f"The pattern {min(unused)!r} matches no parameter: patterns match whole names, such as {names[0]!r}."
            if names
            else f"The pattern {min(unused)!r} matches no parameter: there are none."
        )
    return found


def _band(shape: Sequence[int], rows: int) -> int:
    """Return the elements of that many rows, of a whole matrix where its rows are no multiple and more follow it."""
    if not shape:
        return 1
    if len(shape) == 1:
        return max(1, min(rows, shape[0]))
    if len(shape) > 2 and shape[-2] % rows:
        rows = shape[-2]
    return max(1, min(rows * shape[-1], math.prod(shape)))


def _check_positive(rule: Rule, *sizes: int) -> None:
    if min(sizes) < 1:
        raise PlanError(f"{rule} is no block: it holds 1 element or more in each dim.")


def _check_storage(rule: Rule, shape: Sequence[int], storage: Storage, allowed: Sequence[Storage]) -> None:
    if storage not in allowed:
        raise PlanError(
            f"{rule} of shape {tuple(shape)} is not contiguous when stored {storage.value}: "
            f"choose from {', '.join(kind.value for kind in allowed)}."
        )


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise PlanError(f"The pattern {pattern!r} is no regular expression: {error}.") from None
