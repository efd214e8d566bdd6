"""`init_`: run any of `torch.nn.init`'s functions on the local part of a whole tensor.

The function is given a stand-in of the whole tensor's shape, whose random and elementwise in-place operators act on the
local part. What a stand-in cannot do (a value is needed, a matrix is factored) runs on the whole tensor instead, drawn
anew from where the generator was, and the part is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._choose import PartLike, choose_part
from ._draw.fill import fill, take
from ._draw.forms import CLOSED_FORM
from ._draw.keep import keep
from ._layout import Part

__all__ = ["init_"]

aten = torch.ops.aten
_run = torch._C._disabled_torch_function_impl
_ELEMENTWISE = frozenset(
    {
        "add_", "sub_", "mul_", "div_", "pow_", "neg_", "abs_", "exp_", "log_", "sqrt_", "clamp_", "clamp_min_",
        "clamp_max_", "erfinv_", "fill_", "zero_", "round_", "floor_", "sign_",
    }
)  # fmt: skip
"""In-place operators whose result for an element depends on that element alone."""


class _NeedsWholeError(Exception):
    """The function asked for something that a part cannot give."""


class _StandIn(Tensor):
    """A tensor of the whole shape without storage; what acts on it elementwise acts on the local part."""

    local: Tensor
    part: Part

    @staticmethod
    def __new__(cls, local: Tensor, part: Part) -> _StandIn:
        self: _StandIn = Tensor._make_wrapper_subclass(
            cls, part.global_shape, part.global_stride, dtype=local.dtype, device=local.device
        )
        self.local, self.part = local, part
        return self

    __torch_function__ = _run  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        target, rest = args[0], args[1:]
        if not isinstance(target, _StandIn) or any(isinstance(a, Tensor) for a in rest):
            raise _NeedsWholeError(name)
        if name == "detach":
            return _StandIn(target.local, target.part)
        if name.endswith("_") and name in CLOSED_FORM:
            fill(name, target.local, target.part, rest, kwargs)
        elif name in _ELEMENTWISE:
            func(target.local, *rest, **(kwargs or {}))
        else:
            raise _NeedsWholeError(name)
        return target


def init_(
    function: Callable[..., Any],
    local: Tensor,
    shape: Sequence[int],
    *args: Any,
    part: PartLike = None,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> Tensor:
    """Initialize a local tensor in place with its elements of what an init function gives the whole tensor.

    Fans, gains and bounds follow from the whole shape. The uniform and normal kinds cost the local elements;
    `trunc_normal_`, `orthogonal_`, `sparse_` and functions of your own that read values run on the whole tensor on
    every rank, after a first try on the part: what such a function does beside filling the tensor happens twice.

    Args:
        function: from `torch.nn.init`, or any function that fills the tensor that it gets first, in place.
        local: overwritten; leaves that require gradients are allowed. On the meta device nothing happens.
        shape: of the whole tensor.
        *args: further arguments of the function.
        part: as for `draw`.
        mesh: as for `draw`.
        placements: as for `draw`.
        stride: strides of the whole tensor; contiguous by default.
        generator: handed to the function, if given.
        **kwargs: further named arguments of the function.

    Returns:
        `local`.

    >>> import torch.nn.init as init
    >>> _ = torch.manual_seed(0)
    >>> whole = init.kaiming_uniform_(torch.empty(6, 8))
    >>> _ = torch.manual_seed(0)
    >>> mine = init_(init.kaiming_uniform_, torch.empty(2, 8), (6, 8), part=(slice(4, 6), slice(0, 8)))
    >>> torch.equal(mine, whole[4:6])
    True
    """
    held = choose_part(tuple(shape), part, mesh, placements, stride)
    if generator is not None:
        kwargs["generator"] = generator
    if local.is_meta:
        return local
    # The default generator also where another is given: `sparse_` takes its permutations from it all the same.
    go_back = keep(local.device, generator)
    try:
        with torch.no_grad():
            try:
                function(_StandIn(local.detach(), held), *args, **kwargs)
            except _NeedsWholeError:
                go_back()
                whole = torch.empty_strided(
                    held.global_shape, held.global_stride, dtype=local.dtype, device=local.device
                )
                function(whole, *args, **kwargs)
                take(whole, local.detach(), held)
    except BaseException:
        go_back()
        raise
    return local
