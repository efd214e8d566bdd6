"""What goes wrong ends with an error that names it, and the next step is right again."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import full_parameters, fully_shard, no_sync
from vescale_comm.emulator import EmulatedRankError, emulate
from vescale_comm.errors import CommError, MismatchError, PlanError, StaleParameterError


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


class Chain(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(1))
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 1 and self.fails == "forward":
                raise ArithmeticError("in forward")
            if number == 1 and self.fails == "backward":
                x = Fails.apply(x)
        return x * self.scale


def make() -> Chain:
    torch.manual_seed(5)
    return Chain().double()


def inputs(rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def check_gradients(model: nn.Module, reference: nn.Module, ranks: Sequence[int] = (0, 1)) -> None:
    reference.zero_grad()
    sum(reference(inputs(rank)).sum() / len(ranks) for rank in ranks).backward()
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        info = parameter.vescale
        own = whole.grad.reshape(-1)[info.start : info.stop]
        torch.testing.assert_close(parameter.grad, own, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("zero_first", [True, False])
def test_an_exception_then_another_try(place: str, zero_first: bool) -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        for _ in range(2):
            model.fails = place
            with pytest.raises(ArithmeticError, match=place):
                model(inputs(rank)).sum().backward()
            model.fails = ""
            if zero_first:
                model.zero_grad()
                loss = model(inputs(rank)).sum()
            else:
                loss = model(inputs(rank)).sum()
                model.zero_grad()
            loss.backward()
            check_gradients(model, reference)
            assert [tuple(p.shape) for p in model.parameters()] == [(p.numel(),) for p in model.parameters()]

    emulate(on_rank, 2, "canonical")


def test_a_backward_that_failed_is_tried_again_on_the_same_graph() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        loss = model(inputs(rank)).sum()
        handle = model.blocks[0].weight.register_hook  # the shard: its own hooks are never called
        assert callable(handle)
        graph = loss * 1
        refuses = graph.register_hook(lambda gradient: (_ for _ in ()).throw(ArithmeticError("hook")))
        with pytest.raises(ArithmeticError, match="hook"):
            graph.backward(retain_graph=True)
        refuses.remove()
        graph.backward()
        check_gradients(model, reference)

    emulate(on_rank, 2, "canonical")


def error_of(function: object, world: int = 2) -> BaseException:
    with pytest.raises(EmulatedRankError) as caught:
        emulate(function, world, "canonical")
    assert caught.value.__cause__ is not None
    return caught.value.__cause__


def test_a_rank_that_skips_a_backward() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        loss = model(inputs(rank)).sum()
        if rank == 0:
            loss.backward()
        else:
            model(inputs(rank)).sum().backward()

    with pytest.raises(CommError):
        emulate(on_rank, 2, "canonical")


def test_ranks_with_different_modules() -> None:
    def on_rank(rank: int) -> None:
        model = make()
        if rank == 1:
            model.blocks[1] = nn.Linear(3, 3, bias=False).double()
        fully_shard(model)

    error = error_of(on_rank)
    assert isinstance(error, MismatchError)
    assert "blocks.1.bias" in str(error)


def test_ranks_with_different_arguments() -> None:
    def on_rank(rank: int) -> None:
        fully_shard(make(), reshard_after_forward=rank == 0)

    error = error_of(on_rank)
    assert isinstance(error, MismatchError)
    assert "keep=False" in str(error)


def test_writing_to_a_gathered_parameter() -> None:
    class Writes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.blocks[1].weight.mul_(2)
            return super().forward(x)

    def on_rank(rank: int) -> None:
        model = fully_shard(Writes().double(), units=[])
        model(inputs(rank)).sum().backward()

    error = error_of(on_rank)
    assert isinstance(error, StaleParameterError)
    assert "blocks.1.weight" in str(error)


def test_writing_between_steps() -> None:
    def on_rank(rank: int) -> None:
        reference, model = make(), fully_shard(make())
        with full_parameters(model, write=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.5)
        model(inputs(rank)).sum().backward()
        check_gradients(model, reference)
        with pytest.raises(StaleParameterError, match=r"blocks\.0\.bias"):  # noqa: SIM117
            with full_parameters(model), torch.no_grad():
                model.blocks[0].bias.zero_()
        model.zero_grad()
        model(inputs(rank)).sum().backward()
        check_gradients(model, reference)

    emulate(on_rank, 2, "canonical")


@pytest.mark.parametrize("how", ["to", "data", "replace", "assign"])
def test_a_shard_that_is_replaced(how: str) -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        if how == "to":
            model.float().double()
        elif how == "data":
            model.blocks[2].weight.data = model.blocks[2].weight.data.clone()
        elif how == "replace":
            model.blocks[2].weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
        else:
            model.load_state_dict(model.state_dict(), assign=True)
        with pytest.raises(StaleParameterError, match="was replaced"):
            model(inputs(rank))

    emulate(on_rank, 2, "canonical")


def test_a_parameter_that_is_added_later() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        model.blocks[1].adapter = nn.Linear(3, 3).requires_grad_(False)
        model(inputs(rank))
        model.blocks[1].adapter.requires_grad_(True)
        with pytest.raises(PlanError, match=r"blocks\.1\.adapter\.weight: the parameter was added after"):
            model(inputs(rank))

    emulate(on_rank, 2, "canonical")


def test_an_update_between_forward_and_backward() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        loss = model(inputs(rank)).sum()
        with torch.no_grad():
            model.blocks[1].bias.add_(1)
        with pytest.raises(StaleParameterError, match="between forward and backward"):
            loss.backward()

    emulate(on_rank, 2, "canonical")


def test_gradients_that_are_not_finite() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make(), check_finite=True)
        for step in range(2):
            x = inputs(rank)
            if rank == 1 and step == 1:
                x[0, 0] = torch.nan
            model(x).sum().backward()

    error = error_of(on_rank)
    assert isinstance(error, CommError)
    assert "blocks.0.weight (rank 1)" in str(error)
    assert "rank 0" not in str(error)


def test_a_gradient_that_is_changed_between_micro_batches() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        with no_sync(model):
            model(inputs(rank)).sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        with pytest.raises(CommError, match=r"its \.grad was changed between micro-batches"):
            model(inputs(rank)).sum().backward()

    emulate(on_rank, 1, "canonical")


def test_what_cannot_be_sharded() -> None:
    def on_rank(rank: int) -> None:
        model = make()
        with pytest.raises(PlanError, match="no submodule 'block'"):
            fully_shard(model, units=["block"])
        with pytest.raises(PlanError, match="no submodule Conv1d"):
            fully_shard(model, units=[nn.Conv1d])
        with pytest.raises(PlanError, match=r"'bloks.*' matches no parameter"):
            fully_shard(model, granularity={"bloks.*": 2})
        with pytest.raises(PlanError, match="prefetch"):
            fully_shard(model, prefetch=-1)
        model(inputs(rank)).sum().backward()
        with pytest.raises(PlanError, match=r"scale has a gradient already"):
            fully_shard(model)
        model.zero_grad()
        fully_shard(model)
        with pytest.raises(PlanError, match="sharded already"):
            fully_shard(model)
        with pytest.raises(PlanError, match="sharded already"):
            fully_shard(nn.Sequential(model))
        with pytest.raises(NotImplementedError, match="before fully_shard"):
            copy.deepcopy(model)

    emulate(on_rank, 2, "canonical")


def test_sparse_gradients_are_refused() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
        with pytest.raises(CommError, match="dense gradients"):
            model(torch.tensor([1, 2])).sum().backward()

    emulate(on_rank, 2, "canonical")


def test_ranks_that_follow_different_passes() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make())
        model(inputs(rank)).sum().backward()
        with torch.no_grad():
            if rank == 0:
                model(inputs(rank))
        model(inputs(rank)).sum().backward()

    with pytest.raises(CommError):
        emulate(on_rank, 2, "canonical")
