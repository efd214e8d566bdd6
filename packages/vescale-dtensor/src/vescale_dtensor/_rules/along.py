"""Functions that act along some dims, which must be whole, while all other dims may be sharded.

Cross products, integrals and differences along a dim, gated units, writing a slice, and their kin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._dispatch.call import Call, LocalFunction, Rule, Strategy, normalize_dim, normalize_dims
from .._dispatch.table import keyed
from .._spec import Spec
from ..placements import P, R
from ._batched import ordered, shapes_of, spared
from .pointwise import broadcast, elementwise_strategies
from .views import dim_map_rule

# ------------------------------------------------------------------ one tensor


def glu_rule(call: Call) -> Rule | None:
    """`glu(input, dim)`: halves of `dim` gate each other."""
    shapes = shapes_of(call) if len(call.specs) == 1 and call.ndim else None
    if shapes is None:
        return None
    dim = normalize_dim(call.arg(1, "dim", -1), call.ndim)
    return Rule(shapes, [Strategy((d,), (d,)) for d in range(call.ndim) if d != dim])


def renorm_rule(call: Call) -> Rule | None:
    """`renorm(p, dim, maxnorm)`: every slice along `dim` is scaled by itself."""
    dim = call.arg(2, "dim")
    if len(call.specs) != 1 or not isinstance(dim, int):
        return None
    dim = normalize_dim(dim, call.ndim)
    return Rule([tuple(call.shape)], [Strategy((dim,), (dim,))])


def diag_embed_rule(call: Call) -> Rule | None:
    """`diag_embed(input, offset, dim1, dim2)`: batch dims take the places that the diagonal's two dims leave."""
    shapes = shapes_of(call)
    if shapes is None or not call.ndim:
        return None
    taken = normalize_dims((call.arg(2, "dim1", -2), call.arg(3, "dim2", -1)), call.ndim + 1)
    rest = [d for d in range(call.ndim + 1) if d not in taken]
    return dim_map_rule(shapes[0], [(i, rest[i]) for i in range(call.ndim - 1)], view=False)


def as_real_rule(call: Call) -> Rule:
    """`view_as_real`: real and imaginary part become a last dim."""
    return dim_map_rule((*call.shape, 2), [(d, d) for d in range(call.ndim)])


def as_complex_rule(call: Call) -> Rule | None:
    """`view_as_complex`: the last dim, of length 2, goes."""
    if not call.ndim or call.shape[-1] != 2:
        return None
    return dim_map_rule(tuple(call.shape[:-1]), [(d, d) for d in range(call.ndim - 1)])


# ------------------------------------------------------------------ several tensors that lie alike


def _alike(call: Call, acted: Sequence[int], num: int) -> list[Strategy]:
    return [Strategy((d,) * num, (d,)) for d in range(call.ndim) if d not in acted]


def _linear(num: int) -> Strategy:
    return Strategy((P,) * num, (P,), exact=True)


def softmax_backward_rule(call: Call) -> Rule | None:
    """`_softmax_backward_data(grad, output, dim, dtype)` and that of `log_softmax`."""
    if len(call.specs) != 2 or not ordered(call):
        return None
    dim = normalize_dim(call.arg(2, "dim"), call.ndim)
    return Rule([tuple(call.shape)], _alike(call, (dim,), 2))


def slice_scatter_rule(call: Call) -> Rule | None:
    """`slice_scatter(input, src, dim, start, end, step)`: linear in both together."""
    if len(call.specs) != 2 or not ordered(call) or call.specs[1].ndim != call.ndim:
        return None
    dim = normalize_dim(call.arg(2, "dim", 0), call.ndim)
    return Rule([tuple(call.shape)], [*_alike(call, (dim,), 2), _linear(2)])


def select_scatter_rule(call: Call) -> Rule | None:
    """`select_scatter(input, src, dim, index)`: the source lacks the dim."""
    if len(call.specs) != 2 or not ordered(call) or call.specs[1].ndim != call.ndim - 1:
        return None
    dim = normalize_dim(call.arg(2, "dim"), call.ndim)
    strategies = [Strategy((d, d - (d > dim)), (d,)) for d in range(call.ndim) if d != dim]
    return Rule([tuple(call.shape)], [*strategies, _linear(2)])


def diagonal_scatter_rule(call: Call) -> Rule | None:
    """`diagonal_scatter(input, src, offset, dim1, dim2)`: the source has the other dims, then the diagonal."""
    if len(call.specs) != 2 or not ordered(call) or call.specs[1].ndim != call.ndim - 1:
        return None
    acted = normalize_dims((call.arg(3, "dim1", 0), call.arg(4, "dim2", 1)), call.ndim)
    kept = [d for d in range(call.ndim) if d not in acted]
    return Rule([tuple(call.shape)], [*[Strategy((d, i), (d,)) for i, d in enumerate(kept)], _linear(2)])


