"""Micro-batches of one step that differ in what goes between stages."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe.errors import PipeError


class Masked(nn.Module):
    """Uses its mask only where something is masked, as models do: then more goes between stages, and to other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layers[0](x)
        if mask.any():
            second = self.layers[1](first + mask)
            return self.layers[2](second) * first.sigmoid(), second
        second = self.layers[1](first)
        return self.layers[2](second * mask.add(1)), second.relu()


def loss_of(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().mean() + out[1].mean()


def compare(engine: PipeEngine, reference: nn.Module, mask: Tensor, rows: int = 8) -> None:
    x = torch.randn(rows, 4)
    loss, outputs = engine(x, mask)
    total = torch.zeros(())
    made = []
    for a, b in zip(x.tensor_split(4), mask.tensor_split(4), strict=True):
        out = reference(a, b)
        part = loss_of(out) * (len(a) / rows)
        part.backward()
        total = total + part.detach()
        made.append(out[0].detach())
    assert torch.equal(loss, total)
    assert outputs is None or torch.equal(outputs[0], torch.cat(made))
    names = dict(reference.named_parameters())
    for name, mine in engine.named_parameters():
        assert torch.equal(mine.grad, names[name].grad), name


MASKS = [[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 1, 1, 0]]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_each_micro_batch_sends_what_its_own_branch_needs(schedule: str) -> None:
    torch.manual_seed(0)
    model = Masked()
    reference = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=4, at=["layers.1", "layers.2"], seed=0)
    for plan_here in (plan, PipePlan(schedule=schedule, num_microbatches=4, at=["layers.1", "layers.2"])):
        model.zero_grad()
        reference.zero_grad()
        engine = PipeEngine(model, None, plan_here, loss_of, act_out=3)
        for mask in (*MASKS, *MASKS):
            compare(engine, reference, torch.tensor(mask).repeat_interleave(2).float().reshape(8, 1))


@pytest.mark.ranks(3, timeout=60)
def test_ranks_agree_on_which_is_which() -> None:
    torch.manual_seed(0)
    model = Masked()
    reference = copy.deepcopy(model)
    plan = PipePlan(num_microbatches=4, at=["layers.1", "layers.2"], timeout=20)
    engine = PipeEngine(model, dist.group.WORLD, plan, loss_of)
    for mask in (*MASKS, *MASKS):
        compare(engine, reference, torch.tensor(mask).repeat_interleave(2).float().reshape(8, 1))
    engine.close()


def test_results_of_other_numbers_of_tensors_cannot_be_put_together() -> None:
    class More(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor, mask: Tensor) -> list[Tensor]:
            x = self.layers[1](self.layers[0](x))
            return [x, x + 1] if mask.any() else [x]

    mask = torch.tensor([0.0, 0.0, 1.0, 1.0])
    for keep in (True, False):
        plan = PipePlan(num_microbatches=2, at=["layers.1"], keep_outputs=keep)
        engine = PipeEngine(More(), None, plan, lambda out: out[0].mean(), act_out=2)
        if keep:
            with pytest.raises(PipeError, match=r"returned \[1, 2\] tensors for the micro-batches of one step"):
                engine(torch.ones(4, 4), mask)
        else:
            assert engine(torch.ones(4, 4), mask)[1] is None
