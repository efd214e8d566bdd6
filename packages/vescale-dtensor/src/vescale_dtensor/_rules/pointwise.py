"""Elementwise functions: one rule, with a note on which of them keep a pending sum pending.

A sum of parts commutes with linear functions only: adding two pending sums, scaling one by a
number or a replicated tensor, negating, converting between floating types. All others need the
value, so their partial operands are reduced first. Adding a value to a pending sum reduces the
sum as well: keeping it pending would move the reduction to wherever the value is needed next.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.call import Call, Rule, Shape, Strategy
from .._dispatch.entry import RuleFunction
from .._dispatch.table import keyed, pointwise
from ..placements import I, P, R


def broadcast(shapes: Sequence[Sequence[int]]) -> Shape:
    """Shape of the elementwise result; raises torch's own error where shapes do not fit."""
    if len(shapes) == 1:
        return tuple(shapes[0])
    first = shapes[0]
    if all(s == first for s in shapes[1:]):
        return tuple(first)
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def elementwise_strategies(shapes: Sequence[Sequence[int]], out: Shape, num_outs: int = 1) -> list[Strategy]:
    """Any dim may be sharded in all operands that have it; those that are broadcast along it stay whole."""
    strategies = []
    for dim, length in enumerate(out):
        ins = []
        for shape in shapes:
            own = dim - len(out) + len(shape)
            ins.append(own if own >= 0 and shape[own] == length else R)
        strategies.append(Strategy(tuple(ins), (dim,) * num_outs))
    return strategies


def _rule(linear: str = "", num_outs: int = 1) -> RuleFunction:
    """Rule of an elementwise function.

    Args:
        linear: ``unary``, ``add``, ``mul``, ``div`` or ``where`` if it is linear in the way of these; empty: not.
        num_outs: number of results.
    """
    keep_pending = _PENDING[linear]

    def rule(call: Call) -> Rule:
        shapes = [s.shape for s in call.specs]
        out = broadcast(shapes)
        strategies = elementwise_strategies(shapes, out, num_outs)
        strategies += keep_pending(call)
        return Rule([out] * num_outs, strategies, uniform=True)

    return rule


def _never(call: Call) -> list[Strategy]:
    return []


def _unary(call: Call) -> list[Strategy]:
    return [Strategy((P,), (P,), exact=True)] if len(call.specs) == 1 else []


def _add(call: Call) -> list[Strategy]:
    return [Strategy((P, P), (P,), exact=True)] if len(call.specs) == 2 else []


def _mul(call: Call) -> list[Strategy]:
    if len(call.specs) == 1:
        return [Strategy((P,), (P,), exact=True)]
    return [Strategy((P, R), (P,), exact=True), Strategy((R, P), (P,), exact=True)] if len(call.specs) == 2 else []


def _div(call: Call) -> list[Strategy]:
    if call.kwargs.get("rounding_mode") is not None or not isinstance(call.args[0], Tensor):
        return []
    return [Strategy((P, *(R,) * (len(call.specs) - 1)), (P,), exact=True)]


def _where(call: Call) -> list[Strategy]:
    return [Strategy((R, P, P), (P,), exact=True)] if len(call.specs) == 3 else []


_PENDING = {"": _never, "unary": _unary, "add": _add, "mul": _mul, "div": _div, "where": _where}


def where_rule(call: Call) -> Rule | None:
    """`where(condition, input, other)`; `where(condition)` gives positions, whose number the values decide."""
    return _choice(call) if len(call.args) + len(call.kwargs) > 1 else None


_choice = _rule("where")


def prelu_rule(call: Call) -> Rule | None:
    """`prelu`: the weight holds one slope for all elements, or one per channel, which is dim 1 and not the last."""
    if len(call.specs) != 2:
        return None
    out, weight = tuple(call.shape), call.specs[1]
    channels = out[1] if len(out) > 1 else 1
    if weight.numel != 1 and tuple(weight.shape) != (channels,):
        call.on_meta()  # torch's own error
        return None
    shared = weight.numel == 1
    return Rule([out], [Strategy((d, R if shared or d != 1 else 0), (d,)) for d in range(len(out))], uniform=True)


def conversion_rule(call: Call) -> Rule:
    """`to`, `float`, `type` and the like: linear between floating types; the device must stay the mesh's.

    A second tensor (`type_as(other)`) lends its dtype only, so it may lie anyhow.
    """
    out = tuple(call.shape)
    linear = _target_dtype(call).is_floating_point or _target_dtype(call).is_complex
    lenders = [tuple(dict.fromkeys((R, I, *s.types))) for s in call.specs[1:]]
    strategies = []
    for others in itertools.product(*lenders):
        strategies += [Strategy((t, *others), (t,)) for t in (*range(len(out)), I, R)]
        if linear:
            strategies.append(Strategy((P, *others), (P,), exact=True))
    device = _target_device(call)
    if device is not None and device not in (call.mesh.device_type, "meta"):
        from ..errors import UnsupportedOperationError

        raise UnsupportedOperationError(
            f"{call.name} to device {device!r}: this DTensor lies on {call.mesh!r} of "
            f"{call.mesh.device_type!r} devices. "
            "Distribute it on a mesh of that device type instead"
        )
    return Rule([out], strategies, uniform=True)


