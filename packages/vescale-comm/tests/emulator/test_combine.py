"""One step of a reduction."""

import math

import pytest
import torch
import torch.distributed as dist

from vescale_comm._emulator.combine import OPERATIONS, combine, numbers, operation


def test_names_of_reductions():
    assert [operation(name) for name in OPERATIONS] == list(OPERATIONS)
    assert operation(dist.ReduceOp.MAX) == "max"
    assert operation(dist.ReduceOp(dist.ReduceOp.BXOR)) == "bxor"
    with pytest.raises(ValueError, match="op: mean is no reduction"):
        operation("mean")


def test_each_reduction():
    one, other = torch.tensor([6, 3]), torch.tensor([5, 4])
    expected = {"sum": [11, 7], "avg": [11, 7], "premul_sum": [11, 7], "product": [30, 12], "min": [5, 3]}
    expected |= {"max": [6, 4], "band": [6 & 5, 3 & 4], "bor": [6 | 5, 3 | 4], "bxor": [6 ^ 5, 3 ^ 4]}
    assert {op: combine(op, one, other).tolist() for op in OPERATIONS} == expected


@pytest.mark.parametrize("op", ["min", "max"])
def test_the_local_number_stays_where_neither_is_smaller(op):
    assert math.copysign(1, combine(op, torch.tensor([-0.0]), torch.tensor([0.0])).item()) == -1
    assert math.copysign(1, combine(op, torch.tensor([0.0]), torch.tensor([-0.0])).item()) == 1
    assert math.isnan(combine(op, torch.tensor([math.nan]), torch.tensor([1.0])).item())
    assert combine(op, torch.tensor([1.0]), torch.tensor([math.nan])).item() == 1


def test_complex_numbers_are_pairs_and_truth_values_are_bytes():
    assert numbers(torch.tensor([[1 + 2j], [3j]])).tolist() == [1, 2, 0, 3]
    assert numbers(torch.tensor([1 + 2j]).conj()).tolist() == [1, -2]
    assert numbers(torch.tensor([True, False])).dtype == torch.uint8
    assert numbers(torch.arange(6).view(2, 3).t()).tolist() == [0, 3, 1, 4, 2, 5]
