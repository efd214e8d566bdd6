"""Notices when a module gets other parameters, or when frozen ones begin to train; quick enough for every forward."""

from __future__ import annotations

from torch import nn
from torch.nn import Parameter

__all__ = ["ModuleWatch"]


class ModuleWatch:
    """Compares the parameters of a module with those that it had when it was looked at last.

    Args:
        module: the module.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> watch = ModuleWatch(layer)
        >>> watch.changed()
        False
        >>> layer.extra = nn.Linear(2, 2)
        >>> watch.changed(), watch.changed()
        (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._look()

    def _look(self) -> None:
        self._parts: list[tuple[nn.Module, list[Parameter | None], list[bool], list[nn.Module | None]]] = []
        for module in self._module.modules():
            params = list(module._parameters.values())
            grads = [param is not None and param.requires_grad for param in params]
            self._parts.append((module, params, grads, list(module._modules.values())))

    def changed(self) -> bool:
        """Tell whether modules or parameters came or went, or `requires_grad` changed, since the last look."""
        for module, params, grads, children in self._parts:
            now, below = module._parameters, module._modules
            if len(now) != len(params) or len(below) != len(children):
                break
            if any(
                new is not old or (new is not None and new.requires_grad is not grad)
                for new, old, grad in zip(now.values(), params, grads, strict=True)
            ):
                break
            if any(new is not old for new, old in zip(below.values(), children, strict=True)):
                break
        else:
            return False
        self._look()
        return True
