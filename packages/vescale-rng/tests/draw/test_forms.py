"""Spellings of random operators, reduced to kernels: what a kernel gets is what torch's dispatcher would hand it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_rng._draw.forms import CLOSED_FORM, Form, check_std, off_cpu, real_args, resolve, scale_normal
from vescale_rng.errors import RandomError, UnsupportedRandomOperatorError


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "kernel", "given"),
    [
        ("rand", (), None, "uniform_", ()),
        ("rand_like", (), {}, "uniform_", ()),
        ("uniform_", (), {"to": 3.0}, "uniform_", (0.0, 3.0)),
        ("uniform_", (-1.0,), {"to": 3.0}, "uniform_", (-1.0, 3.0)),
        ("randn", (), None, "normal_", ()),
        ("normal_", (), {"std": 2.0}, "normal_", (0.0, 2.0)),
        ("normal", (1.0, 2.0), None, "normal_", (1.0, 2.0)),
        ("normal", (), {"mean": 3.0}, "normal_", (3.0, 1.0)),
        ("randint", (9,), None, "random_", (0, 9)),
        ("randint", (3, 9), None, "random_", (3, 9)),
        ("randint", (), {"high": 9}, "random_", (0, 9)),
        ("randint_like", (), {"low": 2, "high": 9}, "random_", (2, 9)),
        ("random_", (), None, "random_", ()),
        ("random_", (9,), None, "random_", (9,)),
        ("random_", (), {"to": 9}, "random_", (0, 9)),
        ("random_", (), {"from": 3, "to": None}, "random_", (3, None)),
        ("bernoulli_", (), None, "bernoulli_", (0.5,)),
        ("bernoulli_", (), {"p": 0.2}, "bernoulli_", (0.2,)),
        ("bernoulli", (0.2,), None, "bernoulli_", (0.2,)),
        ("bernoulli", (None, 0.2), None, "bernoulli_", (0.2,)),
        ("bernoulli", (), {"p": 0.2}, "bernoulli_", (0.2,)),
        ("dropout", (0.25,), None, "bernoulli_", (0.75,)),
        ("exponential_", (), {"lambd": 2.0}, "exponential_", (2.0,)),
        ("cauchy_", (), {"sigma": 2.0}, "cauchy_", (0.0, 2.0)),
        ("log_normal_", (), {"std": 1.0}, "log_normal_", (1.0, 1.0)),
        ("geometric_", (0.3,), None, "geometric_", (0.3,)),
    ],
)
def test_kernel_and_arguments(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, kernel: str, given: tuple[Any, ...]
) -> None:
    form = resolve(op, args, kwargs)
    assert (form.kernel, form.args, form.generator) == (kernel, given, None)


def test_defaults_are_those_of_torch() -> None:
    """A call with one named argument draws what torch draws with it."""
    for op, kwargs in (
        ("uniform_", {"to": 3.0}),
        ("normal_", {"std": 2.0}),
        ("cauchy_", {"sigma": 2.0}),
        ("log_normal_", {"std": 1.0}),
    ):
        generator = torch.Generator().manual_seed(0)
        expected = getattr(torch.empty(20), op)(**kwargs, generator=generator)
        form = resolve(op, (), {**kwargs, "generator": generator.manual_seed(0)})
        assert form.generator is generator
        assert torch.equal(getattr(torch.empty(20), form.kernel)(*form.args, generator=generator), expected)


def test_all_closed_forms_name_a_method_of_tensors() -> None:
    required: dict[str, tuple[Any, ...]] = {
        "randint": (9,), "randint_like": (9,), "dropout": (0.5,), "geometric_": (0.5,),
        "bernoulli": (0.5,),
    }  # fmt: skip
    for op in CLOSED_FORM:
        form = resolve(op, required.get(op, ()), None)
        torch.empty(3).__getattribute__(form.kernel)(*form.args)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "text"),
    [
        ("uniform_", (0.0, 1.0, 2.0), None, r"uniform_ takes from, to; got 3 arguments"),
        ("rand", (3,), None, r"rand takes no arguments; got 1 arguments: \(3,\)"),
        ("rand", (), {"dtype": torch.float32}, r"rand: unexpected argument dtype=torch.float32; it takes none"),
        ("uniform_", (0.0,), {"from": 1.0}, r"uniform_: unexpected argument from=1.0; it takes from, to"),
        ("randint", (), None, r"randint takes low, high; got 0 arguments"),
        ("randint", (), {"low": 2}, r"randint: missing argument 'high' beside low=2"),
        ("random_", (), {"from": 2}, r"random_: missing argument 'to' beside from=2"),
        ("geometric_", (), None, r"geometric_ takes p; got 0 arguments"),
        ("dropout", (), {}, r"dropout takes p; got 0 arguments"),
        ("bernoulli", (), None, r"bernoulli: missing argument 'p'"),
    ],
)
def test_wrong_arguments(op: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        resolve(op, args, kwargs)


def test_dropout_checks_its_chance() -> None:
    for p in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
            resolve("dropout", (p,), None)


@pytest.mark.parametrize("op", ["rrelu", "nonsense", "_standard_gamma"])
def test_no_closed_form(op: str) -> None:
    with pytest.raises(UnsupportedRandomOperatorError, match=f"{op}: no closed form.*Closed forms: bernoulli, "):
        resolve(op, (), None)


@pytest.mark.parametrize(
    ("op", "text"),
    [
        ("uniform", "did you mean 'uniform_'"),
        ("exponential", "did you mean 'exponential_'"),
        ("poisson", "vescale_rng.poisson draws it whole"),
        ("binomial", "vescale_rng.binomial draws it whole"),
        ("multinomial", "vescale_rng.multinomial draws it whole"),
        ("randperm", "vescale_rng.randperm draws it whole"),
        ("trunc_normal_", r"vescale_rng.init_\(torch.nn.init.trunc_normal_, local, shape, part=...\)"),
        ("kaiming_uniform_", r"vescale_rng.init_\(torch.nn.init.kaiming_uniform_, "),
        (5, "op: expected the name of one of torch's operators"),
    ],
)
def test_what_to_call_instead(op: Any, text: str) -> None:
    with pytest.raises(UnsupportedRandomOperatorError, match=text):
        resolve(op, (), None)


def test_a_tensor_as_the_chance_of_dropout_is_a_number() -> None:
    """As in torch's dropout; as a tensor of chances it would draw one word per element instead of two."""
    form = resolve("dropout", (torch.tensor(0.25),), None)
    assert (form.args, form.drop) == ((0.75,), 0.25)
    assert not isinstance(form.drop, Tensor)


