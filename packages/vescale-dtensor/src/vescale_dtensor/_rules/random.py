"""Random operators: the numbers come from `_random.fill`, the rest is torch's own formula on local parts.

Results keep the sharding of the argument; replicas get the same numbers; a pending sum is reduced
first. Operators whose number of draws depends on the data run on the whole tensor, where the
generators of all ranks, being in step, give the same numbers.
"""

from __future__ import annotations

import math
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import init

from .. import _random
from .._comm.move import move, reduced_types, strip
from .._dispatch import policy
from .._dispatch.call import first_dtensor, function_name
from .._dispatch.copies import before_write
from .._dispatch.engine import Handler, label_one, out_variant, tag, tensors_in
from .._dispatch.fallback import enter, gather_fallback, write_back
from .._dispatch.table import spellings
from .._irregular import Ragged, cut_dims_of, is_cut
from .._order import keep_order, loses_order
from .._spec import Spec, spec_of
from .._tensor import TABLE, DTensor
from ..errors import UnsupportedOperationError
from ..placements import I, P, R

_run = torch._C._disabled_torch_function_impl
_HALF = (torch.float16, torch.bfloat16)
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _name(func: Any) -> str:
    return function_name(func).partition(".")[0]


def reduced(x: DTensor) -> DTensor:
    """`x` with its pending sums added up."""
    return move(x, reduced_types(x._spec.types)) if P in x._spec.types else x


def factory_spec(spec: Spec) -> Spec:
    """Layout of a new tensor made like one of `spec`: sharded alike, else the same on every rank."""
    return spec.with_types(tuple(t if is_cut(t) else I for t in spec.types))


# ------------------------------------------------------------------ dropout


def dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`F.dropout(input, p, training, inplace)`."""
    x = args[0] if args else kwargs["input"]
    if len(args) > 1:
        bound = dict(zip(("input", "p", "training", "inplace"), args, strict=False))
        bound.update(kwargs)
        kwargs = bound
    p = kwargs.get("p", 0.5)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0.0 or not kwargs.get("training", True) or not x._spec.numel:
        return x
    return _drop(x, p, bool(kwargs.get("inplace", False)), _dropped)


def _of_torch(formula: Any, inplace: bool, features: bool) -> Handler:
    """Handler of `torch.dropout(input, p, train)` and its relatives."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = dict(zip(("input", "p", "train"), args, strict=False))
        bound.update(kwargs)
        x, p = bound["input"], bound["p"]
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 0.0 or not bound["train"] or not x._spec.numel:
            return x
        return _drop(x, p, inplace, formula, features)

    return handler


def _drop(
    x: DTensor, p: float, inplace: bool, formula: Any, features: bool = False, like: DTensor | None = None
) -> Any:
    """Apply a formula; the memory order of `like` (default `x`) is the order of the draws."""
    if P in x._spec.types:
        value = _drop(reduced(x), p, False, formula, features, like=x)
        return write_back(x, value) if inplace else value
    if inplace:
        before_write(x, "dropout")
    spec = x._spec
    noise_spec = _feature_spec(spec) if features else spec
    r = _run(formula, (), (x, noise_spec, p, inplace, x if like is None else like), {})
    if r.__class__ is Tensor:
        if loses_order(spec):
            r = keep_order(r, (x,))
        r.__class__ = DTensor
        r._spec = spec  # type: ignore[attr-defined]
    return r


def _feature_spec(spec: Spec) -> Spec:
    """Layout of a mask that is the same for all positions of a channel."""
    if spec.ndim < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    if any(isinstance(t, Ragged) for t in spec.types):
        raise UnsupportedOperationError(
            f"feature dropout draws one number per channel, but {spec!r} is not cut by channels; "
            "redistribute it to Shard(dim) or Replicate() first"
        )
    # Cuts of the positions are none of the mask.
    types = tuple(t if all(dim < 2 for dim in cut_dims_of(t)) else I for t in spec.types)
    return spec_of(spec.mesh, (*spec.shape[:2], *(1,) * (spec.ndim - 2)), types)


