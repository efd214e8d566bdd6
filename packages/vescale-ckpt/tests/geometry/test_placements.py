"""Texts of placements, and cuts of dims against torch.chunk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._geometry.placements import cut, length, parse_placement
from vescale_ckpt.errors import LayoutError


@pytest.mark.parametrize("text", ["R", "S(0)", "S(12)", "SS(1,4)", "IS(0,3)", "RS(2,1,0,3)", "RS(1)"])
def test_texts_come_back(text):
    assert str(parse_placement(text)) == text


BAD = ["", "r", "P", "R()", "R(0)", "S", "S()", "S(-1)", "S(0,1)", "SS(0)", "SS(0,0)", "IS(0,0)", "RS", "S(0) "]


@pytest.mark.parametrize("text", [*BAD, "S(\u0661)", "S(" + "9" * 40 + ")"])
def test_other_texts_are_refused(text):
    with pytest.raises(LayoutError, match=r"is none of|no blocks"):
        parse_placement(text)


def kept(text, size, count, index):
    intervals = cut(parse_placement(text), ((0, size),) if size else (), count, index)
    assert length(intervals) == sum(stop - start for start, stop in intervals)
    return [i for start, stop in intervals for i in range(start, stop)]


def chunk(numbers, count, index):
    chunks = torch.tensor(numbers).chunk(count) if numbers else ()
    return chunks[index].tolist() if index < len(chunks) else []


@given(st.integers(0, 40), st.integers(1, 6), st.data())
def test_a_shard_is_a_chunk(size, count, data):
    index = data.draw(st.integers(0, count - 1))
    assert kept("S(0)", size, count, index) == chunk(list(range(size)), count, index)


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_strided_shard_is_a_chunk_of_each_chunk(size, factor, count, data):
    index = data.draw(st.integers(0, count - 1))
    pieces = torch.arange(size).chunk(factor) if size else ()
    assert kept(f"SS(0,{factor})", size, count, index) == [i for p in pieces for i in chunk(p.tolist(), count, index)]


@given(st.integers(0, 10), st.integers(1, 4), st.integers(1, 4), st.data())
def test_an_interleaved_shard_is_a_chunk_of_each_block(rows, blocks, count, data):
    index = data.draw(st.integers(0, count - 1))
    numbers = torch.arange(rows * blocks).reshape(blocks, rows)
    want = [i for block in numbers.tolist() for i in chunk(block, count, index)]
    assert kept(f"IS(0,{blocks})", rows * blocks, count, index) == want


def test_blocks_must_be_equal():
    with pytest.raises(LayoutError, match="7 elements are not 2 equal blocks"):
        kept("IS(0,2)", 7, 2, 0)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_dim_can_be_cut_twice(size, first, second, data):
    i, j = data.draw(st.integers(0, first - 1)), data.draw(st.integers(0, second - 1))
    once = cut(parse_placement("S(0)"), ((0, size),), first, i)
    twice = cut(parse_placement("S(0)"), once, second, j)
    assert [x for a, b in twice for x in range(a, b)] == chunk(chunk(list(range(size)), first, i), second, j)
