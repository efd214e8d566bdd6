"""Mixed precision, mixed dtypes in one module, and shards in main memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from vescale_comm._fsdp import full_parameters, fully_shard, no_sync
from vescale_comm.emulator import emulate


class Chain(nn.Module):
    def __init__(self, blocks: int = 2, width: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def make() -> Chain:
    torch.manual_seed(6)
    return Chain()


def inputs(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def local_gradients(model: nn.Module, dtype: torch.dtype, ranks: int, step: int = 0) -> list[list[Tensor]]:
    """Return the gradients of each rank, of the model cast to a dtype, on one device."""
    found = []
    for rank in range(ranks):
        cast = copy.deepcopy(model).to(dtype)
        cast(inputs(rank, step).to(dtype)).float().sum().backward()
        found.append([parameter.grad for parameter in cast.parameters()])
    return found


def check(model: nn.Module, wanted: list[Tensor]) -> None:
    for (name, parameter), whole in zip(model.named_parameters(), wanted, strict=True):
        info = parameter.vescale
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, whole.reshape(-1)[info.start : info.stop].to(parameter.dtype)), name


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_bfloat16_compute_of_float32_shards(wire: torch.dtype | None) -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make(), param_dtype=torch.bfloat16, reduce_dtype=wire)
        seen = []
        model.blocks[1].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
        model(inputs(rank)).float().sum().backward()
        assert seen == [(torch.bfloat16, torch.bfloat16)]
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        # Sums are in float32 in both cases; on a bfloat16 wire the result is rounded once.
        first, second, third = local_gradients(make(), torch.bfloat16, 3)
        mean = [(a.float() + b.float() + c.float()) / 3 for a, b, c in zip(first, second, third, strict=True)]
        check(model, mean if wire is None else [value.bfloat16() for value in mean])

    emulate(on_rank, 3, "canonical")


def test_micro_batches_add_up_in_float32() -> None:
    # FSDP2 of torch fails where fresh gradients are bfloat16 and accumulated ones float32.
    def on_rank(rank: int) -> None:
        model = fully_shard(make(), param_dtype=torch.bfloat16)
        for step in range(3):
            if step < 2:
                with no_sync(model):
                    model(inputs(rank, step)).float().sum().backward()
            else:
                model(inputs(rank, step)).float().sum().backward()
        per_step = [local_gradients(make(), torch.bfloat16, 2, step) for step in range(3)]
        totals = []
        for other in range(2):
            a, b, c = (per_step[step][other] for step in range(3))
            totals.append([x.float() + y.float() + z.float() for x, y, z in zip(a, b, c, strict=True)])
        check(model, [(a + b) / 2 for a, b in zip(*totals, strict=True)])

    emulate(on_rank, 2, "canonical")


def test_autocast() -> None:
    def on_rank(rank: int) -> None:
        model, reference = fully_shard(make()), make()
        for one in (model, reference):
            with torch.autocast("cpu", torch.bfloat16):
                # Twice, so that casts of weights are taken from autocast's cache.
                loss = one(one(inputs(0))).float().sum()
            loss.backward()
        check(model, [parameter.grad for parameter in reference.parameters()])

    # Emulated ranks are threads, which would share the cache.
    emulate(on_rank, 1, "canonical")


def test_sums_instead_of_means() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make(), average=False)
        model(inputs(rank)).sum().backward()
        first, second = local_gradients(make(), torch.float32, 2)
        check(model, [a + b for a, b in zip(first, second, strict=True)])

    emulate(on_rank, 2, "canonical")


def test_bfloat16_models_add_in_float32() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make().bfloat16())
        model(inputs(rank).bfloat16()).float().sum().backward()
        many = local_gradients(make(), torch.bfloat16, 4)
        check(
            model,
            [
                ((a.float() + b.float() + c.float() + d.float()) / 4).bfloat16()
                for a, b, c, d in zip(*many, strict=True)
            ],
        )

    emulate(on_rank, 4, "canonical")


def test_mixed_dtypes_in_one_unit() -> None:
    # FSDP2 of torch fails an assertion.
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.low, self.high = nn.Linear(5, 5).bfloat16(), nn.Linear(5, 5)
            self.table = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.bfloat16()).float() * self.table)

    def on_rank(rank: int) -> None:
        model, reference = fully_shard(Mixed()), Mixed()
        model(inputs(0)).sum().backward()
        reference(inputs(0)).sum().backward()
        for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert parameter.dtype == whole.dtype, name
            if whole.grad is not None:
                own = whole.grad.reshape(-1)[parameter.vescale.start : parameter.vescale.stop]
                assert torch.equal(parameter.grad, own), name
        with full_parameters(model):
            assert torch.equal(model.table, torch.arange(5, dtype=torch.uint8))

    emulate(on_rank, 2, "canonical")


def test_shards_in_main_memory() -> None:
    def on_rank(rank: int) -> None:
        model = fully_shard(make(), offload=True)
        model(inputs(rank)).sum().backward()
        first, second = local_gradients(make(), torch.float32, 2)
        check(model, [(a + b) / 2 for a, b in zip(first, second, strict=True)])
        assert all(parameter.device.type == "cpu" for parameter in model.parameters())

    emulate(on_rank, 2, "canonical")


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_between_micro_batches(to_none: bool) -> None:
    def on_rank(rank: int) -> None:
        # One rank has no element of the bias, so there is nothing to see of it.
        model = fully_shard(make())
        for _ in range(2):
            with no_sync(model):
                model(inputs(rank, 1)).sum().backward()
            model.zero_grad(set_to_none=to_none)
            model(inputs(rank)).sum().backward()
            first, second = local_gradients(make(), torch.float32, 2)
            check(model, [(a + b) / 2 for a, b in zip(first, second, strict=True)])
            # Reduced gradients add up too.
            model(inputs(rank)).sum().backward()
            check(model, [2 * ((a + b) / 2) for a, b in zip(first, second, strict=True)])
            with no_sync(model):
                model(inputs(rank)).sum().backward()
            model.zero_grad(set_to_none=to_none)

    emulate(on_rank, 2, "canonical")
