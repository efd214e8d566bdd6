"""Which law a draw follows, and that a torch which keeps none of them is drawn whole."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vescale_rng import errors
from vescale_rng._draw import cpu
from vescale_rng._draw.cpu import cpu_source, is_contiguous, law_holds
from vescale_rng._draw.cpu_sources import Blocks, Even, Pairs
from vescale_rng._draw.fill import fill, source_of
from vescale_rng._layout import part_of_flat, part_of_slices

CL = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).stride()


@pytest.fixture
def fresh_caches() -> Iterator[None]:
    """Laws are tried once per process: forget before and after."""

    def forget() -> None:
        cpu._chosen.cache_clear()
        cpu._trusted.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize(
    ("kernel", "shape", "stride", "kind"),
    [
        ("uniform_", (40,), (1,), Even),
        ("uniform_", (4, 5), (1, 4), Even),
        ("normal_", (15,), (1,), Pairs),
        ("normal_", (16,), (1,), Blocks),
        ("normal_", (4, 4), (4, 1), Blocks),
        ("normal_", (4, 4), (1, 4), Pairs),
        ("normal_", (20,), (2,), Pairs),
        ("normal_", (1, 16), (99, 1), Blocks),  # dims of size 1 do not count
        ("normal_", (2, 3, 4, 5), CL, Pairs),
        ("normal_", (0, 16), (16, 1), Pairs),
        ("log_normal_", (40,), (1,), Pairs),
    ],
)
def test_law(kernel: str, shape: tuple[int, ...], stride: tuple[int, ...], kind: type) -> None:
    source = cpu_source(kernel, torch.float32, shape, stride, (), torch.Generator())
    assert type(source) is kind
    assert source.numel == torch.Size(shape).numel()


def test_contiguity_is_what_torch_says() -> None:
    for shape, stride in (((2, 3), (3, 1)), ((2, 3), (1, 2)), ((1, 3), (7, 1)), ((0, 3), (1, 9)), ((), ())):
        assert is_contiguous(shape, stride) == torch.empty_strided(shape, stride).is_contiguous()


def cases() -> Iterator[tuple[str, str, torch.dtype, int, bool]]:
    floats = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    wide = {torch.float64: 2}
    for dtype in floats:
        yield "even", "uniform_", dtype, wide.get(dtype, 1), False
        yield "even", "bernoulli_", dtype, 1, True
        yield "blocks", "normal_", dtype, 0, False
        yield "pairs", "normal_", dtype, 0, False
        yield "pairs", "log_normal_", dtype, 0, False
        for kernel in ("exponential_", "cauchy_", "geometric_", "bernoulli_"):
            yield "even", kernel, dtype, 2, kernel == "bernoulli_"
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        yield "even", "random_", dtype, 2 if dtype == torch.int64 else 1, False
        yield "even", "bernoulli_", dtype, 2, False
    for words in (1, 2):
        yield "even", "random_", torch.uint32, words, False
    yield "even", "random_", torch.int64, 1, False
    yield "even", "random_", torch.int32, 2, False


@pytest.mark.parametrize(("law", "kernel", "dtype", "words", "tensors"), list(cases()))
def test_this_torch_keeps_the_laws(law: str, kernel: str, dtype: torch.dtype, words: int, tensors: bool) -> None:
    assert law_holds(law, kernel, dtype, words, tensors) == ""


def test_a_wrong_law_is_found() -> None:
    assert law_holds("even", "uniform_", torch.float32, 2) == "elements 16 to 21 of 37 differ"
    assert law_holds("pairs", "uniform_", torch.float32) != ""
    assert law_holds("even", "normal_", torch.float32, 1) != ""
    assert law_holds("blocks", "log_normal_", torch.float32) != ""


def test_trying_a_law_touches_no_generator_of_the_user(fresh_caches: None) -> None:
    generator = torch.Generator().manual_seed(1)
    states = generator.get_state(), torch.get_rng_state()
    assert cpu_source("normal_", torch.float64, (40,), (1,), (), generator) is not None
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize(
    ("op", "args", "dtype"),
    [
        ("rand", (), torch.float32),
        ("randn", (), torch.float32),
        ("log_normal_", (0.0, 0.5), torch.float64),
        ("bernoulli_", (torch.rand(9, 4),), torch.float32),
        ("randn", (), torch.complex64),
    ],
)
def test_without_a_law_it_is_drawn_whole_and_said_once(
    op: str,
    args: tuple[Any, ...],
    dtype: torch.dtype,
    fresh_caches: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(cpu, "law_holds", lambda *args: "it is another torch")
    whole = torch.empty(9, 8, dtype=dtype)
    cut = (slice(0, 9), slice(3, 7))
    args_of_whole = args
    if args:
        full = torch.zeros(9, 8)
        if isinstance(args[0], torch.Tensor):
            full[cut] = args[0]
            args_of_whole = (full,)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        name = {"rand": "uniform_", "randn": "normal_"}.get(op, op)
        getattr(whole, name)(*args_of_whole, generator=generator)
    after = generator.get_state()
    generator.manual_seed(2)
    local = torch.empty(9, 4, dtype=dtype)
    with caplog.at_level(logging.WARNING, logger="vescale_rng"):
        for _ in range(2):
            fill(op, local, part_of_slices((9, 8), cut), args, {"generator": generator})
            fill(op, torch.empty(0, dtype=dtype), part_of_flat((0,), 0, 0), tuple(
                torch.empty(0) if isinstance(a, torch.Tensor) else a for a in args
            ), {"generator": generator})  # fmt: skip
    assert torch.equal(local, whole[cut])
    assert torch.equal(generator.get_state(), after)
    said = [record.getMessage() for record in caplog.records if "drawn whole" in record.getMessage()]
    assert len(said) == 1
    assert "it is another torch" in said[0]
    assert "vescale_rng doctor" in said[0]


def test_without_a_law_nothing_can_be_counted(fresh_caches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "law_holds", lambda *args: "it is another torch")
    with pytest.raises(
        errors.UnsupportedRandomOperatorError, match=r"rand of torch.float32: this torch takes numbers in"
    ):
        source_of("rand", (3,), torch.float32, (), None, torch.Generator())