_BY_NAME = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "long": torch.int64, "int": torch.int32, "short": torch.int16, "char": torch.int8,
    "byte": torch.uint8, "bool": torch.bool,
    "cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32,
}  # fmt: skip


def _target_dtype(call: Call) -> torch.dtype:
    if call.name in _BY_NAME:
        return _BY_NAME[call.name]
    for value in (*call.args[1:], *call.kwargs.values()):
        if isinstance(value, torch.dtype):
            return value
        if isinstance(value, Tensor):
            return value.dtype
    if call.name == "type":
        return torch.int64  # a type given by its name: taken as not linear
    return call.operands[0].dtype


def _target_device(call: Call) -> str | None:
    for value in (*call.args[1:], *call.kwargs.values()):
        if isinstance(value, torch.device | str) and call.name == "to":
            return torch.device(value).type
    return {"cuda": "cuda", "cpu": "cpu"}.get(call.name)


# ------------------------------------------------------------------ tables

_NOT_LINEAR = """
abs absolute sin cos tan exp exp2 expm1 log log2 log10 log1p sqrt rsqrt reciprocal sigmoid tanh square pow
float_power asin acos atan arcsin arccos arctan sinh cosh asinh acosh atanh arcsinh arccosh arctanh sinc atan2
arctan2 relu gelu silu elu celu selu leaky_relu hardtanh hardswish hardsigmoid softplus mish relu6 logsigmoid
log_sigmoid threshold hardshrink softshrink tanhshrink softsign erf erfc erfinv erfcx floor ceil round
trunc fix frac sign sgn signbit clamp clamp_min clamp_max clip maximum minimum fmax fmin eq ne lt le gt ge
greater less greater_equal less_equal not_equal isnan isinf isfinite isposinf isneginf isreal isclose
logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift
bitwise_right_shift masked_fill addcmul addcdiv fmod remainder floor_divide nan_to_num xlogy heaviside hypot
copysign deg2rad rad2deg digamma lgamma mvlgamma polygamma i0 i0e i1 i1e entr ndtr ndtri log_ndtr zeta xlog1py
logit expit psi nextafter ldexp logaddexp logaddexp2 gcd lcm angle polar complex lerp fill multigammaln gammaln
gammainc gammaincc igamma igammac bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0
airy_ai __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __xor__ __rand__ __ror__ __rxor__ __invert__
__lshift__ __rshift__ __mod__ __rmod__ __floordiv__ __rfloordiv__ __pow__ __rpow__ __rtruediv__ __rdiv__ __abs__
__ipow__ __iand__ __ior__ __ixor__ __imod__ __ifloordiv__ __ilshift__ __irshift__
"""

_SPECIAL = """
special.expit special.logit special.erf special.erfc special.erfinv special.erfcx special.exp2 special.expm1
special.log1p special.sinc special.round special.xlogy special.xlog1py special.zeta special.entr special.ndtr
special.ndtri special.log_ndtr special.i0 special.i0e special.i1 special.i1e special.digamma special.psi
special.gammaln special.polygamma special.gammainc special.gammaincc special.multigammaln special.bessel_j0
special.bessel_j1 special.bessel_y0 special.bessel_y1 special.modified_bessel_i0 special.modified_bessel_i1
special.modified_bessel_k0 special.modified_bessel_k1 special.scaled_modified_bessel_k0
special.scaled_modified_bessel_k1 special.spherical_bessel_j0 special.airy_ai
special.chebyshev_polynomial_t special.chebyshev_polynomial_u special.chebyshev_polynomial_v
special.chebyshev_polynomial_w special.shifted_chebyshev_polynomial_t special.shifted_chebyshev_polynomial_u
special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w special.hermite_polynomial_h
special.hermite_polynomial_he special.laguerre_polynomial_l special.legendre_polynomial_p
"""

pointwise(_NOT_LINEAR, _rule())
pointwise(_SPECIAL, _rule(), inplace=False)
pointwise("prelu", prelu_rule, inplace=False)
pointwise("aten.native_dropout_backward", _rule(), inplace=False)
pointwise("add sub subtract __add__ __radd__ __sub__ __rsub__ rsub __iadd__ __isub__", _rule("add"))
pointwise("mul multiply __mul__ __rmul__ __imul__", _rule("mul"))
pointwise("div divide true_divide __truediv__ __div__ __itruediv__ __idiv__", _rule("div"))
pointwise("where", where_rule, inplace=False)
pointwise(
    "neg negative __neg__ clone conj conj_physical resolve_conj resolve_neg real imag positive __pos__ contiguous zero",
    _rule("unary"),
)
pointwise("get:real get:imag", _rule("unary"), inplace=False)
pointwise("frexp", _rule(num_outs=2), inplace=False)
keyed(
    "to float double half bfloat16 long int short char byte bool cfloat cdouble chalf type type_as cpu cuda",
    conversion_rule,
    inplace=False,
)
