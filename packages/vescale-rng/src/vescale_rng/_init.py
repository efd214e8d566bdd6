"""`init_`: run any of `torch.nn.init`'s functions on the local part of a whole tensor.

The function is given a stand-in of the whole tensor's shape, whose random and elementwise in-place operators act on the
local part. What a stand-in cannot do (a value is needed, a matrix is factored) runs on the whole tensor instead, drawn
anew from where the generator was, and the part is kept. Of that tensor's old values only the part's are known.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.utils._pytree import tree_iter

from ._choose import PartLike, check_local, choose_part
from ._cuda.emulate import EmulatedGenerator, emulate_cuda
from ._draw.fill import fill, put, take
from ._draw.forms import CLOSED_FORM
from ._draw.keep import keep
from ._draw.mode import active_sampler, is_default
from ._draw.unseen import unseen
from ._layout import Part
from ._portable import PortableGenerator, portable
from .errors import RandomError

__all__ = ["init_"]

_run = torch._C._disabled_torch_function_impl
_ELEMENTWISE = frozenset(
    {
        "add_", "sub_", "mul_", "div_", "pow_", "neg_", "abs_", "exp_", "log_", "sqrt_", "clamp_", "clamp_min_",
        "clamp_max_", "erfinv_", "fill_", "zero_", "round_", "floor_", "sign_",
    }
)  # fmt: skip
"""In-place operators whose result for an element depends on that element alone."""


_FINISH = frozenset(
    {
        init.uniform_, init.normal_, init.constant_, init.ones_, init.zeros_, init.xavier_uniform_,
        init.xavier_normal_, init.kaiming_uniform_, init.kaiming_normal_,
    }
)  # fmt: skip
"""Functions that do all of their work in one step on the part, so that nothing need be kept to go back to."""


class _NeedsWholeError(Exception):
    """The function asked for something that a part cannot give."""


class _Held:
    """The local tensor that stand-ins write to, and what it held before."""

    def __init__(self, local: Tensor, part: Part, function: Callable[..., Any]) -> None:
        self.local, self.part = local, part
        self.needs_whole = False
        """Also true if the function caught the error that told it so."""
        self._keeps = function not in _FINISH
        self._before: Tensor | None = None

    def to_write(self) -> Tensor:
        if self._keeps and self._before is None:
            self._before = self.local.clone()
        return self.local

    def go_back(self) -> None:
        if self._before is not None:
            self.local.copy_(self._before)


class _StandIn(Tensor):
    """A tensor of the whole shape without storage; what acts on it elementwise acts on the local part."""

    held: _Held

    @staticmethod
    def __new__(cls, held: _Held) -> _StandIn:
        local, part = held.local, held.part
        self: _StandIn = Tensor._make_wrapper_subclass(
            cls, part.global_shape, part.global_stride, dtype=local.dtype, device=local.device
        )
        self.held = held
        return self

    __torch_function__ = _run  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        target, rest = args[0] if args else None, args[1:]
        if isinstance(target, _StandIn) and not any(isinstance(a, Tensor) for a in rest):
            held = target.held
            if name == "detach":
                return _StandIn(held)
            if name.endswith("_") and name in CLOSED_FORM:
                fill(name, held.to_write(), held.part, rest, kwargs)
                return target
            if name in _ELEMENTWISE:
                func(held.to_write(), *rest, **(kwargs or {}))
                return target
        for value in tree_iter((args, kwargs)):
            if isinstance(value, _StandIn):
                value.held.needs_whole = True
        raise _NeedsWholeError(name)


@unseen
def init_(
    function: Callable[..., Any],
    local: Tensor,
    shape: Sequence[int],
    *args: Any,
    part: PartLike = None,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
    generator: Any = None,
    **kwargs: Any,
) -> Tensor:
    """Initialize a local tensor in place with its elements of what an init function gives the whole tensor.

    Fans, gains and bounds follow from the whole shape. The uniform and normal kinds cost the local elements;
    `trunc_normal_`, `orthogonal_`, `sparse_` and functions of your own that read values run on the whole tensor on
    every rank, after a first try on the part: what such a function does beside filling the tensor happens two or three
    times. What its tensor held before may only go where it was (`t.mul_(0.5)`, `t.add_(noise)`, `t[4:] = 0`). If it
    raises an error, `local` and the generators stay as they were.

    Args:
        function: from `torch.nn.init`, or any function that fills the tensor that it gets first, in place.
        local: overwritten; leaves that require gradients are allowed. On the meta device nothing happens.
        shape: of the whole tensor.
        *args: further arguments of the function.
        part: as for `draw`.
        mesh: as for `draw`.
        placements: as for `draw`.
        stride: strides of the whole tensor; contiguous by default.
        generator: a `torch.Generator` is handed to the function; one of `portable` or `emulate_cuda` draws all that the
            function draws, as within such a block.
        **kwargs: further named arguments of the function.

    Returns:
        `local`.

    Raises:
        RandomError: if what belongs to the part depends on old values of elements outside of it, or the function gives
            its tensor another shape or dtype.

    >>> import torch.nn.init as init
    >>> _ = torch.manual_seed(0)
    >>> whole = init.kaiming_uniform_(torch.empty(6, 8))
    >>> _ = torch.manual_seed(0)
    >>> mine = init_(init.kaiming_uniform_, torch.empty(2, 8), (6, 8), part=(slice(4, 6), slice(0, 8)))
    >>> torch.equal(mine, whole[4:6])
    True
    """
    if not callable(function):
        raise TypeError(f"function: expected one of torch.nn.init, or your own, got {function!r}")
    check_local(local)
    chosen = choose_part(shape, part, mesh, placements, stride)
    if local.is_meta:
        return local
    with _drawing_from(generator) as handed_on, torch.no_grad():
        if handed_on is not None:
            kwargs["generator"] = handed_on
        held = _Held(local.detach(), chosen, function)
        # The default generator also where another is given: `sparse_` takes its permutations from it all the same.
        go_back = keep(local.device, handed_on)
        try:
            if not _on_part(function, held, args, kwargs):
                go_back()
                held.go_back()
                _on_whole(function, held, go_back, args, kwargs)
        except BaseException:
            go_back()
            held.go_back()
            raise
    return local


@contextlib.contextmanager
def _drawing_from(generator: Any) -> Iterator[torch.Generator | None]:
    """Let a sampler draw all that torch draws; yields what to hand on to the function."""
    if isinstance(generator, PortableGenerator):
        with portable(generator):
            yield None
    elif isinstance(generator, EmulatedGenerator):
        with emulate_cuda(generator):
            yield None
    elif generator is None or isinstance(generator, torch.Generator):
        yield None if active_sampler() is not None and is_default(generator) else generator
    else:
        raise TypeError(
            "generator: expected a torch.Generator, a PortableGenerator or an EmulatedGenerator, got "
            f"{generator!r} ({type(generator).__name__})"
        )


def _on_part(function: Callable[..., Any], held: _Held, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run the function on a stand-in; tell whether that was enough."""
    target = _StandIn(held)
    try:
        function(target, *args, **kwargs)
    except RandomError:
        raise
    except RuntimeError:  # also what torch refuses to subclasses without asking them, such as `numpy`
        return False
    except Exception:
        if held.needs_whole:  # whatever the function made of the error
            return False
        raise
    # `t.data = other` gives the stand-in a storage: torch tells nobody.
    return not held.needs_whole and target.data_ptr() == 0


