"""Reading and writing by tensors of positions: index, gather, index_select, scatter, index_add.

Dims that are not indexed may be sharded as long as all operands have them in full; the dims of the
positions may be sharded where the tensor is whole. A sharded dim that is indexed gives a pending
sum (`_masked`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._dispatch.call import Call, Localized, Rule, Shape, Strategy, normalize_dim
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import keyed, register, spellings
from .._spec import Spec
from .._tensor import TABLE, DTensor
from ..placements import P, R
from ._masked import adjacent, in_block, readable
from .pointwise import broadcast

_run = torch._C._disabled_torch_function_impl
_dtype = Tensor.dtype.__get__  # type: ignore[attr-defined]


class _Layout:
    """Where the dims of `x[index]` come from, for an index of full slices and tensors."""

    def __init__(self, shape: Shape, index: tuple[Any, ...], tensor_shapes: list[Shape]) -> None:
        self.dims = [d for d, i in enumerate(index) if isinstance(i, Tensor)]
        self.tensor_shapes = tensor_shapes
        self.block = broadcast(tensor_shapes)
        self.at = self.dims[0] if adjacent(self.dims) else 0
        kept = [d for d in range(len(shape)) if d not in self.dims]
        before, after = kept[: self.at], kept[self.at :]
        self.shape = (*[shape[d] for d in before], *self.block, *[shape[d] for d in after])
        self.place = {d: i for i, d in enumerate(before)} | {
            d: self.at + len(self.block) + i for i, d in enumerate(after)
        }

    def sharded_positions(self, b: int) -> list[int]:
        """Types of the position tensors if dim `b` of their common shape is sharded."""
        types = []
        for s in self.tensor_shapes:
            own = b - (len(self.block) - len(s))
            types.append(own if own >= 0 and s[own] == self.block[b] else R)
        return types


def index_rule(call: Call) -> Rule:
    """`x[index]` for an index of full slices and tensors."""
    index = call.args[1]
    layout = _Layout(call.shape, index, [s.shape for s in call.specs[1:]])
    n = len(call.specs) - 1
    strategies = [Strategy((d, *(R,) * n), (b,)) for d, b in layout.place.items()]
    strategies += [Strategy((R, *layout.sharded_positions(b)), (layout.at + b,)) for b in range(len(layout.block))]
    strategies.append(Strategy((P, *(R,) * n), (P,)))
    if call.operands[0].dtype is not torch.bool:
        strategies += [Strategy((d, *(R,) * n), (P,), block=True) for d in layout.dims]

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        masked = [d for d in layout.dims if d in ins[0].sharded]
        if not masked:
            return None

        def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, index = args[0], list(args[1])
            outside = None
            for d in masked:
                x = readable(x, d)
                index[d], inside = in_block(index[d], ins[0], d, negative=True)
                outside = ~inside if outside is None else outside | ~inside
            r = x[tuple(index)]
            assert outside is not None
            return r.masked_fill(outside.reshape((*outside.shape, *(1,) * (r.ndim - layout.at - len(layout.block)))), 0)

        return local

    return Rule([layout.shape], strategies, localize, uniform=True)


def index_put_rule(call: Call) -> Rule | None:
    """`index_put(indices, values, accumulate)`."""
    indices = tuple(call.arg(1, "indices"))
    tensors = [i for i in indices if i is not None]
    if not tensors or len(call.specs) != len(tensors) + 2 or any(i.dtype in (torch.bool, torch.uint8) for i in tensors):
        return None
    index = tuple(slice(None) if i is None else i for i in indices)
    layout = _Layout(call.shape, index, [s.shape for s in call.specs[1:-1]])
    value, n = call.specs[-1], len(tensors)
    if call.operands[-1] is not call.arg(2, "values") or value.ndim > len(layout.shape):
        return None

    def of_value(b: int) -> int:
        own = b - (len(layout.shape) - value.ndim)
        return own if own >= 0 and value.shape[own] == layout.shape[b] else R

    strategies = [Strategy((d, *(R,) * n, of_value(b)), (d,)) for d, b in layout.place.items()]
    strategies += [Strategy((d, *(R,) * n, R), (d,), block=True) for d in layout.dims]
    strategies.append(Strategy((P, *(R,) * n, P), (P,)))

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        masked = [d for d in layout.dims if d in ins[0].sharded]
        if not masked:
            return None
        shape = [*layout.shape]
        for d, b in layout.place.items():
            if d in ins[0].sharded:
                shape[b] = ins[0].local_shape[d]
        return _masked_put(ins[0], layout, masked, shape)

    return Rule([tuple(call.shape)], strategies, localize, uniform=True)


def _masked_put(spec: Spec, layout: _Layout, masked: list[int], shape: list[int]) -> Localized:
    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, indices, values, *rest = (*args, *[kwargs[k] for k in ("indices", "values", "accumulate") if k in kwargs])
        indices = list(indices)
        inside = None
        for d in masked:
            indices[d], here = in_block(indices[d], spec, d, negative=True)
            inside = here if inside is None else inside & here
        assert inside is not None
        chosen = inside.expand(layout.block).nonzero(as_tuple=True)
        width = len(layout.block)
        block_first = values.expand(shape).movedim(tuple(range(layout.at, layout.at + width)), tuple(range(width)))
        picked = block_first[chosen].movedim(0, layout.at) if width else block_first.expand(len(chosen), *shape)
        indices = [None if i is None else i.expand(layout.block)[chosen] for i in indices]
        return func(x, tuple(indices), picked, *rest)

    return local if layout.block else None


def _roles(call: Call, names: str) -> list[str]:
    """What each operand is, by its position or keyword."""
    order = names.split()
    return [p[0] if isinstance(p[0], str) else order[p[0]] for p in call.paths]


def _types(roles: list[str], **of: int) -> tuple[int, ...]:
    return tuple(of.get(r, R) for r in roles)


def _masked_read(call: Call, dim: int, function: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Localize a function that reads by positions along `dim`; where `dim` is sharded the results add up."""

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        if dim not in ins[0].sharded:
            return None

        def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, positions = [*args, *kwargs.values()][0], _find(args, kwargs, 2, "index")
            here, inside = in_block(positions, ins[0], dim, negative=False)
            r = function(readable(x, dim), here)
            return r.masked_fill(~inside.reshape(_aligned(inside, r, dim)), 0)

        return local

    return localize