def _noise(x: Tensor, spec: Spec, p: float) -> Tensor:
    """Keep mask of ones and zeros in the dtype of `x`; with dispatch off."""
    if tuple(x.shape) == spec.local_shape:
        noise = torch.empty_like(x)
    else:
        noise = torch.empty(spec.local_shape, dtype=x.dtype, device=x.device)
    return _random.keep_mask(noise, spec, p)


def _dropped(x: Tensor, spec: Spec, p: float, inplace: bool, like: Tensor) -> Tensor:
    if p == 1:
        noise = torch.zeros((), dtype=x.dtype, device=x.device)
    else:
        noise = _noise(like, spec, p)
        if x.device.type != "cpu" and x.dtype in _HALF:
            # Fused kernels scale the product, in float32; the scale in 16 bits would be another one.
            product = x.mul_(noise) if inplace else torch.mul(x, noise)
            return product.mul_(1 / (1 - p))
        noise = noise.div_(1 - p)
    return x.mul_(noise) if inplace else torch.mul(x, noise)


def _alpha_dropped(x: Tensor, spec: Spec, p: float, inplace: bool, like: Tensor) -> Tensor:
    if p == 1:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return x.mul_(zero) if inplace else x * zero
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    noise = _noise(like, spec, p)
    b = noise.add(-1).mul_(alpha * a).add_(alpha * a * p)
    noise.mul_(a)
    return x.mul_(noise).add_(b) if inplace else (x * noise).add_(b)


def native_dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.native_dropout(input, p, train)`: the result and the mask."""
    bound = dict(zip(("input", "p", "train"), args, strict=False))
    bound.update(kwargs)
    x, p = reduced(bound["input"]), bound["p"]
    spec = x._spec

    def local(x: Tensor) -> tuple[Tensor, Tensor]:
        if not spec.numel:
            return x, torch.empty_like(x)
        if bound["train"] is False:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        noise = _noise(x, spec, p)
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
        return x * (noise * scale), noise.bool()

    out, mask = _run(local, (), (x,), {})
    return label_one(out, x._spec), label_one(mask, x._spec)


# ------------------------------------------------------------------ in-place draws


def inplace_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.normal_(...)` and the like: every element is overwritten."""
    x, *rest = args if args else (kwargs["self"],)
    if not isinstance(x, DTensor):
        raise UnsupportedOperationError(
            f"{_name(func)} would draw into a plain tensor with parameters in a DTensor; distribute it first"
        )
    before_write(x, _name(func))
    if P in x._spec.types:
        whole = spec_of(x._spec.mesh, x._spec.shape, reduced_types(x._spec.types))
        value = tag(_run(torch.empty_like, (), (x,), {"requires_grad": False}), whole)
        return write_back(x, inplace_draw(func, (value, *rest), kwargs))
    spec = x._spec
    draw_args = tuple(_parameter(a, spec, _name(func)) for a in rest)
    draw_kwargs = {k: _parameter(v, spec, _name(func)) for k, v in kwargs.items() if k != "self"}
    if torch.is_grad_enabled() and _run(_requires_grad, (), (x,), {}):
        buffer = _run(torch.empty_like, (), (x,), {})
        _random.fill(_name(func), buffer, spec, draw_args, draw_kwargs)
        _run(Tensor.copy_, (), (x, buffer), {})  # torch's own error for a leaf, a zero gradient otherwise
    else:
        _random.fill(_name(func), _run(Tensor.detach, (), (x,), {}), spec, draw_args, draw_kwargs)
    return x


def _parameter(value: Any, spec: Spec, name: str) -> Any:
    """A parameter of a distribution; of a tensor the local part, cut as `spec`."""
    if isinstance(value, DTensor):
        value = value.detach()
        if value._spec.shape != spec.shape:
            value = value.expand(spec.shape)
        types_ = tuple(t if t != P else I for t in spec.types)
        return strip(move(value, types_))
    if isinstance(value, Tensor):
        if value.numel() != 1:
            policy.check_plain(name, tuple(value.shape))
        return _random.window(value.detach().expand(spec.shape), spec)
    return value


# ------------------------------------------------------------------ new tensors


def like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`rand_like`, `randn_like`, `randint_like`."""
    rest = dict(kwargs)
    x = args[0] if args else rest.pop("input")
    generator = rest.pop("generator", None)
    bounds = [*args[1:], *[rest.pop(k) for k in ("low", "high") if k in rest]]
    requires_grad = rest.pop("requires_grad", False)
    _check_device(rest.get("device"), x._spec, _name(func))
    spec = factory_spec(x._spec)
    local = _run(torch.empty_like, (), (x,), rest)
    _random.fill(_name(func), local, spec, tuple(bounds), {"generator": generator} if generator is not None else {})
    return tag(local.requires_grad_(requires_grad), spec)