def _on_whole(
    function: Callable[..., Any],
    held: _Held,
    go_back: Callable[[], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run the function on the whole tensor, in which other ranks' old values are unknown, and keep our elements.

    Unknown values are NaN, which spreads to whatever is computed from them; whether a NaN is the function's own is told
    by a second run with zeros. Types without NaN always have a second run, since no number of theirs spreads so.
    """
    local, part = held.local, held.part

    def run(unknown: Any) -> Tensor:
        whole = torch.empty_strided(part.global_shape, part.global_stride, dtype=local.dtype, device=local.device)
        if not part.is_whole:
            whole.fill_(unknown)
        put(local, whole, part)
        function(whole, *args, **kwargs)
        if whole.shape != part.global_shape or whole.dtype != local.dtype:
            raise RandomError(
                f"function: it made a {whole.dtype} tensor of shape {tuple(whole.shape)} of the {local.dtype} tensor "
                f"of shape {part.global_shape} that it got; init_ runs functions that fill their tensor in place"
            )
        mine = torch.empty_like(local)
        take(whole, mine, part)
        return mine

    no_nan = not (local.is_floating_point() or local.is_complex())
    mine = run(0 if no_nan else math.nan)
    if not part.is_whole and (no_nan or bool((_nan(mine) & ~_nan(local)).any())):
        go_back()
        again = run(_largest(local.dtype) if no_nan else 0)
        if not bool(((mine == again) | (_nan(mine) & _nan(again))).all()):
            raise RandomError(
                "function: what it makes of this rank's elements depends on what the elements of other ranks held "
                "before, which is not known here; init_ runs functions that fill the tensor before they read it"
            )
    local.copy_(mine)


def _nan(values: Tensor) -> Tensor:
    return values != values  # of any dtype


def _largest(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else torch.iinfo(dtype).max
