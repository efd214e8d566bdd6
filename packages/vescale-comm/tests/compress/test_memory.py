"""What is owed for gradients."""

from __future__ import annotations

import pytest
import torch

from vescale_comm import BufferPlan
from vescale_comm._compress.memory import Memory
from vescale_comm._plan import Slot
from vescale_comm.errors import MismatchError

PLAN = BufferPlan((Slot("a", (2, 2), 0), Slot("b", (2,), 4)), world=2, shard=4)


def memory() -> Memory:
    return Memory(PLAN, torch.float32, torch.device("cpu"))


def test_what_was_not_sent_is_paid_with_the_next_gradient() -> None:
    owed = memory()
    assert owed.empty
    total = torch.arange(8.0)
    owed.pay(total)
    assert torch.equal(total, torch.arange(8.0))
    owed.owe(total, torch.tensor([0.0, 1, 1, 3, 4, 4, 6, 7]))
    assert not owed.empty
    assert {name: value.tolist() for name, value in owed.items()} == {"a": [[0, 0], [1, 0]], "b": [0, 1]}
    nxt = torch.ones(8)
    owed.pay(nxt)
    assert nxt.tolist() == [1, 1, 2, 1, 1, 2, 1, 1]
    assert not any(value.any() for _, value in owed.items())


def test_a_parameter_without_a_gradient_does_not_pay() -> None:
    """Where no rank uses a parameter, its result is dropped, and what was paid would be lost."""
    owed = memory()
    owed.owe(torch.ones(8), torch.zeros(8))
    nxt = torch.tensor([0.0, 0, 0, 0, 5, 0, 0, 0])
    owed.pay(nxt)
    assert nxt.tolist() == [0, 0, 0, 0, 6, 1, 0, 0]
    owed.owe(nxt, nxt)
    assert {name: value.tolist() for name, value in owed.items()} == {"a": [[1, 1], [1, 1]], "b": [0, 0]}


def test_a_part_pays_its_share() -> None:
    owed = memory()
    owed.owe(torch.full((8,), 6.0), torch.zeros(8))
    part = torch.tensor([1.0, 0.0, 0.0])
    owed.pay(part, first=3, share=0.5)
    assert part.tolist() == [4, 0, 0]
    assert [value.flatten().tolist() for _, value in owed.items()] == [[6, 6, 6, 0], [6, 6]]
    owed.owe(torch.tensor([2.0]), torch.tensor([0.5]), first=3)
    assert dict(owed.items())["a"][1, 1] == 1.5


def test_one_bad_step_does_not_spoil_the_next() -> None:
    owed = memory()
    nan, inf = float("nan"), float("inf")
    owed.owe(torch.tensor([nan, inf, 1, 1, 1, 1, 0, 0]), torch.tensor([nan, inf, nan, 0.5, 1, 1, 0, 0]))
    assert dict(owed.items())["a"].tolist() == [[0, 0], [0, 0.5]]


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(MismatchError, match=r"residual of a has shape \[4\], but its gradient \[2, 2\]"):
        memory().load(PLAN.slots[0], torch.zeros(4))
