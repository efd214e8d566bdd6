"""What is named as whole is not cut, whatever rows it has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.batch import Batch
from vescale_pipe.errors import PipeError

ROWS = 4


def pieces(whole: list[str | int], args: tuple[Any, ...], kwargs: Any = None, names: tuple[str, ...] = ()) -> Batch:
    return Batch(args, kwargs or {}, torch.arange(ROWS), 2, None, whole, names)


def rows_of(batch: Batch, number: int = 0) -> Any:
    """Rows of each tensor of a micro-batch."""
    args, kwargs = batch.microbatch(number)
    return [len(one) for one in args], {name: len(one) for name, one in kwargs.items()}


def test_by_position_by_keyword_and_by_the_name_in_the_model() -> None:
    x, table = torch.zeros(ROWS, 2), torch.zeros(ROWS, 3)
    assert rows_of(pieces([], (x, table), {"k": table})) == ([2, 2], {"k": 2})
    assert rows_of(pieces([1], (x, table), {"k": table})) == ([2, 4], {"k": 2})
    assert rows_of(pieces(["k"], (x, table), {"k": table})) == ([2, 2], {"k": 4})
    assert rows_of(pieces(["table"], (x, table), {}, ("x", "table"))) == ([2, 4], {})
    assert rows_of(pieces(["table"], (x,), {"table": table}, ("x", "table"))) == ([2], {"table": 4})


def test_inside_of_containers() -> None:
    batch = {"x": torch.zeros(ROWS), "tables": [torch.zeros(ROWS), torch.zeros(ROWS)]}
    for name, want in (("0.tables", [2, 4, 4]), ("batch.tables.1", [2, 2, 4]), ("batch.x", [4, 2, 2])):
        ((found,), _) = pieces([name], (batch,), {}, ("batch",)).microbatch(1)
        assert [len(found["x"]), *(len(one) for one in found["tables"])] == want


def test_the_rows_of_the_batch_are_those_of_what_is_cut() -> None:
    table, x = torch.zeros(7, 2), torch.zeros(ROWS, 2)
    assert pieces(["table"], (table, x), {}, ("table", "x")).size == ROWS
    assert Batch((None, x), {}, None, 2, None, [0]).size == ROWS


def test_a_target_may_have_whole_parts() -> None:
    target = {"labels": torch.arange(ROWS), "weights": torch.ones(7)}
    x = torch.zeros(ROWS, 1)
    with pytest.raises(PipeError, match=r"shape \(7,\) given; the batch has 4 rows. What goes whole .*whole=\["):
        Batch((x,), {}, target, 2).targets()
    found = Batch((x,), {}, target, 2, None, ["target.weights"]).targets()
    assert [len(one["labels"]) for one in found] == [2, 2]
    assert all(one["weights"] is target["weights"] for one in found)
    assert Batch((x,), {}, None, 2, None, ["target.weights"]).targets() == [None, None]


def test_names_that_are_not_there_are_told_with_the_nearest() -> None:
    x = torch.zeros(ROWS, 1)
    with pytest.raises(PipeError, match=r"whole='tabel': the call has no argument 'tabel'.*Nearest arguments: 'table'"):
        pieces(["tabel"], (x,), {"table": x})
    with pytest.raises(PipeError, match="whole=3: the call has no argument '3'"):
        pieces([3], (x,))
    with pytest.raises(PipeError, match=r"whole='0.b': nothing is there. There are leaves 'a'"):
        pieces(["0.b"], ({"a": x},)).microbatch(0)
    # Arguments that the model has and this call leaves out are no mistake.
    assert rows_of(pieces(["mask"], (x,), {}, ("x", "mask"))) == ([2], {})


class Scored(nn.Module):
    """A table of as many rows as the batch, looked up by all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) @ table.t().mm(table)
        return x


def test_a_table_with_the_rows_of_the_batch() -> None:
    torch.manual_seed(0)
    model = Scored()
    reference = copy.deepcopy(model)
    x, table, y = torch.randn(ROWS, 3), torch.randn(ROWS, 3), torch.randn(ROWS, 3)
    plan = PipePlan(num_microbatches=2, at=["blocks.1"], whole=["table"])
    engine = PipeEngine(model, None, plan, nn.functional.mse_loss, act_out=2)
    loss, _ = engine(x, table, target=y)
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True):
        part = nn.functional.mse_loss(reference(a, table), b) * 0.5
        part.backward()
        total += part.detach()
    assert torch.equal(loss, total)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(PipeError, match="whole='tabel'"):
        PipeEngine(model, None, PipePlan(num_microbatches=2, whole=["tabel"]), nn.functional.mse_loss)(
            x, table, target=y
        )