def unpool_rule(spatial: int) -> Callable[[Call], Rule | None]:
    """Rule of `max_unpool` of values and indices over the last dims."""

    def rule(call: Call) -> Rule | None:
        if len(call.specs) != 2 or not ordered(call) or call.specs[1].shape != call.shape:
            return None
        lead, size = call.ndim - spatial, tuple(call.arg(2, "output_size"))
        if lead < 1 or len(size) != spatial:
            return None
        strategies = [Strategy((d, d), (d,)) for d in range(lead)]
        return Rule([(*call.shape[:lead], *size)], strategies, lambda ins, outs: spared(call, ins, outs))

    return rule


# ------------------------------------------------------------------ tensors that broadcast


def cross_rule(call: Call) -> Rule | None:
    """`cross(input, other, dim)`: bilinear; without a dim `torch.cross` takes the first of length 3."""
    if len(call.specs) != 2:
        return None
    shapes = [s.shape for s in call.specs]
    if len(shapes[0]) != len(shapes[1]):
        return None
    dim = call.arg(2, "dim", -1 if call.func is torch.linalg.cross else None)
    if dim is None:
        dim = next((d for d, n in enumerate(shapes[0]) if n == 3), None)
    if dim is None:
        return None  # torch's own error
    out = broadcast(shapes)
    acted = normalize_dim(dim, len(out))
    strategies = [s for d, s in enumerate(elementwise_strategies(shapes, out)) if d != acted]
    strategies += [Strategy(ins, (P,), exact=True) for ins in ((P, R), (R, P))]

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction:
        """Name the dim: a part may have length 3 where the whole has not."""
        return lambda func, args, kwargs: torch.linalg.cross(*_first_two(args, kwargs), dim=acted)

    return Rule([out], strategies, localize)


def _first_two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    return args[0] if args else kwargs["input"], args[1] if len(args) > 1 else kwargs["other"]


def integral_rule(call: Call) -> Rule | None:
    """`trapezoid(y, x, dim)` and `cumulative_trapezoid`: linear in `y`; one `x` may serve all rows."""
    shapes = shapes_of(call) if call.ndim and ordered(call) else None
    if shapes is None or call.operands[0] is not call.arg(0, "y"):
        return None
    dim = normalize_dim(call.arg(3, "dim", call.kwargs.get("dim", -1)), call.ndim)
    points = call.specs[1:]
    if any(s.ndim not in (1, call.ndim) for s in points):
        return None
    kept, strategies = call.name.startswith("cumulative"), []
    for d in range(call.ndim):
        if d == dim or (points and points[0].ndim == call.ndim and call.shape[d] < points[0].shape[d]):
            continue
        own = [d if s.ndim == call.ndim and s.shape[d] == call.shape[d] else R for s in points]
        strategies.append(Strategy((d, *own), (d if kept or d < dim else d - 1,)))
    return Rule(shapes, [*strategies, Strategy((P, *(R,) * len(points)), (P,), exact=True)])


def gradient_rule(call: Call) -> Rule | None:
    """`torch.gradient(input, spacing, dim, edge_order)`: one linear result per dim; coordinates are whole."""
    if not call.ndim or call.operands[0] is not call.arg(0, "input"):
        return None
    dims = normalize_dims(call.kwargs.get("dim"), call.ndim)
    rest, num = (R,) * (len(call.specs) - 1), len(dims)
    strategies = [Strategy((d, *rest), (d,) * num) for d in range(call.ndim) if d not in dims]
    strategies.append(Strategy((P, *rest), (P,) * num, exact=True))
    return Rule([tuple(call.shape)] * num, strategies)


# ------------------------------------------------------------------ looking up


def isin_rule(call: Call) -> Rule | None:
    """`isin(elements, test_elements)`: every element is looked up by itself, in all of the others."""
    if len(call.specs) not in (1, 2) or not ordered(call) or call.operands[0] is not call.arg(0, "elements"):
        return None
    whole = (R,) * (len(call.specs) - 1)
    return Rule([tuple(call.shape)], [Strategy((d, *whole), (d,)) for d in range(call.ndim)])


def take_rule(call: Call) -> Rule | None:
    """`take(input, index)`: reads positions of the flattened input, which is whole."""
    if len(call.specs) != 2 or not ordered(call):
        return None
    index = call.specs[1]
    strategies = [Strategy((R, d), (d,)) for d in range(index.ndim)]
    return Rule([tuple(index.shape)], [*strategies, Strategy((P, R), (P,), exact=True)])


_RULES: list[tuple[str, Any]] = [
    ("glu", glu_rule),
    ("diag_embed", diag_embed_rule),
    ("view_as_real view_as_real_copy", as_real_rule),
    ("view_as_complex view_as_complex_copy", as_complex_rule),
    ("_softmax_backward_data _log_softmax_backward_data", softmax_backward_rule),
    ("slice_scatter", slice_scatter_rule),
    ("select_scatter", select_scatter_rule),
    ("diagonal_scatter", diagonal_scatter_rule),
    ("_nn.max_unpool2d", unpool_rule(2)),
    ("_nn.max_unpool3d", unpool_rule(3)),
    ("cross linalg.cross", cross_rule),
    ("trapezoid trapz cumulative_trapezoid", integral_rule),
    ("gradient", gradient_rule),
    ("isin", isin_rule),
    ("take", take_rule),
]
for _names, _rule in _RULES:
    keyed(_names, _rule, inplace=False)
keyed("renorm", renorm_rule)