def _check_device(device: Any, spec: Spec, name: str) -> None:
    if device is not None and torch.device(device).type not in (spec.mesh.device_type, "meta"):
        raise UnsupportedOperationError(
            f"{name} on device {device!r}: the DTensor lies on {spec.mesh!r} of {spec.mesh.device_type!r} devices; "
            "leave out `device`, or make the tensor on a mesh of that device type"
        )


def bernoulli(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`bernoulli(input)` and `bernoulli(input, p)`."""
    if kwargs.get("out") is not None:
        return out_variant(bernoulli, func, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("out", "input")}
    x = reduced(args[0] if args else kwargs["input"])
    p = args[1] if len(args) > 1 else rest.pop("p", None)
    local = _run(torch.empty_like, (), (x,), {"memory_format": torch.contiguous_format})  # torch's is contiguous too
    if p is None:
        _random.fill("bernoulli", local, x._spec, (strip(x).detach(),), rest, contiguous=True)
    else:
        _random.fill("bernoulli_", local, x._spec, (_parameter(p, x._spec, "bernoulli"),), rest, contiguous=True)
    return tag(local, factory_spec(x._spec))


def normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.normal(mean, std)` with a DTensor for either."""
    if kwargs.get("out") is not None:
        return out_variant(normal, func, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k not in ("out", "mean", "std")}
    bound: dict[str, Any] = {"mean": 0.0, "std": 1.0, **dict(zip(("mean", "std"), args, strict=False))}
    bound.update((k, kwargs[k]) for k in ("mean", "std") if k in kwargs)
    first = first_dtensor([bound["mean"], bound["std"]])
    assert first is not None
    shape: Any = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *[v.shape for v in bound.values() if isinstance(v, Tensor)]
    )
    detached: Any = first.detach()
    base: Any = reduced(detached)
    if base.shape != shape:
        base = base.expand(shape)
    spec = base._spec
    local = _run(torch.empty, (), (spec.local_shape,), {"dtype": base.dtype, "device": base.device})
    mean, std = (_parameter(v, spec, "normal") for v in bound.values())
    _random.fill("normal", local, spec, (mean, std), rest, contiguous=True)
    return tag(local, factory_spec(spec))


def rrelu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`rrelu(input, lower, upper, training, inplace)`: without training a leaky relu."""
    bound = dict(zip(("input", "lower", "upper", "training", "inplace"), args, strict=False))
    bound.update(kwargs)
    if not bound.get("training", False):
        inplace = bool(bound.get("inplace", False)) or _name(func).endswith("_")
        slope = (bound.get("lower", 1.0 / 8) + bound.get("upper", 1.0 / 3)) / 2
        return F.leaky_relu(bound["input"], slope, inplace)
    if bound.get("inplace") or _name(func).endswith("_"):
        x = bound["input"]
        value = whole_draw(torch.rrelu, (x, bound.get("lower", 1.0 / 8), bound.get("upper", 1.0 / 3), True), {})
        return write_back(x, value)
    return whole_draw(func, args, kwargs)


# ------------------------------------------------------------------ draws that depend on the data


def whole_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the whole tensor on every rank; generators in step give the same numbers everywhere."""
    x = next(t for t in tensors_in(args, kwargs) if isinstance(t, DTensor))
    if x._spec.mesh not in _random._agreed:
        _random.check_agreement(x._spec.mesh, kwargs.get("generator") or _random.default_generator(x.device))
    return gather_fallback(func, args, kwargs)


