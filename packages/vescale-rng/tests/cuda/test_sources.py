"""Sources: ordinary draws of a GPU, put together round by round, are the whole draw; and so are draws of any part."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng._cuda import laws
from vescale_rng._cuda.generator import EmulatedGenerator
from vescale_rng._cuda.kernels import emulate
from vescale_rng._cuda.laws import law_of
from vescale_rng._cuda.profile import DeviceProfile
from vescale_rng._cuda.sources import EmulatedKernel, EmulatedSource, RoundSource, cuda_source
from vescale_rng._draw.walk import walk
from vescale_rng._layout import part_of_slices
from vescale_rng.errors import RandomError

PROFILES = [DeviceProfile("one", 1, 256), DeviceProfile("two", 2, 300), DeviceProfile("three", 3, 512)]
OPS: list[tuple[str, torch.dtype, tuple[Any, ...]]] = [
    ("uniform_", torch.float32, (0.0, 1.0)),
    ("uniform_", torch.float64, (-1.0, 2.0)),
    ("uniform_", torch.bfloat16, ()),
    ("normal_", torch.float32, (1.0, 2.0)),
    ("normal_", torch.float64, ()),
    ("normal_", torch.float16, ()),
    ("log_normal_", torch.float32, ()),
    ("exponential_", torch.float32, (2.0,)),
    ("cauchy_", torch.float64, ()),
    ("geometric_", torch.int64, (0.2,)),
    ("bernoulli_", torch.bool, (0.4,)),
    ("bernoulli_", torch.float64, (0.4,)),
    ("random_", torch.int64, (0, 100)),
    ("random_", torch.int32, (0, 2**29)),
    ("random_", torch.int64, ()),
    ("random_", torch.uint8, ()),
    ("dropout", torch.float32, (0.3,)),
    ("dropout", torch.float64, (0.3,)),
    ("dropout", torch.bfloat16, (0.3,)),
    ("dropout", torch.float16, (0.3, 4)),
]
SEED, OFFSET = 77, 12


def generator_of(profile: DeviceProfile) -> EmulatedGenerator:
    generator = EmulatedGenerator(profile, SEED)
    generator.set_offset(OFFSET)
    return generator


def whole_draw(op: str, dtype: torch.dtype, args: tuple[Any, ...], numel: int, profile: DeviceProfile) -> torch.Tensor:
    """One launch on the GPU; the kernels have oracles of their own."""
    out = torch.empty(numel, dtype=dtype)
    law = law_of(op, dtype, (numel,), (1,), args)
    emulate(law, out, 0, args, numel=numel, seed=SEED, offset=OFFSET, profile=profile)
    return out


def rounds(
    op: str, dtype: torch.dtype, args: tuple[Any, ...], numel: int, profile: DeviceProfile
) -> tuple[RoundSource, EmulatedGenerator]:
    generator = generator_of(profile)
    law = law_of(op, dtype, (numel,), (1,), args)
    return RoundSource(law, (numel,), (1,), SEED, generator, profile, EmulatedKernel(profile)), generator


def sizes(unroll: int, threads: int, multiple: int) -> list[int]:
    around = {threads, unroll * threads, 2 * unroll * threads}
    found = {1, threads // 2, threads - 257, 5 * unroll * threads + 3} | {n + d for n in around for d in (-1, 0, 1)}
    return sorted(n for n in {max(1, n) // multiple * multiple for n in found} if n)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize(("op", "dtype", "args"), OPS)
def test_rounds_make_the_whole(op: str, dtype: torch.dtype, args: tuple[Any, ...], profile: DeviceProfile) -> None:
    law = law_of(op, dtype, (16,), (1,), args)
    multiple = law.unroll if law.layout == "vector" else 1
    for numel in sizes(law.unroll, profile.max_threads, multiple):
        expected = whole_draw(op, dtype, args, numel, profile)
        source, generator = rounds(op, dtype, args, numel, profile)
        assert source.numel == numel
        out = torch.empty(numel, dtype=dtype)
        for start in range(0, numel, source.grain):
            source.emit(out[start : min(start + source.grain, numel)], start, args)
        assert torch.equal(out, expected), numel
        # several rounds at once, from each one on
        for start in range(0, numel, 2 * source.grain):
            rest = torch.empty(numel - start, dtype=dtype)
            source.emit(rest, start, args)
            assert torch.equal(rest, expected[start:]), (numel, start)
        assert generator.get_offset() == OFFSET
        source.finish()
        assert generator.get_offset() == OFFSET + law.increment(numel, profile)


@pytest.mark.parametrize(
    ("dtype", "rest", "vector"),
    [
        (torch.bfloat16, 4, 4),
        (torch.bfloat16, 2, 2),
        (torch.bfloat16, 1, 1),
        (torch.float32, 2, 2),
        (torch.float32, 3, 1),
    ],
)
def test_rounds_of_dropout_keep_the_vector_size_of_the_whole(dtype: torch.dtype, rest: int, vector: int) -> None:
    """The number of all elements decides it; that of a round would allow a larger one."""
    profile = PROFILES[1]
    numel = 16 * profile.max_threads + rest
    expected = whole_draw("dropout", dtype, (0.3,), numel, profile)
    source, _ = rounds("dropout", dtype, (0.3,), numel, profile)
    assert source.law.unroll == (vector if vector > 1 else 4)
    for start in range(0, numel, source.grain):
        out = torch.empty(min(source.grain, numel - start), dtype=dtype)
        source.emit(out, start, (0.3,))
        assert torch.equal(out, expected[start : start + source.grain]), start


@settings(max_examples=40)
@given(st.data())
def test_any_range_of_any_draw(data: st.DataObject) -> None:
    op, dtype, args = data.draw(st.sampled_from(OPS))
    profile = data.draw(st.sampled_from(PROFILES))
    law = law_of(op, dtype, (16,), (1,), args)
    numel = data.draw(st.integers(1, 6 * profile.max_threads)) * (law.unroll if law.layout == "vector" else 1)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    source, _ = rounds(op, dtype, args, numel, profile)
    out = torch.empty(stop - start, dtype=dtype)
    source.emit(out, start, args)
    assert torch.equal(out, whole_draw(op, dtype, args, numel, profile)[start:stop])


@pytest.mark.parametrize(("op", "dtype", "args"), OPS)
def test_grain_is_a_round_or_all(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
    profile = PROFILES[2]
    law = law_of(op, dtype, (16,), (1,), args)
    assert rounds(op, dtype, args, 16, profile)[0].grain == 16
    numel = 64 * profile.max_threads
    assert rounds(op, dtype, args, numel, profile)[0].grain == law.unroll * profile.max_threads


@pytest.mark.parametrize("profile", PROFILES[:2], ids=lambda p: p.name)
@pytest.mark.parametrize(("op", "dtype", "args"), OPS)
@pytest.mark.parametrize("shape", [(7, 1000), (50, 4, 40)])
def test_parts_are_slices(
    op: str, dtype: torch.dtype, args: tuple[Any, ...], shape: tuple[int, ...], profile: DeviceProfile
) -> None:
    numel = torch.Size(shape).numel()
    expected = whole_draw(op, dtype, args, numel, profile).view(shape)
    half = tuple(slice(0, None) for _ in shape[1:])
    for slices in (
        (slice(0, shape[0] // 3), *half),
        (slice(shape[0] // 3, None), *half),
        (*half, slice(3, shape[-1] // 2)),
        tuple(slice(1, n - 1) for n in shape),
    ):
        part = part_of_slices(shape, slices)
        law = law_of(op, dtype, shape, part.global_stride, args)
        for make in (RoundSource, EmulatedSource):
            generator = generator_of(profile)
            extra = (EmulatedKernel(profile),) if make is RoundSource else ()
            source = make(law, shape, part.global_stride, SEED, generator, profile, *extra)
            local = torch.empty(part.local_shape, dtype=dtype)
            walk(source, part, local, args)
            assert torch.equal(local, expected[slices]), (make, slices)


def test_chances_given_as_a_tensor() -> None:
    profile, shape = PROFILES[1], (40, 50)
    p = torch.linspace(0, 1, 2000).view(shape)
    expected = whole_draw("bernoulli_", torch.float32, (p.view(-1),), 2000, profile).view(shape)
    for slices in ((slice(3, 17), slice(None)), (slice(None), slice(9, 31))):
        part = part_of_slices(shape, slices)
        local = torch.empty(part.local_shape)
        generator = generator_of(profile)
        source = generator.source("bernoulli_", torch.float32, local.device, shape, (50, 1), (p[slices],))
        walk(source, part, local, (p[slices].contiguous(),))
        source.finish()
        assert torch.equal(local, expected[slices])
        assert generator.get_offset() == OFFSET + 12


# ------------------------------------------------------------------ tensors beyond 32-bit indexing


@pytest.mark.parametrize("numel", [5001, 9999, 20_000])
@pytest.mark.parametrize(("op", "dtype", "args"), [OPS[0], OPS[1], OPS[12], OPS[15]])
def test_pieces_are_draws_of_their_own(
    op: str, dtype: torch.dtype, args: tuple[Any, ...], numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller limit, as a large tensor with the real one: halves, front first, each with its own offset."""
    limit = 7000
    monkeypatch.setattr(laws, "INDEX_LIMIT", limit)
    profile = PROFILES[1]
    offset, expected = OFFSET + law_of(op, dtype, (numel,), (1,), args).increment(numel, profile), []

    def launch(count: int) -> None:
        nonlocal offset
        if 1 + (count - 1) * dtype.itemsize > limit:
            launch(count // 2)
            launch(count - count // 2)
            return
        out = torch.empty(count, dtype=dtype)
        EmulatedKernel(profile)(op, out, args, SEED, offset)
        expected.append(out)
        offset += law_of(op, dtype, (count,), (1,), args).increment(count, profile)

    if 1 + (numel - 1) * dtype.itemsize > limit:
        launch(numel)
    else:
        expected.append(whole_draw(op, dtype, args, numel, profile))
    whole = torch.cat(expected)
    source, generator = rounds(op, dtype, args, numel, profile)
    assert source.numel == numel
    for start in range(0, numel, source.grain):
        out = torch.empty(min(source.grain, numel - start), dtype=dtype)
        source.emit(out, start, args)
        assert torch.equal(out, whole[start : start + source.grain]), start
    source.finish()
    assert generator.get_offset() == offset
    other = generator_of(profile).source(op, dtype, torch.device("cpu"), (numel,), (1,), args)
    out = torch.empty(numel - 1000, dtype=dtype)
    other.emit(out, 1000, args)
    assert torch.equal(out, whole[1000:])


def test_a_huge_draw_is_cheap_at_any_place() -> None:
    """f32 with 2**30 + 6 elements: two halves of two launches; elements around their seams."""
    h100, numel = DeviceProfile.of("H100"), 2**30 + 6
    source = EmulatedGenerator(h100, SEED).source("uniform_", torch.float32, torch.device("cpu"), (numel,), (1,), ())
    inc = lambda n: 4 * -(-n // (4 * h100.max_threads))  # noqa: E731
    # 2**29 + 3 is still too large, so each half is halved again.
    quarters = [2**28 + 1, 2**28 + 2, 2**28 + 1, 2**28 + 2]
    offset, start = inc(numel), 0
    for count in quarters:
        last = torch.empty(3)
        law = law_of("uniform_", torch.float32, (count,), (1,), ())
        emulate(law, last, count - 3, (), numel=count, seed=SEED, offset=offset, profile=h100)
        got = torch.empty(3)
        source.emit(got, start + count - 3, ())
        assert torch.equal(got, last)
        offset, start = offset + inc(count), start + count


def test_rounds_refuse_chances_given_as_a_tensor() -> None:
    law = law_of("bernoulli_", torch.float32, (8,), (1,), (torch.zeros(8),))
    with pytest.raises(RandomError, match="use EmulatedSource"):
        RoundSource(law, (8,), (1,), 0, EmulatedGenerator(PROFILES[0]), PROFILES[0], EmulatedKernel(PROFILES[0]))


def test_cuda_source_refuses_a_cpu_generator() -> None:
    with pytest.raises(RuntimeError, match="generator is on cpu, but the tensor is on cuda:0"):
        cuda_source("uniform_", torch.float32, torch.device("cuda", 0), (8,), (1,), (), torch.Generator())


def test_rounds_refuse_dropout_in_logical_order() -> None:
    law = law_of("dropout", torch.float32, (7, 5), (1, 7), (0.1,))
    with pytest.raises(RandomError, match="use EmulatedSource"):
        RoundSource(law, (7, 5), (1, 7), 0, EmulatedGenerator(PROFILES[0]), PROFILES[0], EmulatedKernel(PROFILES[0]))
