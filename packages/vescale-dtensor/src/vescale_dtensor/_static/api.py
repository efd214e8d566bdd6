"""`static` and `static_eager`: which modules and functions run recorded programs, and how these are made."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .._tensor import DTensor
from .passes import PASSES, Settings
from .region import Region

__all__ = ["Granularity", "static", "static_eager"]

Granularity = str | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]
"""Which modules become regions: "module", "layers", classes, or a function of name and module."""


def static(
    module_or_function: Any,
    *,
    granularity: Granularity = "module",
    modules: Sequence[nn.Module] = (),
    limit: int = 16,
    passes: Sequence[str] | None = None,
    exact: bool = True,
    compile: bool | str = False,
) -> Any:
    """Record what a module or function does on local tensors, and repeat it without deciding anything again.

    The first two calls with a signature (layouts, shapes, dtypes and `requires_grad` of tensors, plain values, train
    or eval, modes of torch) run dynamically and are recorded; later ones run the program. Where a call cannot be
    repeated blindly, it stays dynamic, and a warning says why: values of tensors that Python reads, attributes of
    modules that are assigned, hooks on modules inside, tensors from elsewhere.

    Args:
        module_or_function: a module, whose `forward` is replaced in place, or a function.
        granularity: what of a module is recorded as one: "module", all of it; "layers", each member of its outermost
            lists and sequences of modules; or the outermost submodules of a class, or of which a function of name and
            module says so. Around smaller regions Python may do what it likes.
        modules: for a function, the modules that it uses; those that it refers to are found.
        limit: how many signatures are recorded; others stay dynamic.
        passes: what may be done about the communications of a program, all by default: "reuse" leaves out moves that
            were made before, "bucket" sends the gradients of parameters together, "overlap" begins moves early and
            waits for them late, "buffers" keeps the memory of messages between steps.
        exact: keep the bits of the dynamic path. With False, passes may also add the numbers of more than two ranks
            in another order, which saves exchanges.
        compile: True hands programs to `torch.compile` as one graph each, in their first call; a string names another
            backend than "inductor". Results then equal those of the dynamic path up to the rounding of the compiler;
            random numbers are the same. "overlap" and "buffers" are left out.

    Returns:
        The module, or a function in place of the one that was given. Both have `static_code()`, which returns the
        programs as Python.

    Raises:
        TypeError: neither a module nor a function.
        ValueError: a pass or a backend that there is not, or a granularity that no submodule has.
        DTensorError: in the first compiled call, where the machine lacks a compiler, or cannot compile the program.

    >>> import torch
    >>> double = static(lambda x: x + x)
    >>> [int(double(torch.tensor(n))) for n in range(3)]
    [0, 2, 4]
    >>> print(double.static_code())
    # <lambda>, signature 0
    def program(x0):
        t0 = add(x0, x0)
        return (t0, )
    """
    settings = _settings(passes, exact, compile)
    if isinstance(module_or_function, nn.Module):
        module = module_or_function
        for part in _parts(module, granularity):
            _make_static(part, limit, settings)
        module.static_code = functools.partial(_code, module)  # type: ignore[assignment]
        return module
    if not callable(module_or_function):
        raise TypeError(f"module_or_function: expected a module or a function, got {type(module_or_function).__name__}")
    if granularity != "module":
        raise ValueError(f"granularity: {granularity!r} is for modules; a function is recorded as a whole")
    name = getattr(module_or_function, "__qualname__", type(module_or_function).__name__).rpartition("<locals>.")[2]
    region = Region(module_or_function, [*modules, *_modules_of(module_or_function)], name, limit, settings)
    region.static_code = region.code  # type: ignore[attr-defined]
    return region


class static_eager:
    """Context manager in which modules of DTensors run recorded programs, without being told one by one.

    A module that is called from outside of all others becomes static, as by `static`, after its first call in the
    block; at the end of the block it is as it was.

    Args:
        granularity: see `static`; modules without such parts are recorded as a whole.
        limit: see `static`.
        passes: see `static`.
        exact: see `static`.
        compile: see `static`.

    Raises:
        ValueError: a pass or a backend that there is not.

    ::

        with static_eager():
            for batch in batches:
                model(batch).backward()
    """

    def __init__(
        self,
        *,
        granularity: Granularity = "module",
        limit: int = 16,
        passes: Sequence[str] | None = None,
        exact: bool = True,
        compile: bool | str = False,
    ) -> None:
        self._granularity, self._limit = granularity, limit
        self._settings = functools.partial(_settings, passes, exact, compile)
        self._settings()
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._made: list[tuple[weakref.ref[nn.Module], Any]] = []
        """Modules that were made static, and a `forward` of their own that they had."""
        self._handle: Any = None

    def __enter__(self) -> static_eager:
        if self._handle is not None:
            raise RuntimeError("static_eager: this one is entered already; make another one")
        self._handle = register_module_forward_pre_hook(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()
        self._handle = None
        for reference, own in self._made:
            module = reference()
            if module is None or not isinstance(module.__dict__.get("forward"), Region):
                continue
            del module.__dict__["forward"], module.__dict__["static_code"]
            if own is not None:
                module.forward = own
        self._made.clear()
        self._seen = weakref.WeakSet()

    def _called(self, module: nn.Module, args: Any) -> None:
        """Before a module runs, see whether it is one to make static from its next call on."""
        if module in self._seen:
            return
        inside = list(module.modules())
        self._seen.update(inside)
        static_already = any(isinstance(m.forward, Region) for m in inside)
        if static_already or not any(isinstance(p, DTensor) for p in module.parameters()):
            return
        try:
            parts = _parts(module, self._granularity)
        except ValueError:  # it has none of that kind
            parts = [module]
        for part in parts:
            self._made.append((weakref.ref(part), part.__dict__.get("forward")))
            _make_static(part, self._limit, self._settings())
            part.static_code = functools.partial(_code, part)  # type: ignore[assignment]


def _settings(passes: Sequence[str] | None, exact: bool, compile: bool | str) -> Settings:
    unknown = [name for name in passes or () if name not in PASSES]
    if unknown or isinstance(passes, str):
        raise ValueError(f"passes: expected some of {tuple(PASSES)}, got {passes!r}")
    chosen = tuple(PASSES) if passes is None else tuple(passes)
    if not compile:
        return Settings(chosen, exact)
    from .compile import backend_of, possible

    return Settings(possible(chosen), exact, backend=backend_of(compile))


def _make_static(module: nn.Module, limit: int, settings: Settings) -> None:
    if isinstance(module.forward, Region):
        raise TypeError(f"module_or_function: {type(module).__name__} is static already")
    module.forward = Region(module.forward, [module], type(module).__name__, limit, settings)


def _code(module: nn.Module) -> str:
    """Return the programs of a module and of the modules inside, as Python, with what they are for."""
    parts = [(name, m.forward) for name, m in module.named_modules() if isinstance(m.forward, Region)]
    return "\n\n".join(f"# {name}\n{region.code()}" if name else region.code() for name, region in parts)


def _parts(module: nn.Module, granularity: Granularity) -> list[nn.Module]:
    """Return the modules that become regions, none inside of another.

    Raises:
        ValueError: there are none, or the granularity is none.
    """
    if granularity == "module":
        return [module]
    wanted = _test_of(granularity)
    parts: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for name, part in module.named_modules():
        if part not in inside and wanted(name, part):
            found = list(part.children()) if granularity == "layers" else [part]
            parts += found
            inside.update(part.modules())
    if not parts:
        raise ValueError(f"granularity: no submodule of {type(module).__name__} fits {granularity!r}")
    return parts


def _test_of(granularity: Granularity) -> Callable[[str, nn.Module], bool]:
    if granularity == "layers":
        return lambda name, module: isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0
    if isinstance(granularity, type) or (
        isinstance(granularity, tuple) and all(isinstance(cls, type) for cls in granularity)
    ):
        classes = granularity
        return lambda name, module: isinstance(module, classes)
    if callable(granularity):
        return granularity
    raise ValueError(
        f'granularity: expected "module", "layers", classes of modules, or a function of name and module; '
        f"got {granularity!r}"
    )


def _modules_of(function: Any) -> list[nn.Module]:
    """Find the modules that a function refers to: by its closure, its defaults, its globals, or as its owner."""
    found = [getattr(function, "__self__", None)]
    try:
        variables = inspect.getclosurevars(function)
        found += [*variables.nonlocals.values(), *variables.globals.values()]
    except TypeError:
        found += list(vars(function).values()) if hasattr(function, "__dict__") else []
    if isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values(), *_modules_of(function.func)]
    return [value for value in found if isinstance(value, nn.Module)]
