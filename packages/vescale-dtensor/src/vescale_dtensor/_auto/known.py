"""What a model asks of its data, answered from the example inputs where they alone decide.

Whether a mask is all ones, say: many models drop such a mask, and send something else than with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._dispatch.call import function_name
from .._modules.forward import children
from .._tensor import DTensor

_LARGE = 1 << 22
"""Elements beyond which nothing is computed."""


class Known(TorchFunctionMode):
    """Beside a run on the meta device, computes what follows from whole numbers and masks among the example inputs.

    Args:
        example: arguments with data; those without, and DTensors, decide nothing.
        ghosts: the same on the meta device.

    Attributes:
        answers: to each question in order, whether something holds; no where parameters decide.
    """

    def __init__(self, example: Any, ghosts: Any) -> None:
        super().__init__()
        self.answers: list[bool] = []
        self._data: dict[int, tuple[Tensor, Tensor]] = {}
        for value, ghost in zip(_tensors(example), _tensors(ghosts), strict=True):
            if not (isinstance(value, DTensor) or value.is_meta) and _countable(ghost):
                self._data[id(ghost)] = ghost, value.detach().cpu().clone()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and args[0].dtype == torch.bool:
            found = self._data.get(id(args[0]))
            self.answers.append(bool(func(*args) if found is None else self._apart(func, (found[1],), {})))
            return self.answers[-1]
        out = func(*args, **kwargs)
        if self._data:
            self._follow(func, args, kwargs, out)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute a result with data too, where all arguments have them."""
        name, given, made = function_name(func), _tensors((args, kwargs)), _tensors(out)
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if not all(id(t) in self._data for t in given):
            if changes and any(id(t) in self._data for t in given):
                self._data.clear()  # what was changed may be seen in others
            return
        if not given or not (made or changes) or not all(map(_countable, made)) or "rand" in name:
            return
        try:
            results = _tensors(self._apart(func, self._with_data(args), self._with_data(kwargs)))
        except Exception:  # noqa: BLE001  (it has no such kernel here: nothing is known, as for parameters)
            return
        if [t.shape for t in results] == [t.shape for t in made]:
            self._data |= {id(ghost): (ghost, t) for ghost, t in zip(made, results, strict=True)}

    def _with_data(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._data[id(value)][1]
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if isinstance(value, dict):
            return {k: self._with_data(v) for k, v in value.items()}
        return type(value)(map(self._with_data, value)) if type(value) in (list, tuple) else value

    @staticmethod
    def _apart(func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return func(*args, **kwargs)


def _countable(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex()) and t.numel() <= _LARGE


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for _, item in children(value) for t in _tensors(item)]


__all__ = ["Known"]
