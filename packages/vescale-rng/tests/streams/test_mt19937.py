"""The bytes of a CPU generator's state against torch's behaviour and numpy's key."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from vescale_rng._streams.mt19937 import (
    Mt19937State,
    cached_normal,
    cached_normal_value,
    clear_cached_normal,
    set_cached_normal,
)
from vescale_rng.errors import RandomError


def _generator(seed: int, words: int = 0) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words).uniform_(generator=generator)
    return generator


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 7 + (5 << 32), 2**63, 2**64 - 1, -1, -(2**63)])
def test_seed(seed: int) -> None:
    state = Mt19937State.of(_generator(seed))
    assert state.seed == seed % 2**64
    assert state.fresh
    assert (state.left, state.next, state.used) == (1, 0, 0)


@pytest.mark.parametrize("words", [1, 2, 623, 624, 625, 1247, 1248, 5000])
def test_place_in_block_and_key(words: int) -> None:
    state = Mt19937State.of(_generator(11, words))
    reference = np.random.RandomState(11)
    reference.randint(0, 2**32, words, dtype=np.uint32)
    _, key, position, *_ = reference.get_state()
    assert state.key == tuple(key.tolist())
    assert state.used == state.next == position
    assert state.left == 625 - position
    assert not state.fresh


def test_fresh_key_is_the_seeded_key() -> None:
    assert Mt19937State.of(_generator(11)).key == tuple(np.random.RandomState(11).get_state()[1].tolist())


def test_write_back() -> None:
    """A state put together from another one's key and place makes a generator go on like the other one."""
    source, target = _generator(3, 1000), _generator(4, 5)
    read, state = Mt19937State.of(source), Mt19937State.of(target)
    state.key, state.used = read.key, read.used
    state.restore(target)
    assert Mt19937State.of(target).seed == 4
    assert torch.equal(torch.rand(2000, generator=target), torch.rand(2000, generator=source))
    state.key_bytes = Mt19937State.of(_generator(4, 5)).key_bytes
    state.used = 5
    assert torch.equal(state.tensor, _generator(4, 5).get_state())


def test_changes_go_through_to_the_tensor_and_clones_are_apart() -> None:
    tensor = _generator(3, 1000).get_state()
    before = tensor.clone()
    state = Mt19937State(tensor)
    state.clone().used = 1
    assert torch.equal(tensor, before)
    state.used = 1
    assert not torch.equal(tensor, before)


def test_values_out_of_range() -> None:
    state = Mt19937State.of(_generator(0, 3))
    for used in (0, 625, -1):
        with pytest.raises(ValueError, match="used"):
            state.used = used
    with pytest.raises(ValueError, match="key"):
        state.key = [1, 2]
    with pytest.raises(ValueError, match="key_bytes"):
        state.key_bytes = b"12"
    assert torch.equal(state.tensor, _generator(0, 3).get_state())


@pytest.mark.parametrize("count", [1, 2, 3, 7, 15])
def test_cached_normal_is_what_torch_gives_next(count: int) -> None:
    generator = _generator(5)
    torch.randn(count, generator=generator, dtype=torch.float64)
    value = cached_normal_value(generator)
    assert cached_normal(generator) is (count % 2 == 1)
    assert (value is not None) is (count % 2 == 1)
    if value is not None:
        assert torch.randn(1, generator=generator, dtype=torch.float64).item() == value
        assert not cached_normal(generator)


def test_clear_leaves_the_bytes_that_torch_leaves() -> None:
    used, cleared = _generator(5), _generator(5)
    torch.randn(3, generator=used)
    torch.randn(3, generator=cleared)
    torch.randn(1, generator=used)
    clear_cached_normal(cleared)
    assert torch.equal(cleared.get_state(), used.get_state())
    clear_cached_normal(cleared)
    assert torch.equal(cleared.get_state(), used.get_state())


def test_set_cached_normal() -> None:
    generator = _generator(5, 10)
    before = generator.get_state()
    for value in (0.0, 1.25, -math.pi, 1e300):
        set_cached_normal(generator, value)
        assert cached_normal(generator)
        assert torch.randn(1, generator=generator, dtype=torch.float64).item() == value
        assert torch.equal(generator.get_state(), before)
    set_cached_normal(generator, 2.0)
    set_cached_normal(generator, None)
    assert torch.equal(generator.get_state(), before)


class _Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a function mode")


@pytest.mark.parametrize("mode", [_Called, FakeTensorMode, torch.inference_mode])
def test_modes(mode: Callable[[], Any]) -> None:
    generator = _generator(5, 10)
    with mode():
        set_cached_normal(generator, 1.5)
        assert cached_normal(generator)
        assert cached_normal_value(generator) == 1.5
        clear_cached_normal(generator)
        assert not cached_normal(generator)
        assert Mt19937State.of(generator).clone().used == 10
    assert torch.equal(generator.get_state(), _generator(5, 10).get_state())


def test_unknown_layouts() -> None:
    good = _generator(0, 3).get_state()
    with pytest.raises(RandomError, match="5056"):
        Mt19937State(torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(RandomError, match="uint8"):
        Mt19937State(torch.zeros(5056))
    with pytest.raises(RandomError, match="contiguous"):
        Mt19937State(torch.zeros(2 * 5056, dtype=torch.uint8)[::2])
    with pytest.raises(RandomError, match="on meta"):
        Mt19937State(torch.zeros(5056, dtype=torch.uint8, device="meta"))
    with pytest.raises(RandomError, match="seeded=0"):
        Mt19937State(torch.zeros(5056, dtype=torch.uint8))
    for place, value in ((8, 1), (16, 9), (12, 0), (11, 255)):
        bad = good.clone()
        bad[place] = value
        with pytest.raises(RandomError, match="left="):
            Mt19937State(bad)


class _OtherDevice:
    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)


@pytest.mark.parametrize("function", [cached_normal, clear_cached_normal, cached_normal_value])
def test_generator_of_another_device(function: object) -> None:
    with pytest.raises(RandomError, match="16"):
        function(_OtherDevice())  # type: ignore[operator]
