"""Spellings of the closed-form random operators, reduced to torch's in-place kernels.

`rand`, `rand_like` and `uniform_` all run the kernel `uniform_`; a keep mask of `dropout` is `bernoulli_` of the chance
to keep. A form is what remains: the kernel, its arguments, the generator, and what happens after the draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import init

from ..errors import RandomError, UnsupportedRandomOperatorError

__all__ = ["CLOSED_FORM", "Form", "resolve"]


@dataclass(frozen=True, slots=True)
class Form:
    """A random operator in terms of one kernel."""

    kernel: str
    """Name of the in-place method of `torch.Tensor` that draws."""
    args: tuple[Any, ...]
    """Its positional arguments; tensors among them have the shape of the local part."""
    generator: Any = None
    """What draws: a generator, a sampler, or None for the default."""
    drop: float | None = None
    """Chance of a zero in a keep mask, which GPUs draw by a fused kernel of their own; None for all else."""
    after: tuple[Any, ...] | None = None
    """`(mean, std)` of `torch.normal` where one of them is a tensor; `std` None where the kernel had it."""


def resolve(op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Form:
    """Reduce an operator to its kernel.

    Args:
        op: aten base name, such as "rand" or "normal_"; "dropout" is the keep mask of ones and zeros.
        args: parameters of the distribution, without the tensor to fill and without sizes.
        kwargs: named ones, and `generator`.

    Raises:
        UnsupportedRandomOperatorError: if the operator has no closed form.
        TypeError: for arguments that the operator does not take.

    >>> resolve("rand", (), None).kernel, resolve("dropout", (0.25,), None).args
    ('uniform_', (0.75,))
    """
    rule = _RULES.get(op)
    if rule is None:
        raise UnsupportedRandomOperatorError(_no_form(op))
    names, required, build = rule
    generator = None
    given = args
    if kwargs:
        named = dict(kwargs)
        generator = named.pop("generator", None)
        if named:
            given = _bind(op, names, args, named)
    for a in given:
        if isinstance(a, Tensor) and a.requires_grad:
            given = tuple(b.detach() if isinstance(b, Tensor) else b for b in given)
            break
    if op == "bernoulli" and not given:
        raise TypeError("bernoulli: missing argument 'p', the chance of a one: a number or a local part")
    if not required <= len(given) <= len(names):
        raise TypeError(f"{op} takes {', '.join(names) or 'no arguments'}; got {len(given)} arguments: {given!r}")
    return build(given, generator)


def _no_form(op: Any) -> str:
    """Say what to call for an operator without a closed form."""
    if not isinstance(op, str):
        return f"op: expected the name of one of torch's operators, such as 'rand' or 'normal_', got {op!r}"
    if f"{op}_" in _RULES:
        return f"{op}: there is no operator of that name; did you mean {op + '_'!r}?"
    if op in _WHOLE:
        return (
            f"{op}: no closed form, so it cannot be drawn shard by shard; vescale_rng.{op} draws it whole and keeps "
            "this rank's part"
        )
    if callable(getattr(init, op, None)):
        return (
            f"{op}: an init function and no operator; call vescale_rng.init_(torch.nn.init.{op}, local, shape, "
            "part=...)"
        )
    return (
        f"{op}: no closed form, so it cannot be drawn shard by shard; draw it for the whole tensor and keep the "
        f"slice. Closed forms: {', '.join(sorted(_RULES))}"
    )


def _bind(op: str, names: tuple[str, ...], args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    values = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name not in names or name in values:
            raise TypeError(f"{op}: unexpected argument {name}={value!r}; it takes {', '.join(names) or 'none'}")
        values[name] = value
    low, high = names if len(names) == 2 else ("", "")
    if op in _INTEGERS and low in named and high not in values:
        raise TypeError(f"{op}: missing argument {high!r} beside {low}={named[low]!r}")
    defaults = _DEFAULTS.get(op, {})
    bound: list[Any] = []
    for name in names:
        if name not in values and name not in defaults:
            if all(n not in values for n in names[len(bound) :]):
                break
            raise TypeError(f"{op}: missing argument {name!r}")
        bound.append(values.get(name, defaults.get(name)))
    return tuple(bound)


def _plain(kernel: str) -> Callable[[tuple[Any, ...], Any], Form]:
    return lambda args, generator: Form(kernel, args, generator)


def _nothing(kernel: str) -> Callable[[tuple[Any, ...], Any], Form]:
    return lambda args, generator: Form(kernel, (), generator)


def _integers(args: tuple[Any, ...], generator: Any) -> Form:
    low, high = args if len(args) == 2 and args[1] is not None else (0, args[0])
    return Form("random_", (low, high), generator)


def _keep(args: tuple[Any, ...], generator: Any) -> Form:
    p = float(args[0])  # dropout reads a tensor as a number; as chances of bernoulli_ it would draw other bits
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return Form("bernoulli_", (1 - p,), generator, drop=p)


def _bernoulli(args: tuple[Any, ...], generator: Any) -> Form:
    """`bernoulli(input)` takes its chances from the input, `bernoulli(input, p)` from `p`."""
    return Form("bernoulli_", args[-1:] or (0.5,), generator)  # 0.5: the default of bernoulli_


def _normal(args: tuple[Any, ...], generator: Any) -> Form:
    mean, std = _mean_std(args)
    if isinstance(std, Tensor):
        return Form("normal_", (0.0, 1.0), generator, after=(mean, std))
    if isinstance(mean, Tensor):
        return Form("normal_", (0.0, std), generator, after=(mean, None))
    return Form("normal_", (mean, std), generator)


def _mean_std(args: tuple[Any, ...]) -> tuple[Any, Any]:
    return args[0] if args else 0.0, args[1] if len(args) > 1 else 1.0


def check_std(std: Any) -> None:
    """Refuse what `torch.normal` refuses before it draws.

    Raises:
        RandomError: if an element of `std` is negative or no number.
    """
    if isinstance(std, Tensor) and std.numel() and not std.is_complex() and not bool((std >= 0).all()):
        raise RandomError("std: normal expects all elements to be at least 0, and the tensor given has others")


def scale_normal(out: Tensor, mean: Any, std: Tensor | None) -> None:
    """Turn a normal draw around 0 into `torch.normal(mean, std)`, by the operations that torch runs."""
    if std is not None:
        out.mul_(std)
    out.add_(mean)


_Rule = tuple[tuple[str, ...], int, Callable[[tuple[Any, ...], Any], Form]]
_RULES: dict[str, _Rule] = {
    "rand": ((), 0, _nothing("uniform_")),
    "rand_like": ((), 0, _nothing("uniform_")),
    "uniform_": (("from", "to"), 0, _plain("uniform_")),
    "randn": ((), 0, _nothing("normal_")),
    "randn_like": ((), 0, _nothing("normal_")),
    "normal_": (("mean", "std"), 0, _plain("normal_")),
    "normal": (("mean", "std"), 0, _normal),
    "randint": (("low", "high"), 1, _integers),
    "randint_like": (("low", "high"), 1, _integers),
    "random_": (("from", "to"), 0, _plain("random_")),
    "bernoulli": (("input", "p"), 0, _bernoulli),
    "bernoulli_": (("p",), 0, _bernoulli),
    "dropout": (("p",), 1, _keep),
    "exponential_": (("lambd",), 0, _plain("exponential_")),
    "cauchy_": (("median", "sigma"), 0, _plain("cauchy_")),
    "log_normal_": (("mean", "std"), 0, _plain("log_normal_")),
    "geometric_": (("p",), 1, _plain("geometric_")),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "uniform_": {"from": 0.0, "to": 1.0},
    "normal_": {"mean": 0.0, "std": 1.0},
    "normal": {"mean": 0.0, "std": 1.0},
    "bernoulli": {"input": None},
    "randint": {"low": 0},
    "randint_like": {"low": 0},
    "random_": {"from": 0},
    "cauchy_": {"median": 0.0, "sigma": 1.0},
    "log_normal_": {"mean": 1.0, "std": 2.0},
}
_WHOLE = frozenset({"poisson", "binomial", "multinomial", "randperm"})
_INTEGERS = frozenset({"randint", "randint_like", "random_"})
CLOSED_FORM = frozenset(_RULES)


def off_cpu(form: Form) -> tuple[str, tuple[Any, ...]]:
    """Kernel and arguments where a keep mask has a kernel of its own."""
    return (form.kernel, form.args) if form.drop is None else ("dropout", (form.drop,))


def real_args(form: Form) -> Form:
    """The form to run on the real view of a complex tensor: half of the variance for each part."""
    if form.kernel != "normal_":
        return form
    mean, std = _mean_std(form.args)
    return Form("normal_", (mean, std / math.sqrt(2.0)), form.generator, after=form.after)
