"""Which handler each random operator of torch has: one line per kind, by aten name and overload.

The list of random operators is torch's own (the tag `nondeterministic_seeded`), so what a later torch adds is
refused by name until it is entered here, and never drawn shard by shard.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._draw.composite import is_composite
from .closed import (
    Handler,
    chances,
    chances_in_place,
    empty_like,
    in_place,
    into_out,
    like,
    native_dropout,
    normal,
    resize_to_itself,
)
from .dynamo import run_as_it_is
from .pass_on import decompose, pass_on, refuse, unless_it_draws
from .whole import draw_whole

__all__ = ["handlers", "how", "random_operators"]


def _rrelu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    return (draw_whole if given.get("training") else pass_on)(op, args, kwargs)


_CLOSED: dict[Handler, tuple[str, ...]] = {
    in_place("uniform_"): ("uniform_",),
    in_place("normal_"): ("normal_",),
    in_place("random_"): ("random_", "random_.from", "random_.to"),
    in_place("bernoulli_"): ("bernoulli_.float",),
    in_place("exponential_"): ("exponential_",),
    in_place("cauchy_"): ("cauchy_",),
    in_place("log_normal_"): ("log_normal_",),
    in_place("geometric_"): ("geometric_",),
    chances_in_place: ("bernoulli_.Tensor",),
    chances(torch.contiguous_format): ("bernoulli",),
    chances(torch.preserve_format): ("bernoulli.Tensor",),
    # What only functionalization calls stands beside the operators that are spelled so by users.
    like("uniform_"): ("rand_like", "rand_like.generator", "uniform"),
    like("normal_"): ("randn_like", "randn_like.generator", "normal_functional"),
    like("random_"): (
        "randint_like", "randint_like.Tensor", "randint_like.low_dtype", "randint_like.generator",
        "randint_like.Tensor_generator", "randint_like.low_generator_dtype", "random", "random.from", "random.to",
    ),
    like("bernoulli_", torch.contiguous_format): ("bernoulli.p",),
    like("exponential_"): ("exponential",),
    like("cauchy_"): ("cauchy",),
    like("log_normal_"): ("log_normal",),
    like("geometric_"): ("geometric",),
    normal: ("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor"),
    native_dropout: ("native_dropout",),
    into_out("uniform_", ()): ("rand.out", "rand.generator_out"),
    into_out("normal_", ()): ("randn.out", "randn.generator_out"),
    into_out("random_", (0,)): ("randint.out", "randint.generator_out"),
    into_out("random_", (0, 1)): ("randint.low_out", "randint.low_generator_out"),
    into_out("normal_", (0, 1)): ("normal.float_float_out",),
}  # fmt: skip
"""Operators that each rank draws for itself."""

_WHOLE = (
    "poisson", "binomial", "_standard_gamma", "_sample_dirichlet", "multinomial", "rrelu_with_noise_", "_fused_dropout",
    # Torch makes these by drawing a result and copying it, or they are rare enough that O(whole) does not matter.
    "poisson.out", "binomial.out", "_standard_gamma.out", "_sample_dirichlet.out", "multinomial.out",
    "rrelu_with_noise.out", "_fused_dropout.out", "native_dropout.out", "randperm.out", "randperm.generator_out",
    "bernoulli.out", "bernoulli.float_out", "bernoulli.Tensor_out", "cauchy.out", "exponential.out", "geometric.out",
    "log_normal.out", "uniform.out", "normal.out", "normal.Tensor_Tensor_out", "normal.Tensor_float_out",
    "normal.float_Tensor_out", "random.out", "random.from_out", "random.to_out", "rand_like.out",
    "rand_like.generator_out", "randn_like.out", "randn_like.generator_out", "randint_like.out",
    "randint_like.generator_out", "randint_like.low_dtype_out", "randint_like.low_generator_dtype_out",
)  # fmt: skip
"""Operators that every rank draws whole."""

_UNLESS_IT_DRAWS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention.quantized",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps", "_flash_attention_forward", "_flash_attention_forward.quantized",
    "_flash_attention_forward_no_dropout_inplace", "_efficient_attention_forward", "_cudnn_attention_forward",
    "_triton_scaled_dot_attention", "_cudnn_rnn", "_lstm_mps", "miopen_rnn",
)  # fmt: skip
"""Fused kernels with a dropout of their own: refused if it is on."""

DRAWS_NOTHING = frozenset({
    "_fused_sdp_choice", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward", "_cudnn_attention_backward",
})  # fmt: skip
"""Tagged as random in torch, but they choose a kernel or replay a mask; they have no handler."""


def random_operators() -> dict[str, Any]:
    """Return torch's random aten operators by name; an overload is written `name.overload`."""
    found = {}
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "aten":
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            # Some lack the tag in some versions.
            if torch.Tag.nondeterministic_seeded in op.tags or name in _entries():
                found[name] = op
    return found


def how(name: str, op: Any) -> Handler:
    """Return the handler of a random operator."""
    return _entries().get(name) or (decompose if is_composite(op) else refuse)


@functools.cache
def handlers() -> dict[Any, Handler]:
    """Return the handlers of all random operators of this torch, and of two that random ones are made with."""
    found = {op: how(name, op) for name, op in random_operators().items() if name not in DRAWS_NOTHING}
    found[torch.ops.aten.empty_like.default] = empty_like
    found[torch.ops.aten.resize_.default] = resize_to_itself
    for handler in set(found.values()):
        run_as_it_is(handler)
    return found


@functools.cache
def _entries() -> dict[str, Handler]:
    entries: dict[str, Handler] = {name: handler for handler, names in _CLOSED.items() for name in names}
    entries |= dict.fromkeys(_WHOLE, draw_whole)
    entries |= dict.fromkeys(_UNLESS_IT_DRAWS, unless_it_draws)
    entries |= dict.fromkeys(("rrelu_with_noise", "rrelu_with_noise_functional"), _rrelu)
    return entries
