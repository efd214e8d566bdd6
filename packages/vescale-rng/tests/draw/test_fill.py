"""`fill`: the traps of random streams one by one, and what happens around a draw (generators, errors, gradients)."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_rng import emulate_cuda, portable
from vescale_rng._draw import cpu
from vescale_rng._draw.fill import default_generator, fill, scope, take
from vescale_rng._draw.mode import use_sampler
from vescale_rng._draw.prepared import fill_again
from vescale_rng._layout import Part, part_of_flat, part_of_slices
from vescale_rng._portable import PortableGenerator
from vescale_rng._streams.mt19937 import Mt19937State, cached_normal
from vescale_rng.errors import LayoutError, RandomError, UnsupportedRandomOperatorError

Cut = tuple[slice, ...]
CLOSED: dict[str, tuple[Any, ...]] = {
    "rand": (), "randn": (), "normal": (1.0, 2.0), "uniform_": (0.0, 2.0), "randint": (9,), "random_": (),
    "bernoulli_": (0.4,), "dropout": (0.4,), "exponential_": (), "cauchy_": (), "log_normal_": (), "geometric_": (0.3,),
}  # fmt: skip


def started(seed: int = 1, words: int = 0, waiting: bool = False) -> torch.Generator:
    generator = torch.Generator().manual_seed(seed)
    torch.empty(words, dtype=torch.int32).random_(generator=generator)
    if waiting:
        torch.empty(1).normal_(generator=generator)
    return generator


def copy(generator: torch.Generator) -> torch.Generator:
    other = torch.Generator()
    other.set_state(generator.get_state())
    return other


def rows(
    shape: tuple[int, ...], ranks: int, dim: int = 0, stride: tuple[int, ...] | None = None
) -> list[tuple[Part, Cut]]:
    """Chunks of a dim, as Shard(dim) has them."""
    size, step = shape[dim], -(-shape[dim] // ranks)
    found = []
    for rank in range(ranks):
        cut = [slice(0, n) for n in shape]
        cut[dim] = slice(min(size, rank * step), min(size, (rank + 1) * step))
        found.append((part_of_slices(shape, cut, stride), tuple(cut)))
    return found


def agree(
    generator: torch.Generator, whole: Tensor, after: torch.Generator, cuts: list[tuple[Part, Cut]], op: str, *args: Any
) -> None:
    """All ranks begin where `generator` is, hold their part of `whole` afterwards and end where `after` is."""
    for part, cut in cuts:
        mine, local = copy(generator), torch.empty(part.local_shape, dtype=whole.dtype)
        fill(op, local, part, args, {"generator": mine})
        assert torch.equal(local, whole[cut])
        assert torch.equal(mine.get_state(), after.get_state())


# ------------------------------------------------------------------ the stream


@pytest.mark.parametrize("op", CLOSED)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 16)])
@pytest.mark.parametrize("waiting", [False, True])
def test_nothing_to_draw_leaves_the_state(op: str, shape: tuple[int, ...], waiting: bool) -> None:
    generator = started(5, 0, waiting)
    before = generator.get_state()
    for stride in (None, tuple(reversed(range(1, len(shape) + 1)))):
        for part in (Part.whole(shape, stride), part_of_flat(shape, 0, 0, stride)):
            fill(op, torch.empty(part.local_shape), part, CLOSED[op], {"generator": generator})
            assert torch.equal(generator.get_state(), before)
    state = Mt19937State.of(generator)
    assert (state.left, state.next) == ((621, 4) if waiting else (1, 0))


@pytest.mark.parametrize("words", [624, 1248, 6240])
@pytest.mark.parametrize("ranks", [2, 3])
def test_exactly_a_block_of_words(words: int, ranks: int) -> None:
    """A block that is used up is not twisted before the next draw; the bytes of the state tell."""
    after = started(3)
    whole = torch.empty(words).uniform_(generator=after)
    state = Mt19937State.of(after)
    assert (state.left, state.next) == (1, 624)
    agree(started(3), whole, after, rows((words,), ranks), "uniform_")
    agree(started(3), whole, after, [(part_of_flat((words,), 0, 0), (slice(0, 0),))], "uniform_")
    # and from there on
    before, rest = copy(after), torch.empty(10, dtype=torch.float64).uniform_(generator=after)
    agree(before, rest, after, rows((10,), ranks), "rand")


@pytest.mark.parametrize("numel", [1, 2, 3, 14, 15, 16, 17, 40])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_normal_that_waits(numel: int, ranks: int, dtype: torch.dtype) -> None:
    """Up to 15 elements take it first; 16 or more leave it where it is."""
    before = started(7, 5, waiting=True)
    after = copy(before)
    whole = torch.empty(numel, dtype=dtype).normal_(generator=after)
    assert cached_normal(after) == (numel >= 16 or numel % 2 == 0)
    agree(before, whole, after, rows((numel,), ranks), "randn")


def test_small_odd_then_big_then_small() -> None:
    """A bias of 3, a weight, and a bias of 5: the last one begins with what the first has left."""
    generators = [started(11) for _ in range(3)]
    wholes = [torch.randn(n, generator=generators[0]) for n in (3, 70, 5, 1)]
    for generator, rank in zip(generators[1:], range(2), strict=True):
        for whole in wholes:
            part, cut = rows(tuple(whole.shape), 2)[rank]
            local = torch.empty(part.local_shape)
            fill("randn", local, part, (), {"generator": generator})
            assert torch.equal(local, whole[cut])
        assert torch.equal(generator.get_state(), generators[0].get_state())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [16, 17, 24, 31, 32, 33, 47, 48, 100])
def test_the_last_sixteen(dtype: torch.dtype, numel: int) -> None:
    """A ragged tensor ends with 16 numbers drawn anew: after all others, or in 16-bit types after the full blocks."""
    after = started(2, 9)
    whole = torch.randn(numel, dtype=dtype, generator=after)
    for ranks in (2, 3, 5, numel):
        agree(started(2, 9), whole, after, rows((numel,), ranks), "randn")
    alone = [(part_of_flat((numel,), i, i + 1), (slice(i, i + 1),)) for i in range(numel)]
    agree(started(2, 9), whole, after, alone, "normal_")


def test_ragged_normals_take_other_words_in_16_bits() -> None:
    words = {dtype: started(2) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, generator in words.items():
        fill("randn", torch.empty(0, dtype=dtype), part_of_flat((17,), 0, 0), (), {"generator": generator})
    assert [Mt19937State.of(g).used for g in words.values()] == [33, 32]


@pytest.mark.parametrize("op", ["dropout", "randn_like", "rand_like"])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_channels_last(op: str, dim: int) -> None:
    x = torch.ones(3, 5, 4, 7).to(memory_format=torch.channels_last)
    torch.manual_seed(8)
    whole = functional.dropout(x, 0.3).ne(0).float() if op == "dropout" else getattr(torch, op)(x)
    assert whole.stride() == x.stride()
    after = copy(torch.default_generator)
    args = (0.3,) if op == "dropout" else ()
    agree(started(8), whole, after, rows((3, 5, 4, 7), 3, dim, x.stride()), op, *args)


@pytest.mark.parametrize("op", ["uniform_", "normal_", "bernoulli_", "exponential_"])
@pytest.mark.parametrize("dim", [0, 1])
def test_transposed(op: str, dim: int) -> None:
    after = started(4)
    whole = getattr(torch.empty(9, 14).t(), op)(generator=after)
    agree(started(4), whole, after, rows((14, 9), 4, dim, (1, 14)), op)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize(("high", "words"), [(2**28 - 1, 1), (2**28, 2), (2**28 + 100, 2)])
@pytest.mark.filterwarnings("ignore:.*out of bounds.*precision.*")
def test_ranges_of_integers(dtype: torch.dtype, high: int, words: int) -> None:
    """From 2^28 on two words make an integer, in every dtype; in float32 2^28 itself is rounded down below."""
    after = started(6)
    whole = torch.empty(30, dtype=dtype).random_(0, high, generator=after)
    if dtype == torch.float32 and high == 2**28:
        words = 1
    assert Mt19937State.of(after).used == 30 * words
    agree(started(6), whole, after, rows((30,), 4), "random_", 0, high)
    agree(started(6), whole, after, rows((30,), 4), "randint", high)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chances_of_two_precisions(dtype: torch.dtype) -> None:
    """Chances in float32 take one word each, in float64 two; the result may be of any type."""
    chances = torch.rand(12, 5, dtype=dtype)
    after = started(3)
    whole = torch.empty(12, 5).bernoulli_(chances, generator=after)
    assert Mt19937State.of(after).used == (60 if dtype == torch.float32 else 120)
    for dim in (0, 1):
        for part, cut in rows((12, 5), 3, dim):
            agree(started(3), whole, after, [(part, cut)], "bernoulli_", chances[cut])


@pytest.mark.parametrize(
    ("shape", "call"),
    [
        ((4, 6, 5), functional.dropout1d),
        ((4, 6, 3, 5), functional.dropout2d),
        ((4, 6, 2, 3, 2), functional.dropout3d),
        ((4, 6, 3), torch.feature_dropout),
    ],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_dropout_of_features(shape: tuple[int, ...], call: Callable[..., Tensor], dim: int) -> None:
    """One draw per sample and channel: the mask is (N, C, 1, ...) whatever the input is."""
    torch.manual_seed(9)
    whole = call(torch.ones(shape), 0.4, True).ne(0).float()
    after = copy(torch.default_generator)
    mask = (*shape[:2], *(1 for _ in shape[2:]))
    for part, cut in rows(mask, 4, dim):
        first = whole[(slice(None), slice(None), *(slice(0, 1) for _ in shape[2:]))]
        agree(started(9), first, after, [(part, cut)], "dropout", 0.4)


def test_doubles_are_not_split_between_ranks() -> None:
    """Odd widths, two words per element."""
    after = started(12, 1)
    whole = torch.rand(7, 9, dtype=torch.float64, generator=after)
    for ranks in (2, 4, 9):
        agree(started(12, 1), whole, after, rows((7, 9), ranks, 1), "rand")


def test_seeds_of_more_than_32_bits() -> None:
    for seed in (7 + (5 << 32), 2**63 + 3, -3):
        after = started(seed)
        whole = torch.randn(40, generator=after)
        agree(started(seed), whole, after, rows((40,), 3), "randn")
    # the engine takes the low half of a seed, but the state holds all of it
    assert torch.equal(torch.randn(3, generator=started(7)), torch.randn(3, generator=started(7 + (5 << 32))))


def test_ranks_with_any_parts_end_in_one_state() -> None:
    ends = []
    for part in (
        Part.whole((13, 11)),
        part_of_flat((13, 11), 0, 0),
        part_of_flat((13, 11), 5, 77),
        part_of_slices((13, 11), (slice(12, 13), [slice(0, 1), slice(10, 11)])),
    ):
        generator = started(1, 3, waiting=True)
        for op, args in CLOSED.items():
            fill(op, torch.empty(part.local_shape), part, args, {"generator": generator})
        ends.append(generator.get_state())
    assert all(torch.equal(end, ends[0]) for end in ends)


# ------------------------------------------------------------------ properties


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a whole tensor: dims in any order, with gaps between them or not."""
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    gaps = draw(st.lists(st.sampled_from([1, 1, 1, 2]), min_size=len(shape), max_size=len(shape)))
    stride, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        stride[dim] = step * gaps[dim]
        step = stride[dim] * max(1, shape[dim])
    return shape, tuple(stride)


