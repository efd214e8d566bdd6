"""Emulated runs against the same program on real processes with gloo, bit for bit."""

import zlib
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from vescale_comm.emulator import compare, emulate, record

SIZES = [1, 2, 3, 5, 7, 31, 100, 1023, 4099, 65_537, 262_147, (1 << 20) + 13, 4 << 20]
DTYPES = [torch.float32, torch.bfloat16]


def bits(tensor):
    return zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy())


@cache
def base(rank):
    """Return numbers between 2**-15 and 2 of both signs, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(rank)
    words = torch.randint(-(1 << 31), 1 << 31, (SIZES[-1] + 100,), dtype=torch.int32, generator=generator)
    return words.bitwise_and_(~0x78000000).bitwise_or_(0x38000000).view(torch.float32)


def numbers(size, rank, dtype=torch.float32):
    start = size % 89
    return base(rank)[start : start + size].to(dtype, copy=True)


def collectives(rank):
    """Call every collective that moves or adds numbers, and return hashes of what came out."""
    world, found = dist.get_world_size(), {}
    for dtype in DTYPES:
        for size in SIZES:
            # All sizes are sizes of the larger of the two buffers; those that must be divisible are rounded up.
            part = -(-size // world)
            mine = numbers(part * world, rank, dtype)
            total = mine[:size].clone()
            dist.all_reduce(total)
            scattered = torch.empty(part, dtype=dtype)
            dist.reduce_scatter_tensor(scattered, mine)
            gathered = torch.empty(part * world, dtype=dtype)
            dist.all_gather_into_tensor(gathered, mine[:part])
            exchanged = torch.empty(part * world, dtype=dtype)
            dist.all_to_all_single(exchanged, mine)
            received = mine[:size].clone()
            dist.broadcast(received, size % world)
            results = {"all_reduce": total, "reduce_scatter": scattered, "all_gather": gathered}
            results |= {"all_to_all": exchanged, "broadcast": received}
            for name, tensor in results.items():
                found[name, dtype, size] = bits(tensor)
    return found


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8)


def reductions(rank):
    """Call the less common reductions."""
    world, found = dist.get_world_size(), {}
    for dtype in FLOATS + INTEGERS:
        for size in (1, 5, 1000, 100_001):
            mine = numbers(size, rank)
            mine = mine.to(dtype) if dtype in FLOATS else (mine * 50).abs().to(dtype)
            for name in ("SUM", "PRODUCT", "MIN", "MAX", *(("AVG",) if dtype in FLOATS else ("BAND", "BOR", "BXOR"))):
                operation, root = getattr(dist.ReduceOp, name), size % world
                total, at_root = mine.clone(), mine.clone()
                dist.all_reduce(total, operation)
                dist.reduce(at_root, root, operation)
                # Also on ranks that do not get the result: gloo leaves partial sums there.
                found[name, dtype, size] = bits(total), bits(at_root)
    number = torch.view_as_complex(numbers(2000, rank).view(-1, 2))
    dist.all_reduce(number)
    found["complex"] = bits(torch.view_as_real(number))
    # Elements count in the order of memory, and so do the cuts between ranks.
    turned = numbers(3001 * 7, rank).view(3001, 7).t()
    dist.all_reduce(turned)
    found["transposed"] = bits(turned)
    received = numbers(21, rank).view(3, 7).t() if rank == 0 else numbers(21, rank).view(7, 3)
    dist.broadcast(received, 0)
    found["transposed broadcast"] = bits(received)
    truth = numbers(100, rank) > 0
    dist.all_reduce(truth, dist.ReduceOp.MAX)
    found["bool"] = bits(truth)
    tensors = [numbers(size, rank) for size in (5, 1000, 70_001)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    found["all_reduce_coalesced"] = [bits(tensor) for tensor in tensors]
    lists = [numbers(1001 + i, rank)[:1001] for i in range(world)]
    out = torch.empty(1001)
    dist.reduce_scatter(out, lists, dist.ReduceOp.SUM)
    found["reduce_scatter"] = bits(out)
    return found


def everywhere(program):
    """Run a program on the real ranks, and emulated on rank 0; return the results of both, there."""
    results = [None] * dist.get_world_size()
    dist.all_gather_object(results, program(dist.get_rank()))
    if dist.get_rank():
        return None
    return emulate(program, dist.get_world_size()), results


@pytest.mark.ranks(2, timeout=120)
def test_two_ranks(rank, world):
    check_collectives()


@pytest.mark.ranks(3, timeout=120)
def test_three_ranks(rank, world):
    check_collectives()
    both = everywhere(fully_sharded)
    assert both is None or both[0] == both[1]


@pytest.mark.ranks(4, timeout=120)
def test_four_ranks(rank, world):
    check_collectives()


def check_collectives():
    for program in (collectives, reductions):
        both = everywhere(program)
        if both is not None:
            emulated, real = both
            for one, other in zip(emulated, real, strict=True):
                assert [key for key in other if one[key] != other[key]] == []
                assert one.keys() == other.keys()


def fully_sharded(rank):
    """Train with torch's FSDP2 and return hashes of gradients and parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(17, 17) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 17)).pow(2).sum().backward()
        optimizer.step()
    return [bits(tensor.to_local()) for one in model.parameters() for tensor in (one, one.grad)]


