"""Stages written by hand, in a chain or wired."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._split import Port, manual
from vescale_pipe.errors import SplitError


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        hidden = self.emb(ids)
        return {"hidden": hidden, "skip": (hidden * 2, None)}


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None, *, scale: Tensor) -> Tensor:
        return self.layer(x) * scale if mask is None else self.layer(x) * mask


class End(nn.Module):
    def __init__(self, start: Start) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = start.emb.weight

    def forward(self, x: Tensor, skip: Tensor) -> dict[str, Any]:
        return {"logits": self.head(x + skip), "aux": None}


def test_wired() -> None:
    start, middle = Start(), Middle()
    end = End(start)
    graph = manual(
        [start, middle, end],
        inputs=[
            ["ids"],
            {"x": (0, "hidden"), "mask": (0, ("skip", 1)), "scale": "scale"},
            [(1, None), (0, ("skip", 0))],
        ],
    )
    assert graph.edges == ((0, 1), (0, 2), (1, 2))
    assert graph.stages[1].inputs == (Port("stage", 0, 0), Port("stage", 0, 1), Port("batch", "scale", 0))
    assert [stage.num_outputs for stage in graph.stages] == [3, 1, -1]
    assert graph.tied == (((0, "emb.weight"), (2, "head.weight")),)
    assert list(graph.stages[1].module.state_dict()) == ["layer.weight", "layer.bias"]
    ids, scale = torch.tensor([[1, 2], [3, 4]]), torch.rand(4)
    out = graph.run(ids=ids, scale=scale)
    first = start(ids)
    assert torch.equal(out["logits"], end(middle(first["hidden"], None, scale=scale), first["hidden"] * 2)["logits"])
    assert out["aux"] is None
    graph.stages[1].module.eval()
    assert not middle.training
    assert not middle.layer.training


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor, z: int = 1) -> tuple[Tensor, Tensor]:
        return x + y * z, x - y


def test_chain() -> None:
    graph = manual([Two(), Two(), Two()])
    x, y = torch.randn(3), torch.randn(3)
    mine = graph.run(x, y)
    expected = Two()(*Two()(*Two()(x, y)))
    assert all(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))
    assert manual([nn.Sequential(nn.Linear(3, 3))]).run(x).shape == (3,)


def test_refused() -> None:
    with pytest.raises(SplitError, match="there is no stage"):
        manual([])
    with pytest.raises(SplitError, match="1 entries in inputs for 2 stages"):
        manual([Two(), Two()], inputs=[None])
    with pytest.raises(SplitError, match="inputs of stage 0: takes a value of stage 0"):
        manual([Two()], inputs=[[(0, None), 0]])
    with pytest.raises(SplitError, match=r"the forward of Middle has no argument 'skale'. Nearest names: 'scale'"):
        manual([Middle()], inputs=[{"skale": 0}])
    with pytest.raises(SplitError, match="stage 0 returns 1 values, and stage 1 takes 2"):
        manual([nn.Linear(3, 3), Two()]).run(torch.randn(3))
    with pytest.raises(SplitError, match="stage 0 returns a dict, in which there is no 'hiden'"):
        manual([Start(), nn.Linear(4, 4)], inputs=[[0], [(0, "hiden")]]).run(torch.tensor([1]))
    with pytest.raises(SplitError, match="a stage takes argument 1, which the call does not give"):
        manual([Two()]).run(torch.randn(3))