CASES: list[tuple[str, tuple[Any, ...], torch.dtype]] = [
    ("uniform_", (-1.0, 1.0), torch.float32),
    ("uniform_", (), torch.float64),
    ("uniform_", (), torch.complex64),
    ("normal_", (), torch.float32),
    ("normal_", (1.0, 0.5), torch.float64),
    ("normal_", (), torch.bfloat16),
    ("normal_", (), torch.complex128),
    ("log_normal_", (0.0, 0.5), torch.float32),
    ("bernoulli_", (0.5,), torch.bool),
    ("random_", (0, 2**30), torch.int64),
    ("cauchy_", (), torch.float64),
    ("geometric_", (0.1,), torch.int32),
]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(
    case=st.sampled_from(CASES),
    tensor=tensors(),
    seed=st.integers(-(2**63), 2**64 - 1),
    words=st.integers(0, 1300),
    waiting=st.booleans(),
    data=st.data(),
)
def test_any_part_of_any_tensor(
    case: tuple[str, tuple[Any, ...], torch.dtype],
    tensor: tuple[tuple[int, ...], tuple[int, ...]],
    seed: int,
    words: int,
    waiting: bool,
    data: st.DataObject,
) -> None:
    op, args, dtype = case
    shape, stride = tensor
    before = started(seed, words, waiting)
    after = copy(before)
    whole = getattr(torch.empty_strided(shape, stride, dtype=dtype), op)(*args, generator=after)
    if data.draw(st.booleans(), "flat"):
        start = data.draw(st.integers(0, whole.numel()), "start")
        stop = data.draw(st.integers(start, whole.numel()), "stop")
        part, expected = part_of_flat(shape, start, stop, stride), whole.flatten()[start:stop]
    else:
        cut = []
        for size in shape:
            start = data.draw(st.integers(0, size), "start")
            cut.append(slice(start, data.draw(st.integers(start, size), "stop")))
        part, expected = part_of_slices(shape, cut, stride), whole[tuple(cut)]
    local = torch.empty(part.local_shape, dtype=dtype)
    fill(op, local, part, args, {"generator": before})
    assert torch.equal(local, expected)
    assert torch.equal(before.get_state(), after.get_state())


