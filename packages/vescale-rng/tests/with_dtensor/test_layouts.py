"""Layouts in which a rank cannot see the order that one device has in memory, and factories, against plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("vescale_dtensor")

import vescale_dtensor as vd
import vescale_rng
from vescale_dtensor import DTensor, distribute_tensor
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements

FOUR = pytest.mark.ranks(4, pool=True)


def _window(whole: Tensor, x: DTensor) -> Tensor:
    for dim, (offset, size) in enumerate(zip(x.local_offset, x.local_shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def _same(actual: Any, expected: Tensor, what: Any) -> None:
    assert isinstance(actual, DTensor), what
    assert torch.equal(actual.to_local(), _window(expected, actual)), what


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose": lambda x: x.t(),
    "computed": lambda x: x.t() * 2,
    "twice": lambda x: (x.t() + 1).relu(),
    "clone": lambda x: x.t().clone(),
    "broadcast": lambda x: x.t() + torch.ones_like(x.t()).sum(0),
    "slice": lambda x: x.t()[:, :3] * 1,  # without the product, a draw in place would be refused: it is a copy
    "rows": lambda x: x[::2].t().clone(),
    "unsqueezed": lambda x: x.unsqueeze(1).permute(2, 1, 0),
}
DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.clone().normal_(),
    "in place": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "two dropouts": lambda x: F.dropout(F.dropout(x + 1, 0.2), 0.2),
    "rand_like": torch.rand_like,
}


@FOUR
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("view", VIEWS)
def test_transposed_tensors_of_few_rows(view: str, draw: str) -> None:
    # Of 4 to 6 rows over 4 ranks, a rank holds two, one or none: a matrix of one row is contiguous however it lies.
    for axes in ((4,), (2, 2)):
        mesh = cached_mesh(*axes)
        for shape in ((4, 6), (5, 6), (6, 3), (2, 2)):
            value = torch.arange(1.0, shape[0] * shape[1] + 1).view(shape)
            codes = all_codes(2, len(axes))
            for code in codes if len(axes) == 1 else codes[::3]:
                torch.manual_seed(3)
                expected = DRAWS[draw](VIEWS[view](value.clone()))
                state = torch.get_rng_state()
                torch.manual_seed(3)
                with implicit_communication("allow"):
                    actual = DRAWS[draw](VIEWS[view](distribute_tensor(value, mesh, placements(code))))
                what = (code, shape)
                assert torch.equal(torch.get_rng_state(), state), what
                _same(actual, expected, what)


@FOUR
@pytest.mark.parametrize("code", ["S0 I", "S1 S2", "I S1", "S2 S2", "S0 S1"])
def test_draws_after_redistribution(code: str) -> None:
    mesh = cached_mesh(2, 2)
    for value in (
        torch.rand(5, 4, 3).permute(2, 0, 1),
        torch.rand(6, 4, 3).transpose(0, 1),
        torch.rand(4, 6, 3, 2).to(memory_format=torch.channels_last),
    ):
        x = distribute_tensor(value, mesh, placements(code))
        for target in ("I I", "S0 S1", "S1 I", "I S2", "S1 S1"):
            y = x.redistribute(placements=placements(target))
            torch.manual_seed(2)
            expected = value.clone().normal_()
            torch.manual_seed(2)
            _same(y.clone().normal_(), expected, (code, target))


@FOUR
@pytest.mark.parametrize("axes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_factories(axes: tuple[int, ...], own: bool) -> None:
    mesh = cached_mesh(*axes)
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("rand", (), {}), ("randn", (), {}), ("randint", (5,), {}), ("randint", (-4, 1 << 30), {"dtype": torch.int32}),
        ("rand", (), {"dtype": torch.float64}), ("randn", (), {"dtype": torch.bfloat16}),
        ("randn", (), {"dtype": torch.complex64}),
    ]  # fmt: skip
    for name, bounds, kwargs in cases:
        for shape in ((8, 8), (5, 3), (7,), (), (0, 2), (3, 1, 5), (6, 2, 3)):
            codes = all_codes(len(shape), len(axes))
            for number, code in enumerate(codes if len(axes) == 1 else codes[::3]):
                results = []
                for ours in (False, True):
                    torch.manual_seed(number)
                    generator = torch.Generator().manual_seed(number) if own else torch.default_generator
                    torch.randn(3, generator=generator)
                    more: dict[str, Any] = {"generator": generator} if own else {}
                    if ours:
                        more |= {"device_mesh": mesh, "placements": placements(code)}
                    args = (*bounds, shape) if name == "randint" else (shape,)
                    made = getattr(vd if ours else torch, name)(*args, **kwargs, **more)
                    results.append((made, generator.get_state(), torch.get_rng_state()))
                (expected, *states), (actual, *ours_states) = results
                assert actual.dtype == expected.dtype
                _same(actual, expected, (name, shape, code))
                assert all(map(torch.equal, states, ours_states)), (name, shape, code)


@FOUR
def test_pending_sums() -> None:
    mesh = cached_mesh(2, 2)
    for shape in ((8, 8), (5, 3)):
        torch.manual_seed(1)
        expected = torch.randn(shape)
        torch.manual_seed(1)
        actual = vd.randn(shape, device_mesh=mesh, placements=placements("P S1"))
        assert torch.equal(actual.full_tensor(), expected)
        torch.manual_seed(1)
        x = distribute_tensor(torch.zeros(shape), mesh, placements("S0 P")).normal_()
        assert torch.equal(x.full_tensor(), expected)


@FOUR
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("codes", ["I", "S0", "S1", "S2"])
def test_attention_dropout(codes: str, mask: bool) -> None:
    mesh = cached_mesh(4)
    q, k, v = (torch.rand(3, 4, 5, 8, dtype=torch.float64) for _ in range(3))
    options: dict[str, Any] = {"dropout_p": 0.3}
    options |= {"attn_mask": torch.ones(5, 5).tril().bool()} if mask else {"is_causal": True}
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    ours = [distribute_tensor(t, mesh, placements(codes)) for t in (q, k, v)]
    if mask:
        options["attn_mask"] = distribute_tensor(options["attn_mask"], mesh)
    with implicit_communication("allow"):
        actual = F.scaled_dot_product_attention(*ours, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-12)


@FOUR
def test_distributions() -> None:
    mesh = cached_mesh(2, 2)
    scale = torch.rand(6, 5) + 0.5
    kinds: dict[str, Callable[[Tensor], torch.distributions.Distribution]] = {
        "Normal": lambda s: torch.distributions.Normal(s, s, validate_args=False),
        "Bernoulli": lambda s: torch.distributions.Bernoulli(s / 2, validate_args=False),
        "Poisson": lambda s: torch.distributions.Poisson(s, validate_args=False),
        "Gumbel": lambda s: torch.distributions.Gumbel(s, s, validate_args=False),
        "Gamma": lambda s: torch.distributions.Gamma(s, s, validate_args=False),
        "Beta": lambda s: torch.distributions.Beta(s, s, validate_args=False),
        "Exponential": lambda s: torch.distributions.Exponential(s, validate_args=False),
        "Laplace": lambda s: torch.distributions.Laplace(s, s, validate_args=False),
        "Uniform": lambda s: torch.distributions.Uniform(s, s + 1, validate_args=False),
        "Categorical": lambda s: torch.distributions.Categorical(s, validate_args=False),
        "Dirichlet": lambda s: torch.distributions.Dirichlet(s, validate_args=False),
        "Cauchy": lambda s: torch.distributions.Cauchy(s, s, validate_args=False),
        "Geometric": lambda s: torch.distributions.Geometric(s / 2, validate_args=False),
        "StudentT": lambda s: torch.distributions.StudentT(s, validate_args=False),
    }
    for name, make in kinds.items():
        for code in ("S0 I", "S0 S1", "S1 S0", "I I"):
            for shape in ((), (3,)):
                torch.manual_seed(4)
                expected = make(scale).sample(shape)
                state = torch.get_rng_state()
                torch.manual_seed(4)
                # Some kinds draw into plain tensors of their own making, which are alike on all ranks.
                with implicit_communication("allow"), vd.plain_tensors("replicate"):
                    actual = make(distribute_tensor(scale, mesh, placements(code))).sample(shape)
                assert torch.equal(torch.get_rng_state(), state), (name, code, shape)
                _same(actual, expected, (name, code, shape))


@FOUR
def test_portable_numbers() -> None:
    mesh = cached_mesh(2, 2)
    value = torch.linspace(0.1, 0.9, 40).view(8, 5)
    for name, draw in {
        "dropout": lambda x: F.dropout(x, 0.3),
        "randn_like": torch.randn_like,
        "uniform_": lambda x: x.clone().uniform_(2, 3),
        "bernoulli": torch.bernoulli,
        "multinomial": lambda x: torch.multinomial(x, 2),
    }.items():
        for code in ("S0 S1", "S1 I", "I S0", "I I"):
            with vescale_rng.portable(5) as generator:
                expected = draw(value)
                draws = generator.counter
            ours = distribute_tensor(value, mesh, placements(code))
            draw(ours)  # what is prepared without the block must not be used in it
            with vescale_rng.portable(5) as generator, implicit_communication("allow"):
                _same(draw(ours), expected, (name, code))
                assert generator.counter == draws


@FOUR
def test_emulated_gpu() -> None:
    mesh = cached_mesh(2, 2)
    value = torch.ones(40, 30)
    for code in ("S0 S1", "S1 I", "S1 S0"):
        ours = distribute_tensor(value, mesh, placements(code))
        with vescale_rng.emulate_cuda("A100", seed=3):
            expected = [F.dropout(value, 0.3), torch.rand_like(value), value.clone().random_(0, 9)]
        with vescale_rng.emulate_cuda("A100", seed=3):
            actual = [F.dropout(ours, 0.3), torch.rand_like(ours), ours.clone().random_(0, 9)]
        torch.testing.assert_close(actual[0].to_local(), _window(expected[0], actual[0]))  # scaled by another formula
        for a, e in zip(actual[1:], expected[1:], strict=True):
            _same(a, e, code)
