"""The portable generator's state, by itself and inside torch's default generator."""

from __future__ import annotations

import pytest
import torch

from vescale_rng import PortableGenerator, portable
from vescale_rng._portable.laws import make_law
from vescale_rng._portable.source import PortableSource
from vescale_rng.errors import RandomError, UnsupportedRandomOperatorError

CPU = torch.device("cpu")


def draw(generator: PortableGenerator, n: int = 5) -> torch.Tensor:
    source = generator.source("normal_", torch.float32, CPU, (n,), (1,), ())
    out = torch.empty(n)
    source.emit(out, 0, ())
    source.finish()
    return out


def test_every_call_is_one_step():
    g = PortableGenerator(4)
    for i, n in enumerate((1, 10_000, 0, 3)):
        assert g.counter == i
        draw(g, n)
    assert g.counter == 4
    assert g.initial_seed() == 4


def test_numbers_follow_seed_and_counter():
    g = PortableGenerator(4)
    first, second = draw(g), draw(g)
    assert torch.equal(draw(PortableGenerator(4, counter=1)), second)
    assert torch.equal(draw(g.manual_seed(4)), first)
    g.counter = 1
    assert torch.equal(draw(g), second)
    expected = torch.empty(5)
    PortableSource(make_law("normal_", torch.float32, ()), 5, 4, 1, lambda: None).emit(expected, 0, ())
    assert torch.equal(expected, second)


def test_state_goes_from_one_generator_to_another():
    g = PortableGenerator(2**64 - 1, counter=2**63 + 5)
    state = g.get_state()
    assert state.dtype == torch.uint8
    assert state.numel() == 24
    other = PortableGenerator()
    other.set_state(state.clone())
    assert (other.initial_seed(), other.counter) == (2**64 - 1, 2**63 + 5)
    assert torch.equal(draw(other), draw(g))


def test_counter_wraps():
    g = PortableGenerator(0, counter=2**64 - 1)
    draw(g)
    assert g.counter == 0


def test_save_and_restore():
    g = PortableGenerator(1)
    token = g.save()
    first = draw(g)
    g.restore(token)
    assert g.counter == 0
    assert torch.equal(draw(g), first)


def test_negative_seeds_wrap():
    assert PortableGenerator(-1).initial_seed() == 2**64 - 1
    assert repr(PortableGenerator(-(2**63), counter=3)) == f"PortableGenerator({2**63}, counter=3)"


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_wrong_seeds(seed):
    with pytest.raises(RandomError, match="seed has to be within"):
        PortableGenerator(seed)
    with pytest.raises(RandomError, match="seed has to be within"):
        PortableGenerator().manual_seed(seed)


def test_wrong_counters():
    with pytest.raises(RandomError, match="counter has to be within"):
        PortableGenerator(0, counter=-1)
    g = PortableGenerator(0, counter=9)
    with pytest.raises(RandomError, match="counter has to be within"):
        g.counter = 2**64
    assert g.counter == 9


def test_wrong_states():
    g = PortableGenerator(5, counter=6)
    for state in (torch.zeros(24, dtype=torch.uint8), torch.get_rng_state(), g.get_state().int()):
        with pytest.raises(RandomError, match="state"):
            g.set_state(state)
    assert (g.initial_seed(), g.counter) == (5, 6)


def test_unsupported_operators_leave_the_state():
    g = PortableGenerator(0)
    with pytest.raises(UnsupportedRandomOperatorError, match="poisson"):
        g.source("poisson", torch.float32, CPU, (3,), (1,), ())
    with pytest.raises(UnsupportedRandomOperatorError, match="binomial"):
        g.whole("binomial", (), {})
    assert g.counter == 0


def test_does_not_touch_the_default_generator():
    before = torch.get_rng_state()
    draw(PortableGenerator(1).manual_seed(2))
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_types():
    for value in (1.5, "a", None, torch.tensor(1.5)):
        with pytest.raises(TypeError, match="seed: expected an integer"), portable(value):
            pass
        with pytest.raises(TypeError, match="seed: expected an integer"):
            PortableGenerator(3).manual_seed(value)
        with pytest.raises(TypeError, match="counter: expected an integer"):
            PortableGenerator(3, counter=value)
    for state in (b"x" * 24, None, [1]):
        with pytest.raises(TypeError, match="state: expected the tensor"):
            PortableGenerator(3).set_state(state)
    assert PortableGenerator(torch.tensor(3)).initial_seed() == 3


def test_what_to_do_about_operators_without_a_portable_form():
    with portable(3) as g:
        with pytest.raises(UnsupportedRandomOperatorError, match=r"outside of the block or.* of its own$"):
            torch.poisson(torch.ones(3))
        own = torch.Generator().manual_seed(1)
        assert torch.poisson(torch.ones(3), generator=own).shape == (3,)
        assert g.counter == 0
