"""Jumps over GF(2) against stepping with torch and against arithmetic written out in the slowest way."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng._streams.jump import PHI, Polynomials, jump_blocks, power_of_x
from vescale_rng._streams.mt19937 import Mt19937State, set_cached_normal

Step = Callable[[torch.Generator, int], None]


def _product(p: int, q: int) -> int:
    """p q mod phi, one bit at a time."""
    total = 0
    while q:
        if q & 1:
            total ^= p
        q >>= 1
        p <<= 1
        if p >> 19937:
            p ^= PHI
    return total


def test_characteristic_polynomial() -> None:
    assert PHI.bit_length() - 1 == 19937
    assert bin(PHI).count("1") == 135  # as published by the authors


def test_small_powers() -> None:
    for exponent in (0, 1, 2, 5000, 16383, 16384, 19936):
        assert power_of_x(exponent) == 1 << exponent
    assert power_of_x(19937) == PHI ^ (1 << 19937)
    assert power_of_x(19938) == _product(PHI ^ (1 << 19937), 0b10)


@pytest.mark.parametrize(("a", "b"), [(19936, 19936), (10**5, 10**6 + 7), (10**9, 10**12), (2**61 - 1, 2**64)])
def test_powers_add_up(a: int, b: int) -> None:
    assert power_of_x(a + b) == _product(power_of_x(a), power_of_x(b))


@pytest.mark.parametrize("used", [0, 1, 2, 311, 623, 624, 625, 1248])
@pytest.mark.parametrize("blocks", [1, 2, 3, 31, 32, 33, 34, 100, 5000])
def test_jump_is_stepping(step: Step, used: int, blocks: int) -> None:
    jumped, stepped = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    step(jumped, used)
    step(stepped, used + 624 * blocks)
    jump_blocks(jumped, blocks)
    assert torch.equal(jumped.get_state(), stepped.get_state())


@pytest.mark.parametrize("used", [0, 1, 624])
def test_no_blocks(step: Step, used: int) -> None:
    generator = torch.Generator().manual_seed(9)
    step(generator, used)
    before = generator.get_state()
    jump_blocks(generator, 0)
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match="blocks"):
        jump_blocks(generator, -1)
    assert torch.equal(generator.get_state(), before)


def test_arbitrary_key() -> None:
    """A key that no seed leads to, with ones in the bits of its first word that take no part in the recurrence."""
    generator = torch.Generator().manual_seed(1)
    state = Mt19937State.of(generator)
    state.key = [random.Random(i).getrandbits(32) | 0x7FFFFFFF for i in range(624)]
    state.used = 624
    state.restore(generator)
    stepped = torch.Generator()
    stepped.set_state(generator.get_state())
    jump_blocks(generator, 3)
    torch.empty(3 * 624).uniform_(generator=stepped)
    assert torch.equal(generator.get_state(), stepped.get_state())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10**15), st.integers(1, 10**15), st.integers(0, 2000), st.integers(-(2**63), 2**64 - 1))
def test_jumps_add_up(first: int, second: int, used: int, seed: int) -> None:
    once, twice = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    for generator in (once, twice):
        torch.empty(used).uniform_(generator=generator)
    jump_blocks(once, first + second)
    jump_blocks(twice, first)
    jump_blocks(twice, second)
    assert torch.equal(once.get_state(), twice.get_state())


def test_cached_normal_and_seed_stay(step: Step) -> None:
    jumped, stepped = torch.Generator().manual_seed(-3), torch.Generator().manual_seed(-3)
    for generator in (jumped, stepped):
        torch.randn(3, generator=generator)
        set_cached_normal(generator, 0.5)
    jump_blocks(jumped, 40)
    step(stepped, 40 * 624)
    assert torch.equal(jumped.get_state(), stepped.get_state())
    assert jumped.initial_seed() == 2**64 - 3


def test_polynomials_are_kept_and_forgotten() -> None:
    kept = Polynomials(limit=3)
    assert not kept.worth(40)
    assert kept.worth(40)
    assert kept.get(40) == power_of_x(624 * 39)
    assert kept.get(40) is kept.get(40)
    for blocks in (41, 42, 43):
        kept.get(blocks)
    assert not kept.worth(40)
    assert kept.worth(43)


def test_threads_share_polynomials() -> None:
    shared = Polynomials(limit=4)
    counts = [100 + i % 7 for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(shared.get, counts))
    expected = {blocks: power_of_x(624 * (blocks - 1)) for blocks in set(counts)}
    assert got == [expected[blocks] for blocks in counts]


def test_threads_jump() -> None:
    def jump(i: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(i % 3)
        jump_blocks(generator, 200 + i % 5)
        return generator.get_state()

    alone = [jump(i) for i in range(30)]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(jump, range(30)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
