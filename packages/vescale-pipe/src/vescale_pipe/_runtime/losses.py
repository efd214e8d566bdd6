"""Losses of micro-batches, their weights, and losses that stages in the middle add.

The loss of a micro-batch is weighted before its backward, so gradients are those of
`for m: (loss_m * weight_m).backward()` on one device, bit for bit; scaling sums of gradients afterwards is not.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PipeError
from .batch import Batch

__all__ = ["LossRule", "add_loss", "added_losses"]

LossFunction = Callable[..., Tensor]
Weight = str | Callable[[Any], Any]

_LOCAL = threading.local()


class LossRule:
    """How losses are made and weighted.

    Args:
        function: from outputs and target (only outputs where there is no target) of a micro-batch to its loss; None
            where the model returns it: a scalar, or a result with `loss`.
        weight: "mean": the share of the batch that the micro-batch is; "sum": 1; or a function of the target of a
            micro-batch, such as its number of valid tokens, whose value is divided by the sum over micro-batches.

    Raises:
        PipeError: no such weight.
    """

    def __init__(self, function: LossFunction | None, weight: Weight = "mean") -> None:
        if weight not in ("mean", "sum") and not callable(weight):
            raise PipeError(f"loss={weight!r}: it must be 'mean', 'sum', or a function of the target of a micro-batch.")
        if function is not None and not callable(function):
            raise PipeError(f"loss_fn={function!r:.100}: it must be a function of outputs and target, or None.")
        self.function = function
        self.weight = weight
        self._takes = _takes(function)
        self._seeds: dict[tuple[Any, ...], Tensor] = {}

    def check(self, has_target: bool) -> None:
        """Refuse a call without a target for a loss that takes one, or with one for a loss that takes none.

        Args:
            has_target: whether the call has one.

        Raises:
            PipeError: the loss cannot be called so.
        """
        if self.function is None or self._takes[has_target] or not self._takes[not has_target]:
            return
        name = getattr(self.function, "__name__", type(self.function).__name__)
        if has_target:
            raise PipeError(
                f"loss_fn {name} takes the outputs only, and the call has target=; leave it out, or give a loss_fn of "
                "outputs and target."
            )
        raise PipeError(
            f"loss_fn {name} takes outputs and a target, and the call has no target=: engine(batch, target=...). "
            "For a model that returns its own loss, make the engine without loss_fn."
        )

    def weights(self, batch: Batch, targets: Sequence[Any]) -> list[float]:
        """Return the weight of each micro-batch.

        Args:
            batch: of the step.
            targets: of its micro-batches.

        Raises:
            PipeError: the weights of all micro-batches are zero together.
        """
        if self.weight == "sum":
            return [1.0] * batch.count
        if self.weight == "mean":
            if batch.sizes is None or batch.size is None:
                return [1 / batch.count] * batch.count
            return [size / batch.size for size in batch.sizes]
        assert callable(self.weight)
        raw = [float(self.weight(target)) for target in targets]
        total = sum(raw)
        if not total:
            raise PipeError(f"loss: the weights of the micro-batches are {raw}; their sum must not be 0.")
        return [one / total for one in raw]

    def value(self, result: Any, target: Any) -> Tensor:
        """Return the loss of a micro-batch.

        Args:
            result: what the model returned for it.
            target: of it, or None.

        Raises:
            PipeError: that is no scalar tensor.
        """
        if self.function is not None:
            loss = self.function(result) if target is None else self.function(result, target)
        else:
            loss = own_loss(result)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            who = (
                "loss_fn returned" if self.function is not None else "there is no loss_fn, and the model's own loss is"
            )
            raise PipeError(f"{who} {got}; a scalar tensor is needed to go backward from.")
        return loss

    def seed(self, loss: Tensor, weight: float, scale: float) -> Tensor:
        """Return the gradient that goes into a loss: what `(loss * weight * scale).backward()` would give it.

        Args:
            loss: of a micro-batch.
            weight: of it.
            scale: of all losses, to keep small gradients from vanishing.
        """
        key = (weight, scale, loss.dtype, loss.device, loss.shape)
        found = self._seeds.get(key)
        if found is None:
            if len(self._seeds) > 256:
                self._seeds.clear()
            found = torch.ones_like(loss, memory_format=torch.preserve_format)
            found = found.detach() * scale * weight if scale != 1.0 else found.detach() * weight
            self._seeds[key] = found
        return found


def _takes(function: LossFunction | None) -> tuple[bool, bool]:
    """Return whether a loss can be called with outputs alone, and with outputs and a target."""
    call = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(call) if call is not None else None
    except (TypeError, ValueError):  # a builtin does not say
        signature = None
    if signature is None:
        return True, True
    return _binds(signature, 1), _binds(signature, 2)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def own_loss(result: Any) -> Any:
    """Return the loss in what a model returned.

    Args:
        result: a tensor, or anything with `loss` as an attribute or key.
    """
    if isinstance(result, Tensor):
        return result
    if isinstance(result, Mapping):
        return result.get("loss")
    return getattr(result, "loss", None)


def add_loss(loss: Tensor) -> None:
    """Add to the loss of the micro-batch whose forward runs: call it in a module of any stage.

    The loss gets the same weight as the main one. Needs `PipePlan(added_losses=True)` to be counted in the loss that
    the engine returns. Outside of an engine's forward nothing happens, so a model runs on its own as well.

    Args:
        loss: a scalar tensor.

    Example:
        >>> import torch
        >>> add_loss(torch.zeros(()))  # no engine runs
    """
    found: list[Tensor] | None = getattr(_LOCAL, "losses", None)
    if found is not None:
        found.append(loss)


def added_losses(collect: list[Tensor] | None) -> None:
    """Say where `add_loss` puts losses of this thread from now on.

    Args:
        collect: a list, or None for nowhere.
    """
    _LOCAL.losses = collect