# ------------------------------------------------------------------ far away


def test_far_along_the_stream_numpy_agrees() -> None:
    """Eight elements of 10^9, after 10^8 words that numpy steps over one by one."""
    at = 10**8 + 7
    local = torch.empty(8)
    generator = torch.Generator().manual_seed(77)
    fill("rand", local, part_of_slices((10**9,), (slice(at, at + 8),)), (), {"generator": generator})
    raw = np.random.MT19937()
    raw.state = np.random.RandomState(77).get_state(legacy=False)
    raw.random_raw(at, output=False)
    assert local.tolist() == ((raw.random_raw(8) & 0xFFFFFF) * 2.0**-24).tolist()


@pytest.mark.parametrize(("op", "dtype", "words"), [("rand", torch.float32, 1), ("randn", torch.float64, 2)])
def test_parts_of_a_thousand_million_elements(op: str, dtype: torch.dtype, words: int) -> None:
    """Rows of a huge tensor equal a small draw from a generator that got there in two smaller steps."""
    shape, row = (10**6, 1000), 876_544
    generator, other = started(5, 17), started(5, 17)
    part = part_of_slices(shape, (slice(row, row + 2), slice(0, 1000)))
    local = torch.empty(part.local_shape, dtype=dtype)
    fill(op, local, part, (), {"generator": generator})

    def step(elements: int) -> None:
        fill("rand", torch.empty(0, dtype=dtype), part_of_flat((elements,), 0, 0), (), {"generator": other})

    step(400_000_123)
    step(row * 1000 - 400_000_123)
    assert torch.equal(local, getattr(torch, op)(2, 1000, dtype=dtype, generator=other))
    step(10**9 - (row + 2) * 1000)
    assert torch.equal(generator.get_state(), other.get_state())