def test_parameters_lose_their_gradients() -> None:
    p = torch.full((3,), 0.5, requires_grad=True)
    (given,) = resolve("bernoulli_", (p,), None).args
    assert not given.requires_grad
    form = resolve("normal", (p, p), None)
    assert form.after is not None
    assert not any(a.requires_grad for a in form.after)


def test_normal_of_tensors_scales_after_the_draw() -> None:
    mean, std = torch.randn(50), torch.rand(50)
    for m, s in ((mean, 0.5), (2.0, std), (mean, std)):
        generator = torch.Generator().manual_seed(4)
        expected = torch.normal(m, s, generator=generator)
        form = resolve("normal", (m, s), None)
        out = torch.empty(50).normal_(*form.args, generator=generator.manual_seed(4))
        assert form.after is not None
        scale_normal(out, *form.after)
        assert torch.equal(out, expected)


def test_negative_and_missing_stds() -> None:
    for bad in (torch.tensor([1.0, -1.0]), torch.tensor([math.nan])):
        with pytest.raises(RuntimeError, match="normal expects all elements"):
            torch.normal(0.0, bad)
        with pytest.raises(RandomError, match="normal expects all elements to be at least 0"):
            check_std(bad)
    check_std(torch.zeros(2))
    check_std(torch.empty(0))
    check_std(None)


def test_a_keep_mask_has_a_kernel_of_its_own_elsewhere() -> None:
    assert off_cpu(resolve("dropout", (0.25,), None)) == ("dropout", (0.25,))
    assert off_cpu(resolve("bernoulli_", (0.75,), None)) == ("bernoulli_", (0.75,))


@pytest.mark.parametrize("args", [(), (1.0,), (0.5, 3.0)])
def test_complex_normals_share_their_variance(args: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(9)
    expected = torch.empty(40, dtype=torch.complex64).normal_(*args, generator=generator)
    form = real_args(Form("normal_", args))
    out = torch.empty(40, 2).normal_(*form.args, generator=generator.manual_seed(9))
    assert torch.equal(torch.view_as_complex(out), expected)
    assert real_args(Form("uniform_", (0.0, 2.0))) == Form("uniform_", (0.0, 2.0))