def sampled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`poisson`, `multinomial` and the like: shard by shard where each shard has its own stream, else whole."""
    if kwargs.get("out") is not None:
        return out_variant(sampled, func, args, kwargs)
    rest = {k: v for k, v in kwargs.items() if k != "out"}
    x = args[0] if args else None
    if (
        not isinstance(x, DTensor)
        or _random.state.mode == "whole"
        or _random.provider() is not None
        or x.device.type == "meta"
    ):
        return whole_draw(func, args, rest)
    x = reduced(x)
    spec = x._spec
    if _name(func) == "multinomial":
        if spec.ndim != 2 or spec.sharded - {0} or spec.irregular:
            return whole_draw(func, args, rest)
        num = args[1] if len(args) > 1 else rest["num_samples"]
        out = spec_of(spec.mesh, (spec.shape[0], num), spec.types)
    else:
        out = spec
    generator = rest.pop("generator", None) or _random.default_generator(x.device)
    if spec.mesh not in _random._agreed:
        _random.check_agreement(spec.mesh, generator)
    own = _random.shard_generator(spec, generator, x.device)
    return label_one(_run(func, (), (x, *args[1:]), {**rest, "generator": own}), out)


# ------------------------------------------------------------------ tables


def _register(names: str, handler: Handler) -> None:
    """Give the C++ spellings of `names` a handler, and enter the Python ones, which call those."""
    for name in names.split():
        for func in spellings(name):
            if isinstance(func, types.FunctionType):
                TABLE[func] = _entered(func)
            else:
                TABLE[func] = handler


class _NoOverrides:
    """`torch`, as seen by a function that must not hand itself to `__torch_function__` again."""

    overrides = types.SimpleNamespace(has_torch_function_variadic=lambda *tensors: False)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _entered(func: types.FunctionType) -> Handler:
    inside = enter(func)
    inside.__globals__["torch"] = _NoOverrides()
    return lambda _, args, kwargs: inside(*args, **kwargs)


for _suffix, _inplace in (("", False), ("_", True)):
    _register(f"dropout{_suffix}", _of_torch(_dropped, _inplace, features=False))
    _register(f"alpha_dropout{_suffix}", _of_torch(_alpha_dropped, _inplace, features=False))
    _register(f"feature_dropout{_suffix}", _of_torch(_dropped, _inplace, features=True))
    _register(f"feature_alpha_dropout{_suffix}", _of_torch(_alpha_dropped, _inplace, features=True))
TABLE[F.dropout] = dropout
_register("native_dropout", native_dropout)
_register("normal_ uniform_ random_ exponential_ cauchy_ log_normal_ geometric_ bernoulli_", inplace_draw)
_register("rand_like randn_like randint_like", like)
_register("bernoulli", bernoulli)
_register("normal", normal)
_register("poisson _standard_gamma multinomial", sampled)
_register("binomial _sample_dirichlet", whole_draw)
for _function in (torch.rrelu, torch.rrelu_, F.rrelu):
    TABLE[_function] = rrelu
for _function in vars(init).values():  # they look for `torch.overrides` where `enter` does not reach
    if isinstance(_function, types.FunctionType) and "has_torch_function_variadic" in _function.__code__.co_names:
        TABLE[_function] = _entered(_function)

__all__ = [
    "R",
    "bernoulli",
    "dropout",
    "factory_spec",
    "inplace_draw",
    "like",
    "native_dropout",
    "reduced",
    "sampled",
    "whole_draw",
]