# ------------------------------------------------------------------ generators


def test_a_generator_of_the_user_leaves_the_default_one() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    part = part_of_flat((40,), 3, 20)
    for op, args in CLOSED.items():
        fill(op, torch.empty(17), part, args, {"generator": started(2)})
    assert torch.equal(torch.get_rng_state(), before)
    fill("rand", torch.empty(17), part)
    assert not torch.equal(torch.get_rng_state(), before)


def test_without_one_the_default_generator_draws() -> None:
    torch.manual_seed(4)
    whole = torch.randn(40)
    after = torch.get_rng_state()
    for kwargs in (None, {}, {"generator": None}):
        torch.manual_seed(4)
        local = torch.empty(17)
        fill("randn", local, part_of_flat((40,), 3, 20), (), kwargs)
        assert torch.equal(local, whole[3:20])
        assert torch.equal(torch.get_rng_state(), after)
    assert default_generator(torch.device("cpu")) is torch.default_generator


def test_a_generator_of_another_device() -> None:
    class Elsewhere(torch.Generator):
        device = torch.device("cuda")

    generator = Elsewhere()
    before = generator.get_state()
    for part in (part_of_flat((40,), 0, 4), Part.whole((4,))):
        with pytest.raises(
            RandomError, match="generator lies on cuda, but the tensor to fill on cpu; give a generator"
        ):
            fill("rand", torch.empty(4), part, (), {"generator": generator})
    assert torch.equal(generator.get_state(), before)


