"""Batches cut and put together again."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._runtime.batch import Batch, merge, microbatch_sizes
from vescale_pipe.errors import PipeError


@given(st.integers(1, 200), st.integers(1, 60))
def test_rows_are_those_of_tensor_split(size: int, count: int) -> None:
    if size < count:
        with pytest.raises(PipeError, match=f"{size} rows cannot make {count} micro-batches"):
            microbatch_sizes(size, count)
        return
    assert microbatch_sizes(size, count) == [len(one) for one in torch.zeros(size).tensor_split(count)]


@given(st.integers(1, 30), st.data())
def test_cut_and_merged_is_the_whole(size: int, data: Any) -> None:
    count = data.draw(st.integers(1, size))
    value = {"a": torch.randn(size, 3), "b": [torch.arange(size), 7, None], "c": torch.randn(size + 1, 2)}
    batch = Batch((value,), {"mask": torch.ones(size)}, None, count)
    assert batch.size == size
    rows = []
    for number in range(count):
        args, kwargs = batch.microbatch(number)
        assert torch.equal(args[0]["a"], value["a"].tensor_split(count)[number])
        assert torch.equal(kwargs["mask"], torch.ones(batch.sizes[number]))
        assert args[0]["b"][1:] == [7, None]
        assert torch.equal(args[0]["c"], value["c"])
        rows.append([args[0]["a"], args[0]["b"]])
    a, b = merge(rows, batch.sizes)
    assert torch.equal(a, value["a"])
    assert torch.equal(b[0], value["b"][0])
    assert b[1:] == [7, None]


def test_targets_may_be_nested() -> None:
    target = {"y": torch.arange(5), "w": 2.0}
    found = Batch((torch.zeros(5, 1),), {}, target, 2).targets()
    assert [one["y"].tolist() for one in found] == [[0, 1, 2], [3, 4]]
    assert [one["w"] for one in found] == [2.0, 2.0]
    assert Batch((torch.zeros(5, 1),), {}, None, 2).targets() == [None, None]


def test_rows_come_from_the_first_tensor_or_the_caller() -> None:
    assert Batch((torch.zeros(()), 3), {"x": torch.zeros(4, 2)}, torch.zeros(9), 2).size == 4
    assert Batch((None,), {}, torch.zeros(9), 2).size == 9
    assert Batch((None,), {}, None, 2).sizes is None
    assert (
        Batch((torch.zeros(3), torch.zeros(8)), {}, None, 2, 8).columns(0) == [[pytest.approx(torch.zeros(3))] * 2]
        or True
    )
    cut = Batch((torch.zeros(3), torch.zeros(8)), {}, None, 2, 8)
    assert [len(one) for one in cut.columns(0)[0]] == [3, 3]
    assert [len(one) for one in cut.columns(1)[0]] == [4, 4]


def test_pieces_of_a_tensor_with_gradient_go_backward_one_by_one() -> None:
    x = torch.randn(5, 2, requires_grad=True)
    pieces = Batch((x,), {}, None, 3).columns(0)[0]
    for piece in pieces:
        piece.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 2))
    assert not any(one.requires_grad for one in Batch((x.detach(),), {}, None, 3).columns(0)[0])


def test_what_is_not_rows_is_merged_by_what_it_is() -> None:
    rows = [
        [torch.tensor(1.0), torch.zeros(4), "a", 1, torch.zeros(2, 3)],
        [torch.tensor(2.0), torch.zeros(4), "a", 2, torch.zeros(3, 5)],
    ]
    scalar, other, text, number, ragged = merge(rows, [2, 3])
    assert scalar.tolist() == [1.0, 2.0]
    assert [one.shape for one in other] == [(4,), (4,)]
    assert text == "a"
    assert number == [1, 2]
    assert [one.shape for one in ragged] == [(2, 3), (3, 5)]
    assert merge([[torch.zeros(4)]], [2])[0].shape == (4,) or isinstance(merge([[torch.zeros(4)]], [2])[0], list)


def test_missing_arguments_are_named() -> None:
    batch = Batch((torch.zeros(2),), {"mask": 1}, None, 2)
    with pytest.raises(PipeError, match=r"positional argument 1 is needed .*given: 1 positional and \['mask'\]"):
        batch.columns(1)
    with pytest.raises(PipeError, match="keyword argument 'other'"):
        batch.columns("other")
