"""Operators that are drawn whole: the same values and the same state as torch's own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_rng._draw.fill import scope
from vescale_rng._draw.forms import CLOSED_FORM
from vescale_rng._draw.mode import use_sampler
from vescale_rng._draw.source import Source
from vescale_rng._draw.whole import WHOLE, run_whole
from vescale_rng._portable import PortableGenerator
from vescale_rng.errors import UnsupportedRandomOperatorError

RATES = torch.rand(13, 3, generator=torch.Generator().manual_seed(1)) * 40
ARGS: dict[str, tuple[Any, ...]] = {
    "poisson": (RATES,),
    "binomial": (RATES.round(), torch.full_like(RATES, 0.3)),
    "_standard_gamma": (RATES,),
    "_sample_dirichlet": (RATES,),
    "multinomial": (RATES, 3),
    "randperm": (17,),
    "rrelu": (RATES - 20, 0.1, 0.3, True),
}


def test_the_default_generator_given_within_a_block_is_the_blocks() -> None:
    with use_sampler(PortableGenerator(3)):
        wanted = run_whole("randperm", (17,))
    with use_sampler(PortableGenerator(3)):
        assert torch.equal(run_whole("randperm", (17,), {"generator": torch.default_generator}), wanted)
    own = torch.Generator().manual_seed(1)
    with use_sampler(PortableGenerator(3)):
        found = run_whole("randperm", (17,), {"generator": own})
    assert torch.equal(found, torch.randperm(17, generator=own.manual_seed(1)))
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator"):
        run_whole("randperm", (17,), {"generator": 5})


def test_every_operator_has_a_case() -> None:
    assert ARGS.keys() == WHOLE.keys()
    assert not WHOLE.keys() & CLOSED_FORM
    assert all(scope(op) == "global" for op in WHOLE)


@pytest.mark.parametrize("op", ARGS)
def test_same_as_torch(op: str) -> None:
    torch.manual_seed(3)
    torch.randn(1)  # gamma and dirichlet use the normal that waits
    before = torch.get_rng_state()
    expected = getattr(torch, op)(*ARGS[op])
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    torch.set_rng_state(before)
    assert torch.equal(run_whole(op, ARGS[op]), expected)
    assert torch.equal(torch.get_rng_state(), after)
    generator = torch.Generator()
    generator.set_state(before)
    assert torch.equal(run_whole(op, ARGS[op], {"generator": generator}), expected)
    assert torch.equal(generator.get_state(), after)
    assert torch.equal(torch.get_rng_state(), after)  # the default one stays where it was


def test_multinomial_with_replacement_and_names() -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.multinomial(RATES, 9, replacement=True, generator=generator)
    after = generator.get_state()
    kwargs = {"replacement": True, "generator": generator.manual_seed(5)}
    assert torch.equal(run_whole("multinomial", (RATES, 9), kwargs), expected)
    assert torch.equal(generator.get_state(), after)


class Bare:
    """A sampler without operators that are drawn whole."""

    def source(self, op: str, dtype: Any, device: Any, shape: Any, stride: Any, args: Any) -> Source:
        raise AssertionError(op)

    def save(self) -> object:
        return None

    def restore(self, token: object) -> None:
        raise AssertionError(token)


def test_samplers_without_such_operators() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with (
        use_sampler(Bare()),
        pytest.raises(
            UnsupportedRandomOperatorError, match="poisson is not defined for Bare; draw it outside of the b"
        ),
    ):
        run_whole("poisson", (RATES,))
    with pytest.raises(UnsupportedRandomOperatorError, match="randperm is not defined for Bare"):
        run_whole("randperm", (3,), {"generator": Bare()})
    assert torch.equal(torch.get_rng_state(), before)
    with use_sampler(Bare()):  # a torch.Generator draws all the same
        assert run_whole("poisson", (RATES,), {"generator": torch.Generator()}).shape == RATES.shape


def test_samplers_with_some() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    given = run_whole("randperm", (9,), {"generator": PortableGenerator(1)})
    assert sorted(given.tolist()) == list(range(9))
    with use_sampler(PortableGenerator(1)):
        assert torch.equal(run_whole("randperm", (9,)), given)
        with pytest.raises(UnsupportedRandomOperatorError, match="poisson has no portable form"):
            run_whole("poisson", (RATES,))
    assert torch.equal(torch.get_rng_state(), before)
