"""Cutting and joining: split, chunk, unbind, cat, stack, and what repeats, pads or turns along dims.

All are linear, and work on any dim but the one they act along. Cutting along a sharded dim goes
through the window moves of `_windows`, piece by piece.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.call import Call, Localized, Rule, Shape, Strategy, normalize_dim, normalize_dims
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import keyed, register, spellings
from .._spec import Spec
from .._tensor import TABLE, DTensor
from ..placements import P, R
from ._batched import spared
from ._blocks import cutting_strategies
from .views import copied, dim_map_rule, permuted_rule, rewrite, sizes_of, swapped

# ------------------------------------------------------------------ cutting


def _cut_rule(call: Call, dim: int, lengths: Sequence[int], *, keep: bool = True) -> Rule:
    """Rule of a function that gives one result per length, cut along `dim`."""
    shape, n = call.shape, len(lengths)
    shapes: list[Shape] = [
        (*shape[:dim], length, *shape[dim + 1 :]) if keep else (*shape[:dim], *shape[dim + 1 :]) for length in lengths
    ]
    strategies = [Strategy((d,), (d if keep or d < dim else d - 1,) * n) for d in range(len(shape)) if d != dim]
    strategies.append(Strategy((P,), (P,) * n, exact=True))
    if keep:
        strategies += cutting_strategies(call, dim, lengths)

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        if not (keep and ins[0].irregular):
            return None
        return rewrite(call, torch.split_with_sizes, [o.local_shape[dim] for o in outs], dim)

    return Rule(shapes, strategies, localize, view=True, uniform=True)


def split_lengths(size: int, how: Any) -> list[int]:
    """Lengths that `split` gives for a size or a list of sizes."""
    if isinstance(how, int):
        if how == 0 and size == 0:
            return [0]
        if how <= 0:
            raise RuntimeError(
                f"split expects split_size be {'non-negative' if how < 0 else 'positive'}, but got split_size={how}"
            )
        return [min(how, size - start) for start in range(0, max(size, 1), how)]
    lengths = list(sizes_of((how,)))
    if sum(lengths) != size or min(lengths, default=0) < 0:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {size}, but got split_sizes={lengths}"
        )
    return lengths


def chunk_lengths(size: int, chunks: int) -> list[int]:
    """Lengths that `chunk` gives."""
    if chunks <= 0:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    step = -(-size // chunks)
    return [0] * chunks if step == 0 else split_lengths(size, step)


def tensor_split_lengths(size: int, how: Any) -> list[int]:
    """Lengths that `tensor_split` gives for a number of sections or a list of indices."""
    if isinstance(how, int):
        if how <= 0:
            raise RuntimeError(f"number of sections must be larger than 0, got {how}")
        least, more = divmod(size, how)
        return [least + (i < more) for i in range(how)]
    bounds = [0, *how, size]
    starts = [min(max(b + size if b < 0 else b, 0), size) for b in bounds[:-1]]
    ends = [*[min(max(b + size if b < 0 else b, 0), size) for b in how], size]
    return [max(e - s, 0) for s, e in zip(starts, ends, strict=True)]


def _lengths(call: Call) -> tuple[int, list[int]] | None:
    """Dim and lengths of a call of a function that cuts; None for lengths inside tensors."""
    name = call.name.removesuffix("_copy")
    how = next((call.arg(1, k) for k in _HOW if call.arg(1, k) is not None), None)
    if isinstance(how, Tensor) or (isinstance(how, list | tuple) and any(isinstance(h, Tensor) for h in how)):
        return None
    if name in ("hsplit", "vsplit", "dsplit"):
        least = {"hsplit": 1, "vsplit": 2, "dsplit": 3}[name]
        if call.ndim < least:
            raise RuntimeError(f"torch.{name} requires a tensor with at least {least} dimension, but got {call.ndim}")
        dim = {"hsplit": min(1, call.ndim - 1), "vsplit": 0, "dsplit": 2}[name]
        if isinstance(how, int) and (how == 0 or call.shape[dim] % how):
            raise RuntimeError(
                f"torch.{name} attempted to split along dimension {dim}, but the size of the dimension "
                f"{call.shape[dim]} is not divisible by the split_size {how}!"
            )
        return dim, tensor_split_lengths(call.shape[dim], how)
    dim = call.arg(2, "dim", 0)
    if not isinstance(dim, int) or not call.ndim:
        return None
    dim = normalize_dim(dim, call.ndim)
    lengths: Callable[[int, Any], list[int]] = split_lengths
    if name == "tensor_split":
        lengths = tensor_split_lengths
    elif "chunk" in name:
        lengths = chunk_lengths
    return dim, lengths(call.shape[dim], how)


_HOW = ("split_size_or_sections", "split_size", "split_sizes", "chunks", "indices_or_sections", "sections", "indices")


def split_rule(call: Call) -> Rule | None:
    """`split`, `split_with_sizes`, `chunk`, `tensor_split`, `hsplit`, `vsplit`, `dsplit`."""
    found = _lengths(call)
    return None if found is None else _cut_rule(call, *found)


def unbind_rule(call: Call) -> Rule:
    """`unbind(dim)`."""
    if not call.ndim:
        raise RuntimeError("Dimension specified as 0 but tensor has no dimensions")
    dim = normalize_dim(call.arg(1, "dim", 0), call.ndim)
    return _cut_rule(call, dim, [1] * call.shape[dim], keep=False)


def _cutting(rule: Callable[[Call], Rule | None]) -> Callable[..., Any]:
    """Handler of a function that cuts: piece by piece where the dim is sharded, else by the rule."""
    by_rule = keyed_handler(rule, gather_fallback)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0] if args else next(iter(kwargs.values()))
        if x.__class__ is not DTensor or not x._spec.sharded or x._spec.irregular or kwargs.get("out") is not None:
            return by_rule(func, args, kwargs)
        return pieces(func, args, kwargs) or by_rule(func, args, kwargs)

    def pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = (func, args[0]._spec, *args[1:], *kwargs.items()) if args else None
        try:
            known = cuts.get(key)
        except TypeError:
            key, known = None, None
        if known is None:
            call = Call(func, args, kwargs)
            if rule is unbind_rule:
                dim = normalize_dim(call.arg(1, "dim", 0), call.ndim) if call.ndim else None
                found = None if dim is None else (dim, [1] * call.shape[dim])
            else:
                found = _lengths(call)
            known = () if found is None or found[0] not in call.specs[0].sharded else (found[0], tuple(found[1]))
            if key is not None and not any(isinstance(k, Tensor) for k in key):
                if len(cuts) > 1024:
                    cuts.clear()
                cuts[key] = known
        if not known:
            return None
        dim, lengths = known
        x = args[0] if args else next(iter(kwargs.values()))
        if rule is unbind_rule:
            return tuple(x.select(dim, i) for i in range(len(lengths)))
        starts = itertools.accumulate(lengths, initial=0)
        return tuple(x.narrow(dim, start, length) for start, length in zip(starts, lengths, strict=False))

    cuts: dict[Any, Any] = {}
    handler.cache = by_rule.cache  # type: ignore[attr-defined]
    return handler


_CUTTING = """split split_with_sizes chunk tensor_split unsafe_split unsafe_split_with_sizes unsafe_chunk
hsplit vsplit dsplit unbind"""

for _name in _CUTTING.split():
    _rule = unbind_rule if _name == "unbind" else split_rule
    for _func in spellings(_name):
        TABLE[_func] = _cutting(_rule)
    register(f"{_name}_copy", copied(_cutting(_rule)))

# ------------------------------------------------------------------ joining


def cat_rule(call: Call) -> Rule | None:
    """`cat(tensors, dim)`; one-dimensional empty tensors are left out, as torch does for old programs."""
    legacy = [s.shape == (0,) for s in call.specs]
    real = [s for s, skip in zip(call.specs, legacy, strict=True) if not skip] or call.specs[:1]
    ndim = real[0].ndim
    dim = call.arg(1, "dim", call.kwargs.get("axis", 0))
    if not isinstance(dim, int) or ndim == 0:
        return None
    dim = normalize_dim(dim, ndim)
    rest = [(*s.shape[:dim], *s.shape[dim + 1 :]) for s in real]
    if any(r != rest[0] for r in rest) or any(s.ndim != ndim for s in real):
        return None  # torch's own error
    first = real[0].shape
    shape = (*first[:dim], sum(s.shape[dim] for s in real), *first[dim + 1 :])
    strategies = [Strategy(tuple(R if skip else d for skip in legacy), (d,)) for d in range(ndim) if d != dim]
    if len(real) != len(legacy):
        strategies.append(Strategy(tuple(R if skip else P for skip in legacy), (P,), exact=True))
    strategies.append(Strategy((P,) * len(legacy), (P,), exact=True))
    return Rule([shape], strategies, uniform=True)


def stack_rule(call: Call) -> Rule | None:
    """`stack(tensors, dim)`."""
    shape = call.shape
    if any(s.shape != shape for s in call.specs):
        return None  # torch's own error
    dim = normalize_dim(call.arg(1, "dim", 0), call.ndim + 1)
    n = len(call.specs)
    strategies = [Strategy((d,) * n, (d + (d >= dim),)) for d in range(call.ndim)]
    strategies.append(Strategy((P,) * n, (P,), exact=True))
    return Rule([(*shape[:dim], n, *shape[dim:])], strategies, uniform=True)


keyed("cat concat concatenate", cat_rule, inplace=False)
keyed("stack", stack_rule, inplace=False)


def _stacking(dim: int, least: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Handler of `hstack` and its kind: `cat` of tensors of at least some number of dims."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [least(t) for t in (args[0] if args else kwargs["tensors"])]
        out = {"out": kwargs["out"]} if kwargs.get("out") is not None else {}
        return torch.cat(tensors, 0 if tensors[0].ndim == 1 else dim, **out)

    return handler


def atleast_1d(x: Tensor) -> Tensor:
    """View of at least one dim."""
    return x if x.ndim else x.unsqueeze(0)


def atleast_2d(x: Tensor) -> Tensor:
    """View of at least two dims."""
    return x if x.ndim >= 2 else atleast_1d(x).unsqueeze(0)


def atleast_3d(x: Tensor) -> Tensor:
    """View of at least three dims."""
    return x if x.ndim >= 3 else atleast_2d(x).unsqueeze(-1)


def _column(x: Tensor) -> Tensor:
    return x if x.ndim >= 2 else atleast_1d(x).unsqueeze(-1)


def _each(least: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        if len(args) == 1 and isinstance(args[0], Tensor):
            return least(args[0])
        return tuple(least(t) for t in tensors)

    return handler


register("hstack", _stacking(1, atleast_1d))
register("vstack row_stack", _stacking(0, atleast_2d))
register("dstack", _stacking(2, atleast_3d))
register("column_stack", _stacking(1, _column))
register("atleast_1d", _each(atleast_1d))
register("atleast_2d", _each(atleast_2d))
register("atleast_3d", _each(atleast_3d))

# ------------------------------------------------------------------ along dims: flip, roll, repeat, tril, pad


def _whole_dims_rule(call: Call, acted: Sequence[int], shape: Shape | None = None, localize: Any = None) -> Rule:
    """Rule of a linear function whose dims in `acted` must be whole; the others stay in place, counted from the end."""
    shape = tuple(call.shape) if shape is None else shape
    lead = len(shape) - call.ndim
    pairs = [(d, d + lead) for d in range(call.ndim) if d not in acted]
    return dim_map_rule(shape, pairs, localize, view=False)


def flip_rule(call: Call) -> Rule:
    """`flip(dims)`, `fliplr`, `flipud`."""
    name = call.name
    if name in ("fliplr", "flipud"):
        return _whole_dims_rule(call, [1 if name == "fliplr" else 0])
    dims = sizes_of(call.args[1:] if len(call.args) > 1 else (call.kwargs["dims"],))
    return _whole_dims_rule(call, normalize_dims(dims, call.ndim))


def roll_rule(call: Call) -> Rule:
    """`roll(shifts, dims)`; without dims it rolls the flattened tensor."""
    dims = call.arg(2, "dims", ())
    every = dims is None or (isinstance(dims, list | tuple) and not dims)
    return _whole_dims_rule(call, range(call.ndim) if every else normalize_dims(dims, call.ndim))


def repeat_rule(call: Call) -> Rule:
    """`repeat(*sizes)` and `tile(dims)`: dims repeated once stay as they are."""
    given = next((call.kwargs[k] for k in ("repeats", "sizes", "dims") if k in call.kwargs), None)
    times = list(sizes_of(call.args[1:] if given is None else (given,)))
    if call.name == "tile":
        times = [1] * (call.ndim - len(times)) + times
    lead = len(times) - call.ndim
    if lead < 0:
        raise RuntimeError("Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor")
    padded = (1,) * lead + tuple(call.shape)
    shape = tuple(n * t for n, t in zip(padded, times, strict=True))
    return _whole_dims_rule(call, [d for d in range(call.ndim) if times[lead + d] != 1], shape)


def repeat_interleave_rule(call: Call) -> Rule | None:
    """`repeat_interleave(repeats, dim)` with a number: an evenly sharded dim stays sharded."""
    repeats, dim = call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(repeats, int) or not isinstance(dim, int) or repeats < 0 or not call.ndim:
        return None
    dim, shape = normalize_dim(dim, call.ndim), call.shape
    rule = _whole_dims_rule(call, [dim], (*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]))
    rest = {k: v for k, v in call.kwargs.items() if k not in ("repeats", "dim", "input", "output_size")}
    if call.kwargs.get("output_size") not in (None, shape[dim] * repeats) or rest:
        return None
    rule.strategies = [*rule.strategies, Strategy((dim,), (dim,), even=((0, dim),))]

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        return rewrite(call, torch.repeat_interleave, repeats, dim)

    rule.localize = localize
    return rule


def triangle_rule(call: Call) -> Rule | None:
    """`tril`, `triu`: the diagonal runs through the blocks at a distance that depends on their place."""
    diagonal = call.arg(1, "diagonal", 0)
    if not isinstance(diagonal, int) or call.ndim < 2:
        return None
    function = getattr(Tensor, call.name)

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        row, column = ins[0].local_offset[-2:]
        return rewrite(call, function, diagonal + row - column)

    return _whole_dims_rule(call, (), None, localize)


def pad_rule(call: Call) -> Rule | None:
    """`F.pad` and `constant_pad_nd`: dims that are not padded may be sharded."""
    pad = sizes_of((call.arg(1, "pad"),))
    constant = call.name == "constant_pad_nd"
    mode = "constant" if constant else call.arg(2, "mode", "constant")
    value = call.arg(2 if constant else 3, "value", None)
    shape, touched = list(call.shape), set()
    if len(pad) % 2 or len(pad) > 2 * len(shape) or isinstance(value, Tensor):
        return None
    for k in range(len(pad) // 2):
        d = len(shape) - 1 - k
        low, high = pad[2 * k : 2 * k + 2]
        shape[d] += low + high
        if low or high or mode != "constant":
            touched.add(d)
    if min(shape, default=0) < 0:
        return None
    rule = _whole_dims_rule(call, sorted(touched), tuple(shape))
    if mode != "constant":  # these modes ask for a batch and count dims: no empty local parts
        rule.localize = lambda ins, outs: spared(call, ins, outs)
    elif value:
        rule.strategies = rule.strategies[:-1]  # not linear: the padding would be summed
    return rule


def diagonal_rule(call: Call) -> Rule | None:
    """`diagonal(offset, dim1, dim2)`: other dims may be sharded."""
    offset, dim1, dim2 = call.arg(1, "offset", 0), call.arg(2, "dim1", 0), call.arg(3, "dim2", 1)
    if not all(isinstance(v, int) for v in (offset, dim1, dim2)) or call.ndim < 2:
        return None
    a, b = normalize_dim(dim1, call.ndim), normalize_dim(dim2, call.ndim)
    if a == b:
        return None
    kept = [d for d in range(call.ndim) if d not in (a, b)]
    rows, columns = call.shape[a], call.shape[b]
    length = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    return dim_map_rule((*[call.shape[d] for d in kept], length), [(d, i) for i, d in enumerate(kept)])


def rot90_rule(call: Call) -> Rule | None:
    """`rot90(k, dims)`: dims other than the two may be sharded."""
    k, dims = call.arg(1, "k", 1), call.arg(2, "dims", (0, 1))
    if len(dims) != 2 or call.ndim < 2:
        return None
    a, b = normalize_dims(dims, call.ndim)
    if a == b:
        return None
    order = swapped(call.ndim, a, b) if k % 2 else list(range(call.ndim))
    rule = permuted_rule(call, order)
    rule.strategies = [s for s in rule.strategies if s.ins[0] not in (a, b)]
    rule.view = False
    return rule


def unfold_rule(call: Call) -> Rule | None:
    """`unfold(dimension, size, step)`: windows over one dim become a last dim."""
    dim, size, step = call.arg(1, "dimension"), call.arg(2, "size"), call.arg(3, "step")
    if not call.ndim or not isinstance(dim, int):
        return None
    dim, shape = normalize_dim(dim, call.ndim), list(call.shape)
    if not 0 <= size <= shape[dim] or step <= 0:
        return None
    shape[dim] = (shape[dim] - size) // step + 1
    return dim_map_rule((*shape, size), [(d, d) for d in range(call.ndim) if d != dim])


keyed("flip fliplr flipud", flip_rule, inplace=False)
keyed("roll", roll_rule, inplace=False)
keyed("repeat tile", repeat_rule, inplace=False)
keyed("repeat_interleave", repeat_interleave_rule, inplace=False)
keyed("tril triu", triangle_rule)
keyed("pad constant_pad_nd", pad_rule, inplace=False)
keyed("diagonal diagonal_copy", diagonal_rule, inplace=False)
keyed("rot90", rot90_rule, inplace=False)
keyed("Tensor.unfold unfold_copy", unfold_rule, inplace=False)