def test_a_sampler_draws_in_its_place() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    local, again = torch.empty(4), torch.empty(4)
    with use_sampler(PortableGenerator(3)):
        fill("rand", local, part_of_flat((40,), 8, 12))
    fill("rand", again, part_of_flat((40,), 8, 12), (), {"generator": PortableGenerator(3)})
    assert torch.equal(local, again)
    assert torch.equal(torch.get_rng_state(), before)
    with use_sampler(PortableGenerator(3)):  # but a generator that is given draws itself
        fill("rand", again, part_of_flat((40,), 8, 12), (), {"generator": started(1)})
    assert torch.equal(again, torch.rand(40, generator=started(1))[8:12])


# ------------------------------------------------------------------ errors


def test_an_error_within_a_draw_leaves_the_generator() -> None:
    """The chances of a rank are wrong: torch's kernel notices in the middle of them."""
    chances = torch.full((6, 50), 0.5)
    chances[4, 30] = 1.5
    for waiting in (False, True):
        generator = started(3, 11, waiting)
        before = generator.get_state()
        with pytest.raises(RuntimeError, match="p_in"):
            fill("bernoulli_", torch.empty(6, 50), part_of_slices((6, 90), (slice(0, 6), slice(7, 57))), (chances,), {
                "generator": generator
            })  # fmt: skip
        assert torch.equal(generator.get_state(), before)


def test_an_interrupt_leaves_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_rng._draw import fill as module

    def interrupted(*args: Any) -> None:
        torch.rand(5, generator=generator)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "walk", interrupted)
    generator = started(3, 11)
    before = generator.get_state()
    with pytest.raises(KeyboardInterrupt):
        fill("rand", torch.empty(4), part_of_flat((40,), 0, 4), (), {"generator": generator})
    assert torch.equal(generator.get_state(), before)
    sampler = PortableGenerator(1)
    token = sampler.save()
    with pytest.raises(KeyboardInterrupt):
        fill("rand", torch.empty(4), part_of_flat((40,), 0, 4), (), {"generator": sampler})
    assert sampler.save() == token


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("uniform_", (2.0, 1.0)),
        ("normal_", (0.0, -1.0)),
        ("normal", (0.0, -1.0)),
        ("log_normal_", (0.0, -1.0)),
        ("bernoulli_", (1.5,)),
        ("exponential_", (-1.0,)),
        ("cauchy_", (0.0, -1.0)),
        ("geometric_", (2.0,)),
        ("random_", (5, 5)),
    ],
)
def test_wrong_parameters_are_refused_by_every_rank(op: str, args: tuple[Any, ...]) -> None:
    """Also by one that holds nothing: it must not go on while the others stop."""
    messages = set()
    for numel in (3, 40):
        for start, stop in ((0, numel), (1, 3), (0, 0)):
            generator = started(1)
            before = generator.get_state()
            with pytest.raises(RuntimeError) as caught:
                fill(op, torch.empty(stop - start), part_of_flat((numel,), start, stop), args, {"generator": generator})
            messages.add(str(caught.value))
            assert torch.equal(generator.get_state(), before)
    assert len(messages) == 1


