"""A batch cut into micro-batches, and results of micro-batches put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ..errors import PipeError
from .whole import TARGET, Paths, flags, whole_paths

__all__ = ["Batch", "merge", "microbatch_sizes"]


def microbatch_sizes(size: int, count: int) -> list[int]:
    """Return the rows of each micro-batch: as even as can be, larger ones first (as `torch.tensor_split`).

    Args:
        size: rows of the batch.
        count: micro-batches.

    Raises:
        PipeError: there are fewer rows than micro-batches.

    Example:
        >>> microbatch_sizes(10, 4)
        [3, 3, 2, 2]
    """
    if size < count:
        raise PipeError(
            f"batch: {size} rows cannot make {count} micro-batches of at least one row; "
            "use a larger batch or a smaller num_microbatches."
        )
    small, more = divmod(size, count)
    return [small + 1] * more + [small] * (count - more)


class Batch:
    """What one step was called with, cut when asked for.

    A tensor is cut along dim 0 if that has as many rows as the batch; anything else, and what is named as whole, goes
    whole to each micro-batch.

    Args:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        target: second argument of the loss, or None.
        count: micro-batches.
        size: rows of the batch; by default dim 0 of the first tensor with dimensions among args, kwargs, target that is
            cut.
        whole: what is not cut; see `whole_paths`.
        parameters: names of the arguments of the model, as far as they are known.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        count: int,
        size: int | None = None,
        whole: Sequence[str | int] = (),
        parameters: Sequence[str] = (),
    ) -> None:
        self._args = args
        self._kwargs = kwargs
        self._target = target
        self._whole: dict[int | str, Paths] = whole_paths(whole, parameters, args, kwargs) if whole else {}
        self.count = count
        self.size = self._rows() if size is None else size
        """Rows; None if there is no tensor to tell."""
        self.sizes = None if self.size is None else microbatch_sizes(self.size, count)
        """Rows of each micro-batch."""
        self._columns: dict[int | str, list[list[Any]]] = {}
        self._specs: dict[int | str, Any] = {}

    def _rows(self) -> int | None:
        given: list[tuple[int | str, Any]] = [*enumerate(self._args), *self._kwargs.items(), (TARGET, self._target)]
        for key, value in given:
            leaves = _pytree.tree_leaves(value)
            for one, whole in zip(leaves, self._flags(key, value, len(leaves)), strict=True):
                if isinstance(one, Tensor) and one.dim() and not whole:
                    return one.shape[0]
        return None

    def _flags(self, key: int | str, value: Any, count: int) -> Sequence[bool]:
        """Return for each leaf of an argument whether it is whole."""
        paths = self._whole.get(key, ())
        return flags(key, value, paths, count) if paths else (False,) * count

    def columns(self, key: int | str) -> list[list[Any]]:
        """Return the leaves of an argument, each as a list of one value per micro-batch.

        Args:
            key: its position or keyword.

        Raises:
            PipeError: it was not given.
        """
        found = self._columns.get(key)
        if found is None:
            given = (0 <= key < len(self._args)) if isinstance(key, int) else key in self._kwargs
            if not given:
                what = f"positional argument {key}" if isinstance(key, int) else f"keyword argument {key!r}"
                have = f"{len(self._args)} positional and {sorted(self._kwargs)}"
                raise PipeError(
                    f"{what} is needed by a stage of this rank and was not given (given: {have}); call the engine "
                    "with the same arguments on all ranks, in the form in which the model was split."
                )
            value = self._args[key] if isinstance(key, int) else self._kwargs[key]
            leaves, spec = ([value], None) if isinstance(value, Tensor) else _pytree.tree_flatten(value)
            whole = self._flags(key, value, len(leaves))
            found = self._columns[key] = [
                [leaf] * self.count if kept else self.split(leaf) for leaf, kept in zip(leaves, whole, strict=True)
            ]
            self._specs[key] = spec
        return found

    def microbatch(self, number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one micro-batch.

        Args:
            number: of it.
        """
        return (
            tuple(self._argument(place, number) for place in range(len(self._args))),
            {name: self._argument(name, number) for name in self._kwargs},
        )

    def _argument(self, key: int | str, number: int) -> Any:
        columns = self.columns(key)
        spec = self._specs[key]
        return columns[0][number] if spec is None else _pytree.tree_unflatten([one[number] for one in columns], spec)

    def split(self, value: Any) -> list[Any]:
        """Return a leaf for each micro-batch.

        Args:
            value: a leaf.
        """
        if self.sizes is None or not isinstance(value, Tensor) or not value.dim() or value.shape[0] != self.size:
            return [value] * self.count
        return list(torch.split(value.detach(), self.sizes)) if not value.requires_grad else self._narrow(value)

    def _narrow(self, value: Tensor) -> list[Tensor]:
        # One node per piece: pieces that share a node could not be gone backward through one by one.
        assert self.sizes is not None
        pieces, start = [], 0
        for size in self.sizes:
            pieces.append(value.narrow(0, start, size))
            start += size
        return pieces

    def targets(self) -> list[Any]:
        """Return the target of each micro-batch."""
        leaves, spec = _pytree.tree_flatten(self._target)
        columns = []
        for one, whole in zip(leaves, self._flags(TARGET, self._target, len(leaves)), strict=True):
            is_rows = isinstance(one, Tensor) and one.dim() and not whole
            if is_rows and self.size is not None and one.shape[0] != self.size:
                raise PipeError(
                    f"target: a tensor of shape {tuple(one.shape)} given; the batch has {self.size} rows. What goes "
                    "whole to each micro-batch is named in PipePlan(whole=[...])."
                )
            columns.append([one] * self.count if whole else self.split(one))
        return [_pytree.tree_unflatten([column[m] for column in columns], spec) for m in range(self.count)]


def merge(rows: Sequence[Sequence[Any]], sizes: Sequence[int] | None) -> list[Any]:
    """Put the outputs of all micro-batches together: tensors with the rows of their micro-batch one after the other.

    Scalars are stacked; other tensors, and Python values that differ, are given as lists; equal ones once.

    Args:
        rows: per micro-batch the outputs.
        sizes: rows of each micro-batch.
    """
    return [_merge([row[place] for row in rows], sizes) for place in range(len(rows[0]))]


def _merge(column: Sequence[Any], sizes: Sequence[int] | None) -> Any:
    first = column[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return torch.stack(list(column))
        if sizes is not None and all(
            isinstance(one, Tensor) and one.dim() == first.dim() and one.shape[0] == size
            for one, size in zip(column, sizes, strict=True)
        ):
            if all(one.shape[1:] == first.shape[1:] for one in column):
                return torch.cat(list(column))
        elif len(column) == 1:
            return first
        return list(column)
    if type(first) in (bool, int, float, str, type(None)):
        return first if all(type(one) is type(first) and one == first for one in column) else list(column)
    leaves = [_pytree.tree_flatten(one) for one in column]
    spec = leaves[0][1]
    if (spec.num_leaves == 1 and leaves[0][0][0] is first) or any(one[1] != spec for one in leaves):
        return list(column)
    return _pytree.tree_unflatten(merge([one[0] for one in leaves], sizes), spec)
