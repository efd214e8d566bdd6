"""`install`, `uninstall` and `single_device`: torch's own DTensor draws what one device would draw, and no longer.

What is put in: one handler per random operator in the dispatcher's table of handlers, and wrappers around a few
functions of `torch.distributed.tensor` and `torch.nn.init`. All of it is taken out again, each where it still is ours.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, overload

import torch

from .._blocks import Block
from ..errors import RandomError

__all__ = ["install", "installed", "single_device", "uninstall"]

_lock = threading.RLock()
_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


@dataclass(eq=False, frozen=True)
class _Level:
    """One `install`, or one block, that is in force."""

    check: bool
    of_block: bool = False


_levels: list[_Level] = []


@dataclass
class _Change:
    """What was changed, and what was there before."""

    handlers: dict[Any, Any]
    ours: dict[Any, Any] = field(default_factory=dict)
    before: dict[Any, Any] = field(default_factory=dict)
    functions: list[tuple[Any, str, Any, Any]] = field(default_factory=list)
    """Module, name, ours, the one before."""

    def put(self, module: Any, name: str, function: Any) -> None:
        self.functions.append((module, name, function, getattr(module, name)))
        setattr(module, name, function)

    def undo(self) -> None:
        for op, handler in self.ours.items():
            if self.handlers.get(op) is handler:  # else somebody put theirs in since, and it stays
                if op in self.before:
                    self.handlers[op] = self.before[op]
                else:
                    del self.handlers[op]
        for module, name, ours, before in self.functions:
            if getattr(module, name) is ours:
                setattr(module, name, before)


_change: _Change | None = None
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_PADDING = "_fill_padding_idx_with_zero"


def install(*, check: bool = True) -> None:
    """Make torch's own DTensor draw what one device would draw: values on all ranks, and the generators afterwards.

    From here on every random operator on a `torch.distributed.tensor.DTensor`, in this process, on CPU and CUDA meshes:
    dropout, `nn.init`, in-place ones, `torch.rand_like` and its kin, `torch.distributed.tensor.rand`. Seed all ranks
    alike with `torch.manual_seed`. Graphs that `torch.compile` made before keep torch's own numbers.

    An error in the numbers of one rank alone (a chance above 1, a negative deviation in its part of a tensor) is raised
    on that rank alone: to tell the others would take communication at each call.

    Calls are counted: as many `uninstall` take it out again.

    Args:
        check: compare the generators of all ranks at the first draw on each mesh (one small all-gather per mesh dim).

    Raises:
        RandomError: if this torch lacks something that is needed; nothing is changed then.

    Example:
        >>> install()
        >>> installed()
        True
        >>> uninstall()
    """
    _enter(_Level(check))


def uninstall() -> None:
    """Take back one `install`, or a `single_device` block if there is no other; then torch's DTensor draws as before.

    Raises:
        RandomError: if it is not installed.
    """
    with _lock:
        if not _levels:
            raise RandomError("vescale_rng is not installed: each uninstall() takes back one install()")
        _leave(next((level for level in reversed(_levels) if not level.of_block), _levels[-1]))


def _enter(level: _Level) -> None:
    global _change
    with _lock:
        if not _levels:
            _change = _put_in()
        _levels.append(level)
        _set_check()


def _leave(level: _Level) -> None:
    """Take a level out; nothing happens if it is not there any more."""
    global _change
    with _lock:
        if level not in _levels:
            return
        _levels.remove(level)
        if _levels:
            _set_check()
        elif _change is not None:
            change, _change = _change, None
            _take_out(change)


def installed() -> bool:
    """Tell whether torch's own DTensor draws what one device would draw."""
    return bool(_levels)


@overload
def single_device(*, check: bool = True) -> Block: ...
@overload
def single_device(function: Callable[_Params, _Result], /) -> Callable[_Params, _Result]: ...
def single_device(function: Callable[..., Any] | None = None, /, *, check: bool = True) -> Any:
    """`install` for a ``with`` block, or as a decorator for the calls of a function.

    Args:
        function: what `@single_device` decorates; `@single_device()` is the same.
        check: as for `install`.

    Raises:
        TypeError: if it decorates a generator or an async function, whose body runs after the call has returned.

    Example:
        >>> with single_device():
        ...     installed()
        True
        >>> @single_device()
        ... def step():
        ...     return installed()
        >>> step(), installed()
        (True, False)
    """
    block = Block("single_device", functools.partial(_in_force, check))
    return block if function is None else block(function)


@contextlib.contextmanager
def _in_force(check: bool) -> Iterator[None]:
    level = _Level(check, of_block=True)
    _enter(level)
    try:
        yield
    finally:
        _leave(level)  # unless an `uninstall` within the block did: that must not hide an error of the body


def _put_in() -> _Change:
    if not torch.distributed.is_available():
        raise RandomError("this torch is built without torch.distributed, so it has no DTensor to install for")
    import torch.distributed.tensor._api as api
    import torch.nn.init as init
    from torch.distributed.tensor import DTensor

    _need(DTensor, "_op_dispatcher", "DTensor")
    dispatcher = DTensor._op_dispatcher
    _need(dispatcher, "_custom_op_handlers", "DTensor._op_dispatcher")
    _need(torch.Tag, "nondeterministic_seeded", "torch.Tag")
    _need(torch._C, "_dispatch_get_all_op_names", "torch._C")
    _need(api, "_dtensor_init_helper", "torch.distributed.tensor._api")
    for name in ("_local_tensor", "_spec"):
        _need(DTensor, name, "DTensor")

    # These modules use more of torch than can be listed; what is missing shows when they are imported.
    try:
        from . import factories, pass_on, table
        from .init import WRAPPERS, with_padding_row
    except (ImportError, AttributeError) as missing:
        raise RandomError(f"{_torch()} lacks what vescale_rng needs to install: {missing}") from missing
    for name in pass_on.DISPATCHER_PARTS:
        _need(dispatcher, name, "DTensor._op_dispatcher")
    for name in WRAPPERS:
        _need(init, name, "torch.nn.init")
    for kind in _EMBEDDINGS:
        _need(kind, _PADDING, kind.__name__)

    change = _Change(dispatcher._custom_op_handlers)
    change.ours = table.handlers()
    change.before = {op: change.handlers[op] for op in change.ours if op in change.handlers}
    pass_on.previous.update(change.before)
    _forget()
    # In place, not by a new dict: context parallelism keeps a reference to this one and puts it back later.
    change.handlers.update(change.ours)
    change.put(api, "_dtensor_init_helper", factories.wrap_helper(api._dtensor_init_helper))
    for name, wrapper in WRAPPERS.items():
        change.put(init, name, wrapper(getattr(init, name)))
    for kind in _EMBEDDINGS:
        change.put(kind, _PADDING, with_padding_row(getattr(kind, _PADDING)))
    return change


def _take_out(change: _Change) -> None:
    from .pass_on import previous

    change.undo()
    previous.clear()
    _forget()


def _set_check() -> None:
    from .places import forget_places
    from .ready import set_check

    set_check(_levels[-1].check)
    forget_places()


def _forget() -> None:
    from .places import forget_places
    from .ready import forget_agreements

    forget_places()
    forget_agreements()


def _need(owner: Any, name: str, where: str) -> None:
    if not hasattr(owner, name):
        raise RandomError(
            f"{_torch()} has no {where}.{name}, which vescale_rng needs to install; nothing is installed. Versions "
            "2.11 to 2.14 are supported"
        )


def _torch() -> str:
    return f"torch {torch.__version__}"