class ToRanks(torch.autograd.Function):
    """Megatron's f: the input goes to all ranks of the group, its gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        return funcol.wait_tensor(funcol.all_reduce(gradient, "sum", ctx.group)), None


class FromRanks(torch.autograd.Function):
    """Megatron's g: partial results are summed, the gradient goes to all ranks."""

    @staticmethod
    def forward(ctx, x, group):
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Block(nn.Module):
    """Two linear layers, of which each rank of the group has half of the hidden units."""

    def __init__(self, width, hidden, group):
        super().__init__()
        rank, size = group.rank(), group.size()
        whole = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.inner, self.outer = nn.Linear(width, hidden // size), nn.Linear(hidden // size, width, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(whole[0].weight.chunk(size, 0)[rank])
            self.inner.bias.copy_(whole[0].bias.chunk(size, 0)[rank])
            self.outer.weight.copy_(whole[1].weight.chunk(size, 1)[rank])
        self.group = group

    def forward(self, x):
        hidden = nn.functional.gelu(self.inner(ToRanks.apply(x, self.group)))
        return x + FromRanks.apply(self.outer(hidden), self.group)


def train(rank, shape=(2, 2)):
    """Train 20 steps on a mesh of data parallel by tensor parallel ranks; return what was recorded."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block(32, 64, mesh["tp"].get_group()) for _ in range(3)], nn.Linear(32, 8))
    model = DistributedDataParallel(blocks, process_group=mesh["dp"].get_group(), bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + mesh["dp"].get_local_rank())
    with record() as recording:
        for step in range(20):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 32)).pow(2).mean()
            loss.backward()
            optimizer.step()
            recording.note(f"loss of step {step}", loss)
            recording.note_module(blocks, f"step {step}")
    return recording


def train_data_parallel(rank):
    return train(rank, (4, 1))


@pytest.mark.ranks(4, timeout=120)
def test_twenty_steps_of_data_and_tensor_parallel_training(rank, world):
    both = everywhere(train)
    if both is not None:
        emulated, real = both
        assert compare(emulated, real) is None
        notes = [event for event in emulated[0].events if event.op == "note"]
        assert len(notes) == 20 * (1 + 2 * 11)
        assert notes[1].after != notes[-22].after
        # Three blocks forward, two of them backward to their input, and gradient buckets.
        assert sum(event.op == "all_reduce" for event in emulated[0].events) >= 20 * (3 + 2 + 1)
    # Two numbers have one sum; with four ranks on one axis the order counts.
    both = everywhere(train_data_parallel)
    if both is not None:
        emulated, real = both
        assert compare(emulated, real) is None
        found = compare(emulate(train_data_parallel, 4, "canonical"), real)
        assert (found.op, found.what, found.rank) == ("all_reduce", "output", 0)
