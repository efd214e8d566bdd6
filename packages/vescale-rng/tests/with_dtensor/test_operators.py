"""With vescale_dtensor and vescale_rng installed, sharded random operators equal one device, generator state included.

The oracle is plain torch on the whole tensor. Needs vescale_dtensor: where it is missing, there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("vescale_dtensor")

from vescale_dtensor import DTensor, InterleavedShard, distribute_tensor
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements

pytestmark = pytest.mark.filterwarnings("ignore")

Op = Callable[[Tensor, Any], Any]


def _unit(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values between 0 and 1, all different."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel, dtype=torch.float64).mul_(0.37).frac_() * 0.9 + 0.05).to(dtype).view(shape)


SHAPES: dict[str, Tensor] = {
    "matrix": _unit(8, 8),
    "odd": _unit(7, 9),
    "small": _unit(5, 3),
    "line": _unit(37),
    "transposed": _unit(6, 5).t(),
    "permuted": _unit(4, 3, 5).permute(2, 0, 1),
    "ones": _unit(1, 5, 1, 4),
    "scalar": _unit(),
    "nothing": _unit(0, 3),
}
IMAGES: dict[str, Tensor] = {
    "channels_first": _unit(5, 4, 3, 2),
    "channels_last": _unit(4, 3, 2, 5).to(memory_format=torch.channels_last),
}

ELEMENTWISE: dict[str, Op] = {
    "uniform_": lambda x, g: x.clone().uniform_(-1, 3, generator=g),
    "normal_": lambda x, g: x.clone().normal_(1.0, 2.0, generator=g),
    "random_": lambda x, g: x.clone().random_(generator=g),
    "random_to": lambda x, g: x.clone().random_(9, generator=g),
    "random_from_to": lambda x, g: x.clone().random_(-3, 1 << 29, generator=g),
    "bernoulli_": lambda x, g: x.clone().bernoulli_(0.3, generator=g),
    "bernoulli_tensor": lambda x, g: torch.zeros_like(x).bernoulli_(x, generator=g),
    "bernoulli_double": lambda x, g: torch.zeros_like(x).bernoulli_(x.double(), generator=g),
    "bernoulli": lambda x, g: torch.bernoulli(x, generator=g),
    "bernoulli_p": lambda x, g: torch.bernoulli(x, 0.3, generator=g),
    "exponential_": lambda x, g: x.clone().exponential_(2.0, generator=g),
    "cauchy_": lambda x, g: x.clone().cauchy_(1.0, 2.0, generator=g),
    "log_normal_": lambda x, g: x.clone().log_normal_(0.5, 0.5, generator=g),
    "geometric_": lambda x, g: x.clone().geometric_(0.3, generator=g),
    "normal_mean": lambda x, g: torch.normal(x, 2.0, generator=g),
    "normal_std": lambda x, g: torch.normal(0.5, x, generator=g),
    "normal_both": lambda x, g: torch.normal(x, x, generator=g),
    "rand_like": lambda x, g: torch.rand_like(x),
    "randn_like": lambda x, g: torch.randn_like(x),
    "randint_like": lambda x, g: torch.randint_like(x, 3, 9),
    "dropout": lambda x, g: F.dropout(x, 0.3),
    "dropout_inplace": lambda x, g: F.dropout(x.clone(), 0.3, True, True),
    "dropout_none": lambda x, g: (F.dropout(x, 0.0), F.dropout(x, 1.0), F.dropout(x, 0.5, False))[1],
    "native_dropout": lambda x, g: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout_mask": lambda x, g: torch.native_dropout(x, 0.3, True)[1],
    "native_dropout_0": lambda x, g: torch.native_dropout(x, 0.0, True)[0],
    "native_dropout_1": lambda x, g: torch.native_dropout(x, 1.0, True)[0],
    "alpha_dropout": lambda x, g: F.alpha_dropout(x, 0.3, True),
    "module": lambda x, g: nn.Dropout(0.2)(nn.AlphaDropout(0.1)(x)),
    "rrelu": lambda x, g: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x, g: F.rrelu_(x - 0.5, training=True),
    "poisson": lambda x, g: torch.poisson(x * 20, generator=g),
    "binomial": lambda x, g: torch.binomial(torch.full_like(x, 12.0), x, generator=g),
    "_standard_gamma": lambda x, g: torch._standard_gamma(x * 3, generator=g),
    "two_draws": lambda x, g: (x.clone().normal_(generator=g), x.clone().uniform_(generator=g))[1],
}
MATRICES: dict[str, Op] = {
    "dirichlet": lambda x, g: torch._sample_dirichlet(x + 0.5, generator=g),
    "multinomial": lambda x, g: torch.multinomial(x, 2, generator=g),
    "multinomial_one": lambda x, g: torch.multinomial(x, 1, generator=g),
    "multinomial_replacement": lambda x, g: torch.multinomial(x, 6, True, generator=g),
    "gumbel_hard": lambda x, g: F.gumbel_softmax(x, hard=True, dim=-1),
    "xavier_uniform_": lambda x, g: nn.init.xavier_uniform_(x.clone(), generator=g),
    "xavier_normal_": lambda x, g: nn.init.xavier_normal_(x.clone(), generator=g),
    "kaiming_uniform_": lambda x, g: nn.init.kaiming_uniform_(x.clone(), generator=g),
    "kaiming_normal_": lambda x, g: nn.init.kaiming_normal_(x.clone(), generator=g),
    "init.normal_": lambda x, g: nn.init.normal_(x.clone(), 1.0, 0.02, generator=g),
    "init.uniform_": lambda x, g: nn.init.uniform_(x.clone(), generator=g),
    "trunc_normal_": lambda x, g: nn.init.trunc_normal_(x.clone(), std=1.5, generator=g),
    "trunc_normal_tail": lambda x, g: nn.init.trunc_normal_(x.clone(), mean=5.0, a=2.0, b=3.0, generator=g),
    "orthogonal_": lambda x, g: nn.init.orthogonal_(x.clone(), generator=g),
    "sparse_": lambda x, g: nn.init.sparse_(x.clone(), 0.4, generator=g),
}
FEATURES: dict[str, Op] = {
    "dropout2d": lambda x, g: F.dropout2d(x, 0.5),
    "feature_alpha_dropout": lambda x, g: F.feature_alpha_dropout(x, 0.5, True),
    "dropout1d": lambda x, g: F.dropout1d(x.flatten(2), 0.5),
    "dropout": lambda x, g: F.dropout(x, 0.3),
    "randn_like": lambda x, g: torch.randn_like(x),
    "normal_": lambda x, g: x.clone().normal_(generator=g),
    "in_place_on_a_view": lambda x, g: x.clone().transpose(1, 3).normal_(generator=g),
}
DTYPES = {
    torch.float64: "uniform_ normal_ random_ bernoulli_ exponential_ randn_like rand_like dropout normal_both".split(),
    torch.bfloat16: "uniform_ normal_ random_to bernoulli_ exponential_ randn_like dropout normal_mean".split(),
    torch.float16: "uniform_ normal_ bernoulli geometric_ log_normal_ randn_like rand_like native_dropout".split(),
    torch.complex64: "normal_ rand_like randn_like".split(),
    torch.int32: "random_ random_to random_from_to bernoulli_ geometric_ randint_like".split(),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int32], ids=str)
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
def test_dtypes(dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    for name in DTYPES[dtype]:
        for key in ("matrix", "odd", "small", "transposed"):
            value = SHAPES[key] if dtype != torch.int32 else SHAPES[key] * 9
            _check(ELEMENTWISE[name], value.to(dtype), axes, 5)


def _codes(ndim: int, axes: int, every: int) -> Iterator[str]:
    codes = all_codes(ndim, axes)
    yield from codes if axes == 1 else codes[::every]


def _window(whole: Tensor, x: DTensor) -> Tensor:
    if any(isinstance(placement, InterleavedShard) for placement in x.placements):
        return distribute_tensor(whole, x.device_mesh, x.placements).to_local()
    for dim, (offset, size) in enumerate(zip(x.local_offset, x.local_shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _check(op: Op, whole: Tensor, axes: tuple[int, ...], every: int, rtol: float = 0.0) -> None:
    """Compare an operator with one device: for every placement, with the default and with an own generator."""
    mesh = cached_mesh(*axes)
    for number, code in enumerate(_codes(whole.ndim, len(axes), every)):
        own = torch.Generator() if number % 2 else None
        generator = torch.default_generator if own is None else own
        results = []
        for x in (whole, distribute_tensor(whole, mesh, placements(code))):
            torch.manual_seed(1)
            generator.manual_seed(7)
            torch.rand(5 * number, generator=generator)
            torch.randn(number % 4, generator=generator)  # an odd count leaves a normal number waiting
            with torch.no_grad(), implicit_communication("allow"):
                result = op(x, own)
            results.append((result, generator.get_state(), torch.get_rng_state()))
        (expected, *states), (actual, *own_states) = results
        assert isinstance(actual, DTensor), code
        local, want = actual.to_local(), _window(expected, actual)
        assert local.dtype == want.dtype
        if rtol:
            torch.testing.assert_close(local, want, rtol=rtol, atol=rtol, msg=lambda m, c=code: f"{c}: {m}")
        else:
            assert torch.equal(local, want), (code, tuple(whole.shape), local, want)
        for state, own_state in zip(states, own_states, strict=True):
            assert torch.equal(state, own_state), (code, tuple(whole.shape))


def _check_all(op: Op, values: dict[str, Tensor], axes: tuple[int, ...], rtol: float = 0.0) -> None:
    for value in values.values():
        _check(op, value, axes, 5, rtol)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, axes: tuple[int, ...]) -> None:
    _check_all(ELEMENTWISE[name], SHAPES, axes)


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_on_two_ranks(name: str) -> None:
    _check_all(ELEMENTWISE[name], SHAPES, (2,))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name: str, axes: tuple[int, ...]) -> None:
    _check_all(MATRICES[name], {k: SHAPES[k] for k in ("matrix", "odd", "small", "transposed")}, axes)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", FEATURES)
def test_images(name: str, axes: tuple[int, ...]) -> None:
    _check_all(FEATURES[name], IMAGES, axes)