def test_a_negative_std_is_refused_before_the_draw() -> None:
    generator = started(1)
    before = generator.get_state()
    with pytest.raises(RandomError, match="std: normal expects all elements to be at least 0"):
        fill("normal", torch.empty(4), part_of_flat((40,), 0, 4), (0.0, -torch.ones(4)), {"generator": generator})
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("op", ["normal_", "exponential_", "uniform_"])
def test_dtypes_that_torch_refuses(op: str) -> None:
    generator = started(1)
    before = generator.get_state()
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.empty(4, dtype=torch.int64), op)()
    with pytest.raises(type(caught.value), match=re.escape(str(caught.value))):
        fill(op, torch.empty(4, dtype=torch.int64), part_of_flat((40,), 0, 4), (), {"generator": generator})
    with pytest.raises(UnsupportedRandomOperatorError, match=r"random_ is not defined for torch.complex64"):
        fill("random_", torch.empty(4, dtype=torch.complex64), part_of_flat((40,), 0, 4), (), {"generator": generator})
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("shape", [(5,), (2, 2), (3,), ()])
def test_a_local_tensor_of_another_shape(shape: tuple[int, ...]) -> None:
    part = part_of_slices((40,), (slice(0, 4),))
    before = torch.get_rng_state()
    with pytest.raises(
        LayoutError, match=r"local: this rank's part has local shape \(4,\), but the tensor given has sha"
    ):
        fill("rand", torch.empty(shape), part)
    with pytest.raises(LayoutError, match="local shape"):
        fill("rand", torch.empty(shape), Part.whole((4,)))
    if shape:
        with pytest.raises(LayoutError, match=r"^p: expected a tensor of the shape of the local part, \(4,\)"):
            fill("bernoulli_", torch.empty(4), part, (torch.full(shape, 0.5),))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_ragged_part_may_stand_in_any_dense_shape() -> None:
    part = part_of_flat((5, 8), 3, 15)
    local, whole = torch.empty(3, 4), torch.rand(5, 8, generator=started(1))
    fill("rand", local, part, (), {"generator": started(1)})
    assert torch.equal(local.view(-1), whole.view(-1)[3:15])
    with pytest.raises(LayoutError, match=r"give.*contiguous"):
        fill("rand", torch.empty(4, 3).t(), part)


PART = part_of_slices((8, 4), (slice(2, 4), slice(0, 4)))


@pytest.mark.parametrize("shape", [(8, 4), (4,), (2, 1), (1,)], ids=str)
@pytest.mark.parametrize(
    ("op", "at", "name"), [("normal", 0, "mean"), ("normal", 1, "std"), ("bernoulli_", 0, "p"), ("bernoulli", 0, "p")]
)
def test_tensor_parameters_of_another_shape(op: str, at: int, name: str, shape: tuple[int, ...]) -> None:
    """They are named, and nothing is drawn."""
    for kind in (PART, Part.whole((2, 4))):
        given: list[Any] = [torch.full((2, 4), 0.5), torch.full((2, 4), 0.5)][: 2 if op == "normal" else 1]
        given[at] = torch.full(shape, 0.5)
        local, before = torch.zeros(2, 4), torch.get_rng_state()
        with pytest.raises(LayoutError, match=rf"^{name}: expected a tensor of the shape of the local part, \(2, 4\)"):
            fill(op, local, kind, tuple(given))
        assert local.eq(0).all()
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("op", "name"), [("normal", "mean"), ("bernoulli_", "p")])
def test_tensor_parameters_on_another_device(op: str, name: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(RandomError, match=f"^{name}: lies on meta, but the tensor to fill on cpu"):
        fill(op, torch.zeros(2, 4), PART, (torch.zeros(2, 4, device="meta"),))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_after_the_draw_leaves_the_generator() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="can't be cast"):
        fill("normal", torch.zeros(2, 4), PART, (torch.zeros(2, 4, dtype=torch.complex64), 1.0))
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_of_one_number() -> None:
    whole = torch.empty(8, 4).normal_(2.0, 3.0, generator=started(1))
    for args in ((torch.tensor(2.0), 3.0), (torch.tensor(2.0), torch.tensor(3.0))):
        local = torch.empty(2, 4)
        fill("normal", local, PART, args, {"generator": started(1)})
        assert torch.allclose(local, whole[2:4])
    fill("uniform_", local, PART, (torch.tensor(2.0), torch.tensor(3.0)), {"generator": started(1)})
    assert torch.equal(local, torch.empty(8, 4).uniform_(2.0, 3.0, generator=started(1))[2:4])
    with pytest.raises(TypeError, match="uniform_: takes numbers as its arguments"):
        fill("uniform_", local, PART, (torch.zeros(2, 4), 1.0))


