"""The provider by itself: boxes of a whole tensor against plain torch, without vescale_dtensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from vescale_rng import emulate_cuda, portable
from vescale_rng._provider import Provider
from vescale_rng.errors import UnsupportedRandomOperatorError


class Box(NamedTuple):
    """What a host hands in: no class of vescale_rng."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


OPS: dict[str, tuple[tuple[Any, ...], Callable[[Tensor], Any]]] = {
    "rand": ((), lambda t: t.uniform_()),
    "randn": ((), lambda t: t.normal_()),
    "normal_": ((2.0, 0.5), lambda t: t.normal_(2.0, 0.5)),
    "uniform_": ((-1, 4), lambda t: t.uniform_(-1, 4)),
    "dropout": ((0.25,), lambda t: t.bernoulli_(0.75)),
    "exponential_": ((), lambda t: t.exponential_()),
    "log_normal_": ((), lambda t: t.log_normal_()),
    "random_": ((100,), lambda t: t.random_(100)),
    "randint": ((3, 17), lambda t: t.random_(3, 17)),
}
WHOLE = [
    ((8, 8), (8, 1)), ((8, 8), (1, 8)), ((7, 9), (9, 1)), ((3, 4), (4, 1)), ((2, 3, 4, 5), (60, 1, 15, 3)),
    ((64,), (1,)),
]  # fmt: skip


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    """The whole, halves of each dim, a corner, and nothing."""
    start = (0,) * len(shape)
    found = [Box(start, shape)]
    for d, n in enumerate(shape):
        found.append(
            Box(tuple(n // 2 if i == d else 0 for i in range(len(shape))), (*shape[:d], n - n // 2, *shape[d + 1 :]))
        )
        found.append(Box(start, (*shape[:d], 0, *shape[d + 1 :])))
    found.append(Box(tuple(n - 1 for n in shape), (1,) * len(shape)))
    return found


def _window(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_boxes_equal_the_whole(op: str, dtype: torch.dtype) -> None:
    args, draw = OPS[op]
    provider = Provider()
    assert provider.scope(op) == "local"
    for shape, stride in WHOLE:
        for box in _boxes(shape):
            expected = torch.empty_strided(shape, stride, dtype=dtype)
            local = torch.full(box.shape, -7.0, dtype=dtype)
            prepared = provider.prepare(op, local, shape, stride, [box])
            torch.manual_seed(3)
            torch.randn(3)
            start = torch.get_rng_state()
            draw(expected)
            state = torch.get_rng_state()
            for run in ("fill", "prepared", "prepared again"):
                torch.set_rng_state(start)
                local.fill_(-7)
                if run == "fill":
                    provider.fill(op, local, shape, stride, [box], args, {})
                else:
                    prepared(local, args, {})
                assert torch.equal(local, _window(expected, box)), (run, shape, stride, box)
                assert torch.equal(torch.get_rng_state(), state), (run, shape, stride, box)


@pytest.mark.parametrize("local_stride", [(1, 4), (12, 2), (10, 1)])
def test_local_tensors_of_any_strides(local_stride: tuple[int, int]) -> None:
    box, provider = Box((4, 2), (4, 5)), Provider()
    for op, stride in (("rand", (8, 1)), ("randn", (8, 1)), ("rand", (1, 8)), ("randn", (1, 8))):
        memory = torch.zeros(100)
        local = memory.as_strided(box.shape, local_stride, 7)
        whole = torch.empty_strided((8, 8), stride)
        prepared = provider.prepare(op, local, (8, 8), stride, [box])
        for seed in (1, 2):
            torch.manual_seed(seed)
            OPS[op][1](whole)
            torch.manual_seed(seed)
            prepared(local, (), {})
            assert torch.equal(local, _window(whole, box)), (op, stride, seed)
        local.zero_()
        assert not memory.any()


def test_own_generator_and_changing_parameters() -> None:
    box = Box((2, 0), (3, 8))
    local = torch.empty(box.shape)
    prepared = Provider().prepare("normal_", local, (8, 8), (8, 1), [box])
    own, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    before = torch.get_rng_state()
    for step in range(200):
        whole = torch.empty(8, 8).normal_(step % 3, 1.0 / (1 + step), generator=other)
        prepared(local, (step % 3, 1.0 / (1 + step)), {"generator": own})
        assert torch.equal(local, _window(whole, box))
    assert torch.equal(own.get_state(), other.get_state())
    assert torch.equal(torch.get_rng_state(), before)


def test_tensor_parameters() -> None:
    chances, box = torch.linspace(0.1, 0.9, 64).view(8, 8), Box((0, 3), (8, 2))
    local = torch.empty(8, 2)
    prepared = Provider().prepare("bernoulli", local, (8, 8), (8, 1), [box])
    for _ in range(2):
        torch.manual_seed(1)
        expected = torch.bernoulli(chances)
        torch.manual_seed(1)
        prepared(local, (_window(chances, box),), {})
        assert torch.equal(local, _window(expected, box))


def test_a_refused_parameter_leaves_the_generator_as_it_was() -> None:
    local = torch.empty(2, 8)
    prepared = Provider().prepare("exponential_", local, (8, 8), (8, 1), [Box((4, 0), (2, 8))])
    before = torch.get_rng_state()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exponential_ expects lambda"):
            prepared(local, (-1.0,), {})
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("block", [lambda: portable(3), lambda: emulate_cuda("H100 SXM")], ids=["portable", "emulate"])
def test_blocks_of_other_numbers_reach_what_was_prepared(block: Callable[[], Any]) -> None:
    box = Box((4, 0), (4, 8))
    local = torch.empty(box.shape)
    prepared = Provider().prepare("rand", local, (8, 8), (8, 1), [box])
    torch.manual_seed(3)
    prepared(local, (), {})
    plain = local.clone()
    with block():
        torch.manual_seed(3)
        expected = torch.rand(8, 8)
        torch.manual_seed(3)
        prepared(local, (), {})
    assert torch.equal(local, _window(expected, box))
    assert not torch.equal(local, plain)


def test_operators_that_need_the_whole() -> None:
    provider = Provider()
    assert provider.scope("poisson") == "global"
    rates = torch.linspace(1, 9, 12).view(3, 4)
    torch.manual_seed(1)
    expected = torch.poisson(rates)
    torch.manual_seed(1)
    whole = torch.empty(3, 4)
    provider.fill("poisson", whole, (3, 4), (4, 1), [Box((0, 0), (3, 4))], (rates,), {})
    assert torch.equal(whole, expected)
    with pytest.raises(UnsupportedRandomOperatorError, match="fractional_max_pool2d"):
        provider.scope("fractional_max_pool2d")
