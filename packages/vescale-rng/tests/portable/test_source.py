"""Any range of a draw equals the range of the whole, however it is cut and chunked."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng import PortableGenerator
from vescale_rng._portable import source as source_module
from vescale_rng._portable.laws import make_law
from vescale_rng._portable.source import PortableSource

CPU = torch.device("cpu")
N = 1003
CASES = [
    ("uniform_", torch.float32, ()),
    ("uniform_", torch.float64, (-1.0, 1.0)),
    ("uniform_", torch.bfloat16, ()),
    ("normal_", torch.float32, ()),
    ("normal_", torch.float64, (1.0, 2.0)),
    ("normal_", torch.float16, ()),
    ("log_normal_", torch.float32, ()),
    ("exponential_", torch.float32, (2.0,)),
    ("cauchy_", torch.float64, ()),
    ("geometric_", torch.int32, (0.1,)),
    ("bernoulli_", torch.float32, (0.3,)),
    ("bernoulli_", torch.bool, (1e-6,)),
    ("dropout", torch.float32, (0.5,)),
    ("random_", torch.int64, (0, 100)),
    ("random_", torch.int64, ()),
    ("random_", torch.bfloat16, ()),
]


def source(op, dtype, args, numel=N):
    return PortableGenerator(3).source(op, dtype, CPU, (numel,), (1,), args)


def draw(op, dtype, args, start=0, stop=N):
    out = torch.empty(stop - start, dtype=dtype)
    source(op, dtype, args).emit(out, start, args)
    return out


@pytest.mark.parametrize(("op", "dtype", "args"), CASES)
def test_slices(op, dtype, args):
    whole = draw(op, dtype, args)
    for start, stop in ((0, N), (0, 1), (4, 8), (4, 9), (500, 501), (996, N), (1000, N), (8, 8)):
        assert torch.equal(draw(op, dtype, args, start, stop), whole[start:stop])


@settings(max_examples=30, deadline=None)
@given(case=st.sampled_from(CASES), cuts=st.lists(st.integers(0, N // 4), max_size=5))
def test_pieces_make_the_whole(case, cuts):
    op, dtype, args = case
    ends = sorted({0, *(4 * c for c in cuts), N})
    drawn = source(op, dtype, args)
    pieces = []
    for start, stop in itertools.pairwise(ends):
        pieces.append(torch.empty(stop - start, dtype=dtype))
        drawn.emit(pieces[-1], start, args)
    assert torch.equal(torch.cat(pieces), draw(op, dtype, args))


@pytest.mark.parametrize(("op", "dtype", "args"), CASES)
@pytest.mark.parametrize("blocks", [1, 3, 64])
def test_chunks_do_not_matter(monkeypatch, op, dtype, args, blocks):
    whole = draw(op, dtype, args, 0, 203)
    monkeypatch.setattr(source_module, "_blocks_at_a_time", lambda _device: blocks)
    assert torch.equal(draw(op, dtype, args, 0, 203), whole)


@pytest.mark.parametrize("op", ["uniform_", "normal_", "random_"])
def test_blocks_beyond_32_bits(op):
    dtype = torch.float64
    edge = 2 * 2**32  # elements, where the index of the block needs a 33rd bit
    numel = edge + 1000
    both = torch.empty(100, dtype=dtype)
    source(op, dtype, (), numel).emit(both, edge - 40, ())
    after = torch.empty(60, dtype=dtype)
    source(op, dtype, (), numel).emit(after, edge, ())
    first = torch.empty(60, dtype=dtype)
    source(op, dtype, (), numel).emit(first, 0, ())
    assert torch.equal(both[40:], after)
    assert not torch.equal(first, after)


def test_chances_of_a_tensor_follow_the_elements():
    p = torch.linspace(0, 1, N)
    whole = torch.empty(N)
    source("bernoulli_", torch.float32, (p,)).emit(whole, 0, (p,))
    part = torch.empty(333)
    source("bernoulli_", torch.float32, (p,)).emit(part, 100, (p[100:433],))
    assert torch.equal(part, whole[100:433])


def test_start_within_a_block():
    with pytest.raises(ValueError, match="start=2 has to be a multiple of 4"):
        source("uniform_", torch.float32, ()).emit(torch.empty(4), 2, ())


def test_finish_tells_once():
    told = []
    drawn = PortableSource(make_law("normal_", torch.float32, ()), 10, 0, 0, lambda: told.append(1))
    drawn.emit(torch.empty(10), 0, ())
    assert told == []
    drawn.finish()
    assert told == [1]


def test_draws_differ_by_seed_and_call():
    drawn = {(seed, call): torch.empty(64) for seed in (0, 1, 2**32, 2**63) for call in (0, 1, 2**32, 2**63)}
    law = make_law("uniform_", torch.float32, ())
    for (seed, call), out in drawn.items():
        PortableSource(law, 64, seed, call, lambda: None).emit(out, 0, ())
    assert len({tuple(out.tolist()) for out in drawn.values()}) == len(drawn)