def test_means_of_a_ragged_part_in_another_shape() -> None:
    part, mean = part_of_flat((5, 8), 3, 15), torch.arange(12.0).view(3, 4)
    local = torch.empty(3, 4)
    fill("normal", local, part, (mean, 0.0))
    assert torch.equal(local, mean)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("op", ["randn", "rand"])
def test_complex_flat_ranges_into_strided_tensors(op: str, dtype: torch.dtype) -> None:
    whole = getattr(torch, op)(5, 8, dtype=dtype, generator=started(1))
    for local in (torch.zeros(12, 2, dtype=dtype)[:, 0], torch.zeros(24, dtype=dtype)[::2].conj()):
        generator = started(1)
        fill(op, local, part_of_flat((5, 8), 3, 15), (), {"generator": generator})
        assert torch.equal(local, whole.view(-1)[3:15])


def test_local_tensors_that_stand_for_their_conjugate_or_negative() -> None:
    for op in ("randn", "rand"):
        whole = getattr(torch, op)(8, 4, dtype=torch.complex64, generator=started(1))
        conjugate = torch.zeros(2, 4, dtype=torch.complex64).conj()
        fill(op, conjugate, PART, (), {"generator": started(1)})
        assert conjugate.is_conj()
        assert torch.equal(conjugate, whole[2:4])
        negative = torch._neg_view(torch.zeros(2, 4))
        for _ in range(2):  # also by the short way of the second call
            fill_again(op, negative, PART, (), {"generator": started(1)})
            assert torch.equal(negative, getattr(torch, op)(8, 4, generator=started(1))[2:4])


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_parts_of_batched_tensors_are_refused(randomness: str) -> None:
    """torch draws for the whole batch at once: part by part it would be other numbers."""
    for part in (PART, Part.whole((2, 4), (1, 2))):
        for op, args in (("uniform_", ()), ("dropout", (0.5,)), ("normal", (torch.zeros(2, 4), 1.0))):
            before = torch.get_rng_state()

            def draw(x: Tensor, op: str = op, args: Any = args, part: Part = part) -> Tensor:
                fill_again(op, x, part, args, {})
                return x

            with pytest.raises(UnsupportedRandomOperatorError, match=r"within torch.vmap"):
                torch.vmap(draw, randomness=randomness)(torch.zeros(3, 2, 4))
            assert torch.equal(torch.get_rng_state(), before)


def test_batched_tensors_that_are_whole() -> None:
    torch.manual_seed(0)
    wanted = torch.vmap(lambda x: x.uniform_(), randomness="different")(torch.zeros(3, 2, 4))
    after = torch.get_rng_state()
    torch.manual_seed(0)

    def draw(x: Tensor) -> Tensor:
        fill_again("uniform_", x, Part.whole((2, 4)), (), {})
        return x

    assert torch.equal(torch.vmap(draw, randomness="different")(torch.zeros(3, 2, 4)), wanted)
    assert torch.equal(torch.get_rng_state(), after)


def test_what_vmap_refuses_leaves_the_generator() -> None:
    def draw(x: Tensor) -> Tensor:
        local = torch.empty(2, 4)
        fill_again("uniform_", local, PART, (), {})
        return x + local

    fill_again("uniform_", torch.empty(2, 4), PART, (), {})  # so that the short way is there
    fill_again("uniform_", torch.empty(2, 4), PART, (), {})
    before = torch.get_rng_state()
    for randomness in ("different", "error"):
        with pytest.raises(RuntimeError, match="vmap"):
            torch.vmap(draw, randomness=randomness)(torch.zeros(3, 2, 4))
        assert torch.equal(torch.get_rng_state(), before)
    same = torch.vmap(draw, randomness="same")(torch.zeros(3, 2, 4))
    torch.set_rng_state(before)
    assert torch.equal(same, torch.rand(8, 4)[2:4].expand(3, 2, 4))


def test_the_default_generator_given_within_a_block_is_the_blocks() -> None:
    for block in (lambda: portable(3), lambda: emulate_cuda("H100", seed=3)):
        with block():
            wanted = torch.rand(8, 4)
        with block():
            local = torch.empty(2, 4)
            fill_again("rand", local, PART, (), {"generator": torch.default_generator})
            assert torch.equal(local, wanted[2:4])


