"""Waits for parameters where they are used: at the forward of their module, or where they are read from it.

While newest values are under way, the module's dict of parameters is one that waits before it hands one out: whatever
iterates over parameters, averages, saves or copies a model finds fresh values. Only who kept a parameter itself from
before can still see old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

__all__ = ["WaitingHooks"]


class WaitingHooks:
    """Watches the modules of a model that own parameters of some buckets."""

    def __init__(self, model: nn.Module, wait: Callable[[Sequence[int]], None], buckets: Mapping[int, int]) -> None:
        """Install the hooks.

        Args:
            model: of which all modules are looked through.
            wait: called with the numbers of buckets; must be quick where nothing is to be waited for.
            buckets: bucket of each parameter, by the parameter's id.
        """
        self._watches: list[_Watch] = []
        self._handles: list[Any] = []
        self._modules = list(model.modules())
        for path, module in model.named_modules():
            own = {name: p for name, p in module._parameters.items() if p is not None and id(p) in buckets}
            if own:
                watch = _Watch(module, path, own, wait, tuple(sorted({buckets[id(p)] for p in own.values()})))
                self._watches.append(watch)
                # Some modules, such as nn.LSTM, keep their parameters in a list of their own as well.
                self._handles.append(module.register_forward_pre_hook(_BeforeForward(watch), prepend=True))

    def arm(self) -> None:
        """From now on, wait before a parameter is used."""
        for watch in self._watches:
            watch.arm()

    def disarm(self) -> None:
        """All values are there."""
        for watch in self._watches:
            watch.disarm()

    def replaced(self) -> str | None:
        """Return the name of a parameter in whose place the model has another object now; None if there is none."""
        for watch in self._watches:
            for name, parameter in watch.own.items():
                if watch.plain.get(name) is not parameter:
                    return f"{watch.path}.{name}".lstrip(".")
        return None

    def is_compiled(self) -> bool:
        """Tell whether `torch.compile` took over a module, whose forward then may read parameters unseen."""
        return any(
            module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
            for module in self._modules
        )

    def remove(self) -> None:
        """Take the hooks away."""
        self.disarm()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watches.clear()


class _Watch:
    """One module that owns parameters."""

    __slots__ = ("_guard", "_module", "_numbers", "_wait", "armed", "own", "path", "plain")

    def __init__(
        self,
        module: nn.Module,
        path: str,
        own: dict[str, Tensor],
        wait: Callable[[Sequence[int]], None],
        numbers: tuple[int, ...],
    ) -> None:
        self._module, self._wait, self._numbers = module, wait, numbers
        self.path, self.own = path, own
        self.plain: dict[str, Any] = module._parameters
        self.armed = False
        self._guard = _Guard(self)

    def wait(self) -> None:
        """Wait for the parameters of the module."""
        self._wait(self._numbers)
        self.disarm()

    def arm(self) -> None:
        """Put the dict that waits into place."""
        now = self._module.__dict__["_parameters"]
        if now is not self._guard:
            self.plain = now
        self._guard.refill()
        self._module.__dict__["_parameters"] = self._guard
        self.armed = True

    def disarm(self) -> None:
        """Put the module's own dict back."""
        self.armed = False
        if self._module.__dict__["_parameters"] is self._guard:
            self._module.__dict__["_parameters"] = self.plain


class _BeforeForward:
    """A hook that waits; in a copy of the module it does nothing, since values of copies do not travel."""

    __slots__ = ("_watch",)

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __call__(self, *_: Any) -> None:
        if self._watch.armed:
            self._watch.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()


def _nothing(*_: Any) -> None:
    """Do nothing."""


def _inert() -> Callable[..., None]:
    return _nothing


class _Guard(dict[str, Any]):
    """Stands for a module's dict of parameters, and waits before anything is read from it or written to it."""

    __slots__ = ("_watch",)

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def refill(self) -> None:
        """Have the same entries, for whoever reads past the methods."""
        super().clear()
        super().update(self._watch.plain)

    def _fresh(self) -> dict[str, Any]:
        if self._watch.armed:
            self._watch.wait()
        return self._watch.plain

    def __getitem__(self, key: str) -> Any:
        return self._fresh()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._fresh()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._fresh()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._watch.plain)

    def __len__(self) -> int:
        return len(self._watch.plain)

    def __contains__(self, key: object) -> bool:
        return key in self._watch.plain

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry."""
        return self._fresh().get(key, default)

    def items(self) -> Any:
        """Return the entries."""
        return self._fresh().items()

    def values(self) -> Any:
        """Return the parameters."""
        return self._fresh().values()

    def keys(self) -> Any:
        """Return the names."""
        return self._watch.plain.keys()

    def pop(self, key: str, *default: Any) -> Any:
        """Take an entry out."""
        return self._fresh().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        """Take the last entry out."""
        return self._fresh().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return an entry, which is made if need be."""
        return self._fresh().setdefault(key, default)

    def update(self, *others: Any, **more: Any) -> None:
        """Add entries."""
        self._fresh().update(*others, **more)

    def clear(self) -> None:
        """Take all entries out."""
        self._fresh().clear()

    def copy(self) -> dict[str, Any]:
        """Return a plain dict."""
        return self._fresh().copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(self._fresh(), memo)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (dict(self._fresh()),)