def _find(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if position < len(args) else kwargs[name]


def _aligned(inside: Tensor, r: Tensor, dim: int) -> tuple[int, ...]:
    if inside.ndim == r.ndim:
        return tuple(inside.shape)
    return tuple(inside.numel() if d == dim else 1 for d in range(r.ndim))


def gather_rule(call: Call) -> Rule | None:
    """`gather(dim, index)`."""
    roles = _roles(call, "input dim index")
    if roles != ["input", "index"] or not call.ndim or call.specs[1].ndim != call.ndim:
        return None
    dim = normalize_dim(call.arg(1, "dim"), call.ndim)
    x, index = call.specs
    strategies = [Strategy((d, d), (d,)) for d in range(x.ndim) if d != dim and x.shape[d] == index.shape[d]]
    strategies += [Strategy((R, dim), (dim,)), Strategy((P, R), (P,)), Strategy((dim, R), (P,))]
    return Rule([tuple(index.shape)], strategies, _masked_read(call, dim, lambda x, i: x.gather(dim, i)))


def index_select_rule(call: Call) -> Rule | None:
    """`index_select(dim, index)`."""
    if _roles(call, "input dim index") != ["input", "index"] or not call.ndim or call.specs[1].ndim > 1:
        return None
    dim, index = normalize_dim(call.arg(1, "dim"), call.ndim), call.specs[1]
    shape = (*call.shape[:dim], index.numel, *call.shape[dim + 1 :])
    strategies = [Strategy((d, R), (d,)) for d in range(call.ndim) if d != dim]
    strategies += [Strategy((R, 0), (dim,))] if index.ndim else []
    strategies += [Strategy((P, R), (P,)), Strategy((dim, R), (P,))]
    return Rule([shape], strategies, _masked_read(call, dim, lambda x, i: x.index_select(dim, i)))


def _reading(rule: Any) -> Callable[..., Any]:
    """Handler of a function that may give a pending sum; truth values cannot be summed."""
    by_rule = keyed_handler(rule, gather_fallback)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else kwargs.get("input")
        if (
            x.__class__ is DTensor
            and x._spec.sharded
            and _run(_dtype, (), (x,), {}) is torch.bool
            and kwargs.get("out") is None
        ):
            return (
                by_rule(func, (x.to(torch.uint8), *args[1:]), kwargs).to(torch.bool)
                if args
                else gather_fallback(func, args, kwargs)
            )
        return by_rule(func, args, kwargs)

    return handler


for _name, _rule in (("gather", gather_rule), ("index_select", index_select_rule)):
    for _func in spellings(_name):
        TABLE[_func] = _reading(_rule)


def take_along_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`take_along_dim(indices, dim)`: `gather` after broadcasting the other dims."""
    bound = dict(zip(("input", "indices", "dim"), args, strict=False)) | kwargs
    x, indices, dim = bound["input"], bound["indices"], bound.get("dim")
    if not isinstance(x, DTensor) or not isinstance(indices, DTensor) or (dim is not None and x.ndim != indices.ndim):
        return gather_fallback(func, args, kwargs)
    if dim is None:
        x, indices, dim = x.reshape(-1), indices.reshape(-1), 0
    dim = normalize_dim(dim, x.ndim)
    rest = broadcast([tuple(1 if d == dim else n for d, n in enumerate(t.shape)) for t in (x, indices)])
    x = x.expand([x.shape[d] if d == dim else n for d, n in enumerate(rest)])
    indices = torch.where(indices < 0, indices + x.shape[dim], indices)
    indices = indices.expand([indices.shape[d] if d == dim else n for d, n in enumerate(rest)])
    out = {"out": kwargs["out"]} if kwargs.get("out") is not None else {}
    return torch.gather(x, dim, indices, **out)


register("take_along_dim", take_along_dim)

# ------------------------------------------------------------------ scatter, index_add, index_copy, index_fill


def scatter_rule(call: Call) -> Rule | None:
    """`scatter(dim, index, src or value)`, `scatter_add`, `scatter_reduce`."""
    name = call.name.removesuffix("_")
    roles = _roles(call, "input dim index src")
    roles = ["src" if r == "value" else r for r in roles]
    if (
        roles[:2] != ["input", "index"]
        or len(roles) > 3
        or not call.ndim
        or any(s.ndim not in (0, call.ndim) for s in call.specs)
    ):
        return None
    dim, x, index = normalize_dim(call.arg(1, "dim"), call.ndim), call.specs[0], call.specs[1]
    src = call.specs[2] if len(roles) == 3 else None
    number = src is None or src.ndim == 0
    if index.ndim != x.ndim:
        return None
    same = [
        d
        for d in range(x.ndim)
        if d != dim and index.shape[d] == x.shape[d] and (number or src is None or src.shape[d] == index.shape[d])
    ]
    strategies = [Strategy((d, d) if src is None else (d, d, R if number else d), (d,)) for d in same]
    plain = name == "scatter" and call.arg(4, "reduce") is None
    if src is not None and not number and (plain or name == "scatter_add"):
        strategies.append(Strategy((P, R, P), (P,)))
        if name == "scatter_add":
            if src.shape[dim] == index.shape[dim]:
                strategies.append(Strategy((P, dim, dim), (P,)))
            if tuple(src.shape) == tuple(index.shape):
                strategies.append(Strategy((dim, R, R), (dim,)))
    return Rule([tuple(x.shape)], strategies, _masked_add(dim) if name == "scatter_add" else None)


def _masked_add(dim: int) -> Any:
    """Localize `scatter_add` along a sharded dim: what falls into other blocks is added as zero."""

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        if dim not in ins[0].sharded:
            return None

        def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, _, positions, src = (*args, *kwargs.values()) if len(args) + len(kwargs) == 4 else args
            here, inside = in_block(positions, ins[0], dim, negative=False)
            if not x.shape[dim]:  # an empty block: nothing to add, but the result depends on src
                return func(x, dim, here[:0] if here.ndim else here, src.narrow(0, 0, 0))
            return func(x, dim, here, src.masked_fill(~inside, 0))

        return local

    return localize


def index_write_rule(call: Call) -> Rule | None:
    """`index_add`, `index_copy`, `index_fill`, `index_reduce` along a dim."""
    name = call.name.removesuffix("_")
    roles = ["source" if r in ("value", "tensor2") else r for r in _roles(call, "input dim index source reduce")]
    if roles[:2] != ["input", "index"] or len(roles) > 3 or not call.ndim:
        return None
    dim, x = normalize_dim(call.arg(1, "dim"), call.ndim), call.specs[0]
    source = call.specs[2] if len(roles) == 3 else None
    if source is not None and source.ndim not in (0, x.ndim):
        return None
    same = [d for d in range(x.ndim) if d != dim and (not source or source.ndim == 0 or source.shape[d] == x.shape[d])]
    strategies = [Strategy((d, R) if not source else (d, R, d if source.ndim else R), (d,)) for d in same]
    if source is not None and source.ndim and name in ("index_add", "index_copy"):
        strategies.append(Strategy((P, R, P), (P,)))
        if name == "index_add" and call.specs[1].ndim:
            strategies.append(Strategy((P, 0, dim), (P,)))
    return Rule([tuple(x.shape)], strategies)


keyed("scatter scatter_add scatter_reduce", scatter_rule)
keyed("index_add index_copy index_fill index_reduce", index_write_rule)
keyed("index_put", index_put_rule)