@pytest.mark.parametrize("generator", [5, "cpu", random.Random(1)], ids=["int", "str", "random"])
def test_what_is_no_generator(generator: Any) -> None:
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, or a PortableGenerator"):
        fill("rand", torch.empty(2, 4), PART, (), {"generator": generator})


@pytest.mark.parametrize("op", ["poisson", "randperm", "nonsense"])
def test_operators_without_a_closed_form(op: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedRandomOperatorError, match=f"{op}: no closed form"):
        fill(op, torch.empty(4), part_of_flat((40,), 0, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_scopes() -> None:
    assert {scope(op) for op in CLOSED} == {"local"}
    assert scope("multinomial") == scope("rrelu") == "global"
    with pytest.raises(
        UnsupportedRandomOperatorError, match="nonsense: vescale_rng does not know how one device draws"
    ):
        scope("nonsense")


# ------------------------------------------------------------------ local tensors


def test_leaves_that_need_gradients_are_filled() -> None:
    local = torch.empty(4, requires_grad=True)
    fill("rand", local, part_of_flat((40,), 3, 7), (), {"generator": started(1)})
    assert torch.equal(local.detach(), torch.rand(40, generator=started(1))[3:7])
    assert local.grad_fn is None
    chances = torch.full((4,), 0.5, requires_grad=True)
    fill("bernoulli_", local, part_of_flat((40,), 3, 7), (chances,), {"generator": started(1)})
    assert local.grad_fn is None


def test_meta_tensors_draw_nothing() -> None:
    before = torch.get_rng_state()
    fill("rand", torch.empty(4, device="meta"), part_of_flat((40,), 3, 7))
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UnsupportedRandomOperatorError):
        fill("poisson", torch.empty(4, device="meta"), part_of_flat((40,), 3, 7))


@pytest.mark.parametrize("op", ["rand", "log_normal_"])
def test_fake_tensors_draw_nothing(op: str) -> None:
    """As in torch: a program may be traced before it runs."""
    before = torch.get_rng_state()
    with FakeTensorMode():
        local = torch.rand(4)
        for _ in range(2):
            fill(op, local, part_of_flat((40,), 3, 7))
            fill(op, local, Part.whole((4,)))
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_see_the_draw_but_not_the_trial_of_a_law() -> None:
    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    cpu._chosen.cache_clear()
    cpu._trusted.cache_clear()
    cpu._words.cache_clear()
    local = torch.empty(4)
    with Seen():
        fill("exponential_", local, part_of_flat((40,), 3, 7), (), {"generator": started(1)})
    assert Seen.names.count("exponential_") == 1
    assert torch.equal(local, torch.empty(40).exponential_(generator=started(1))[3:7])


def test_local_tensors_within_others() -> None:
    """A view with an offset and gaps: what is beside it stays."""
    around = torch.full((6, 10), math.nan)
    local = around[1:5, 2:8:2]
    fill("randn", local, part_of_slices((9, 7), (slice(3, 7), slice(2, 5))), (), {"generator": started(1)})
    assert torch.equal(local, torch.randn(9, 7, generator=started(1))[3:7, 2:5])
    local.fill_(math.nan)
    assert around.isnan().all()


def test_take_cuts_a_part() -> None:
    whole = torch.arange(12.0).view(3, 4)
    part = part_of_slices((3, 4), ([slice(0, 1), slice(2, 3)], slice(1, 3)))
    local = torch.empty(2, 2)
    take(whole, local, part)
    assert local.tolist() == [[1.0, 2.0], [9.0, 10.0]]


def test_modes_of_the_user_do_not_disturb() -> None:
    whole = torch.rand(40, generator=started(1))
    local = torch.empty(4)
    with torch.inference_mode(), torch.device("meta"):
        fill("rand", local, part_of_flat((40,), 3, 7), (), {"generator": started(1)})
        fill("log_normal_", torch.empty(4, device="cpu"), part_of_flat((41,), 3, 7), (), {"generator": started(1)})
    assert torch.equal(local, whole[3:7])
