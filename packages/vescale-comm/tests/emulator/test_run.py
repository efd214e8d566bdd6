"""The emulated world: calls of torch.distributed in it, errors, deadlocks, and what ranks do not share."""

import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from vescale_comm.emulator import DeadlockError, EmulatedRankError, NcclRing, emulate, is_emulated
from vescale_comm.errors import CommError, MismatchError


def values(rank, size=4):
    return torch.arange(size, dtype=torch.float32) + 10 * rank


def test_every_collective_moves_what_it_should():
    def collectives(rank):
        world = dist.get_world_size()
        mine = values(rank, 2 * world)
        every = [values(other, 2 * world) for other in range(world)]
        total = sum(every[1:], every[0])

        out = [torch.zeros(2 * world) for _ in range(world)]
        dist.all_gather(out, mine)
        assert all(map(torch.equal, out, every))
        flat = torch.zeros(2 * world * world)
        dist.all_gather_into_tensor(flat, mine)
        assert torch.equal(flat, torch.cat(every))
        flat = torch.zeros(world, 2)
        flat[rank] = mine[:2]
        dist.all_gather_into_tensor(flat, flat[rank])
        assert torch.equal(flat, torch.stack(every)[:, :2])

        summed = mine.clone()
        assert dist.all_reduce(summed) is None
        assert torch.equal(summed, total)
        summed = mine.clone()
        dist.all_reduce(summed, dist.ReduceOp.MAX)
        assert torch.equal(summed, every[-1])
        part = torch.zeros(2)
        dist.reduce_scatter_tensor(part, mine)
        assert torch.equal(part, total.view(world, 2)[rank])
        dist.reduce_scatter(part, list(mine.split(2)), dist.ReduceOp.AVG)
        assert torch.equal(part, total.view(world, 2)[rank] / world)
        summed = mine.clone()
        dist.reduce(summed, 1)
        assert rank != 1 or torch.equal(summed, total)

        received = mine.clone()
        dist.broadcast(received, 2)
        assert torch.equal(received, every[2])
        collected = [torch.zeros(2 * world) for _ in range(world)] if rank == 1 else None
        dist.gather(mine, collected, dst=1)
        assert rank != 1 or all(map(torch.equal, collected, every))
        part = torch.zeros(2)
        dist.scatter(part, list(mine.split(2)) if rank == 0 else None, src=0)
        assert torch.equal(part, every[0].view(world, 2)[rank])

        exchanged = torch.zeros(2 * world)
        dist.all_to_all_single(exchanged, mine)
        assert torch.equal(exchanged, torch.cat([other.view(world, 2)[rank] for other in every]))
        # Rank r sends r + 1 rows to everybody.
        rows = torch.full((world * (rank + 1), 2), float(rank))
        got = torch.zeros(sum(range(1, world + 1)), 2)
        dist.all_to_all_single(got, rows, list(range(1, world + 1)), [rank + 1] * world)
        assert got[:, 0].tolist() == [float(other) for other in range(world) for _ in range(other + 1)]
        lists = [torch.zeros(2) for _ in range(world)]
        dist.all_to_all(lists, list(mine.split(2)))
        assert torch.equal(torch.cat(lists), exchanged)

        objects = [None] * world
        dist.all_gather_object(objects, {"rank": rank})
        assert [found["rank"] for found in objects] == list(range(world))
        dist.barrier()
        dist.monitored_barrier()
        return rank

    assert emulate(collectives, 3) == [0, 1, 2]


def test_messages_and_batches():
    def messages(rank):
        world = dist.get_world_size()
        after, before = (rank + 1) % world, (rank - 1) % world
        got = torch.zeros(4)
        operations = [dist.P2POp(dist.isend, values(rank), after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(got, values(before))
        if rank == 0:
            for tag in (1, 2):
                dist.send(torch.full((1,), float(tag)), 1, tag=tag)
            dist.send(torch.zeros(1, dtype=torch.int16), 2)
        elif rank == 1:
            late, early = torch.zeros(1), torch.zeros(1)
            second = dist.irecv(late, 0, tag=2)
            dist.recv(early, 0, tag=1)
            second.wait()
            assert (early.item(), late.item()) == (1, 2)
        else:
            assert dist.recv(torch.ones(1, dtype=torch.int16)) == 0
        objects = [rank]
        dist.broadcast_object_list(objects, 1)
        return objects[0]

    assert emulate(messages, 3) == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # names change between versions of torch
def test_coalesced_and_functional_collectives():
    def functional(rank):
        group = dist.group.WORLD
        assert funcol.all_reduce(values(rank), "sum", group).tolist() == [10, 12, 14, 16]
        assert funcol.all_gather_tensor(values(rank), 0, group).tolist() == [*values(0).tolist(), *values(1).tolist()]
        assert funcol.reduce_scatter_tensor(values(rank), "avg", 0, group).tolist() == [[5, 6], [7, 8]][rank]
        assert funcol.broadcast(values(rank), 1, group).tolist() == values(1).tolist()
        both = funcol.all_reduce_coalesced([values(rank), values(rank) * 2], "max", group)
        assert [one.tolist() for one in both] == [values(1).tolist(), (values(1) * 2).tolist()]
        swapped = funcol.all_to_all_single(values(rank), [2, 2], [2, 2], group)
        assert swapped.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
        with dist._coalescing_manager(async_ops=True) as manager:
            tensors = [values(rank), values(rank)]
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
        assert all(torch.equal(tensor, values(0) + values(1)) for tensor in tensors)
        x = values(rank).requires_grad_()
        funcol.all_gather_tensor_autograd(x, 0, group).pow(2).sum().backward()
        return x.grad.tolist()

    assert emulate(functional, 2) == [(values(rank) * 4).tolist() for rank in range(2)]


def test_groups_and_meshes():
    def meshes(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        total = values(rank)
        dist.all_reduce(total, group=mesh["dp"].get_group())
        assert torch.equal(total, values(rank % 2) + values(rank % 2 + 2))
        odd = dist.new_group([1, 3])
        if rank % 2:
            seen = torch.tensor([rank])
            dist.broadcast(seen, 3, group=odd)
            assert seen.item() == 3
            assert is_emulated(odd)
            dist.destroy_process_group(odd)
        whole = torch.arange(12.0).view(4, 3)
        sharded = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        assert torch.equal((sharded @ sharded.t()).full_tensor(), whole @ whole.t())
        return dist.get_process_group_ranks(mesh["tp"].get_group())

    assert emulate(meshes, 4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def train(rank, steps=3):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = DistributedDataParallel(module, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).pow(2).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def test_data_parallel_training_is_that_of_one_process():
    results = emulate(train, 2)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(3):
        optimizer.zero_grad()
        for generator in generators:
            (module(torch.randn(5, 8, generator=generator)).pow(2).sum() / 2).backward()
        optimizer.step()
    for found in results:
        for one, other in zip(found, module.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, *results))


def test_two_runs_give_the_same_bits():
    for one, other in zip(emulate(train, 3), emulate(train, 3), strict=True):
        assert all(map(torch.equal, one, other))


def test_the_order_of_additions_is_that_of_the_backend():
    def total(rank):
        value = torch.tensor([1e8, -1e8, 1.0, 1.0])[rank]
        dist.all_reduce(value)
        return value.item(), dist.get_backend()

    assert emulate(total, 4, "canonical") == [(2.0, "gloo")] * 4
    # One element belongs to rank 0, so it travels 3, 2, 1, 0: 1e8 + (-1e8 + (1 + 1)), where the 2 is lost.
    assert emulate(total, 4, "gloo") == [(0.0, "gloo")] * 4
    assert {name for _, name in emulate(total, 4, NcclRing())} == {"nccl"}


def test_a_program_that_makes_its_own_group():
    def program(rank):
        assert not dist.is_initialized()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(rank), "2")
        dist.init_process_group("gloo")
        value = torch.ones(1)
        dist.all_reduce(value)
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=2)
        dist.all_reduce(value)
        return value.item()

    assert emulate(program, 2, init=False) == [4.0, 4.0]
    assert not dist.is_initialized()


def test_each_rank_has_its_own_random_numbers_and_environment():
    torch.manual_seed(5)
    random.seed(5)
    before = torch.random.get_rng_state()
    environment = dict(os.environ)

    def draw(rank):
        first = torch.rand(2)
        dist.barrier()
        return first, torch.rand(2), random.random(), os.environ["RANK"]

    results = emulate(draw, 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert dict(os.environ) == environment
    expected = torch.rand(4), random.random()
    for rank, (first, second, number, name) in enumerate(results):
        assert torch.equal(torch.cat([first, second]), expected[0])
        assert (number, name) == (expected[1], str(rank))


def test_a_failing_rank_ends_all_with_its_traceback():
    def fail(rank):
        if rank == 1:
            raise KeyError("cause")
        dist.barrier()

    with pytest.raises(EmulatedRankError, match="Rank 1 of 3 emulated ranks failed: KeyError: 'cause'") as caught:
        emulate(fail, 3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__cause__.__traceback__.tb_next is not None
    assert emulate(lambda rank: dist.get_rank(), 2) == [0, 1]


def test_a_deadlock_says_what_each_rank_waits_for():
    def hang(rank):
        if rank == 2:
            dist.recv(torch.zeros(1), 0)
        else:
            dist.all_reduce(torch.zeros(3))

    with pytest.raises(DeadlockError) as caught:
        emulate(hang, 3)
    text = str(caught.value)
    assert "rank 0: waits for all_reduce(sum) of float32[3], collective 0 of group 0 (ranks 0, 1, 2)" in text
    assert ", missing ranks 2, at " in text
    assert "rank 2: waits for rank 0 to send with tag 0" in text
    assert text.count(__file__) == 3


def test_sends_that_wait_for_each_other_are_a_deadlock_as_on_gloo():
    def hang(rank):
        dist.send(torch.zeros(1), 1 - rank)
        dist.recv(torch.zeros(1), 1 - rank)

    with pytest.raises(DeadlockError, match="rank 1: waits for rank 0 to receive with tag 0"):
        emulate(hang, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rank: dist.all_reduce(torch.zeros(3 + rank)), r"rank 1 calls all_reduce\(sum\) of float32\[4\], but"),
        (lambda rank: dist.all_reduce(torch.zeros(3)) if rank else dist.barrier(), "but rank 0 called barrier"),
        (lambda rank: dist.broadcast(torch.zeros(3), rank), "broadcast from rank 1"),
        (
            lambda rank: dist.send(torch.zeros(3), 1) if rank == 0 else dist.recv(torch.zeros(4), 0),
            "rank 0 sends 12 bytes, but rank 1 receives 16",
        ),
    ],
)
def test_ranks_that_call_different_things_get_an_error(call, text):
    with pytest.raises(EmulatedRankError, match=text) as caught:
        emulate(call, 2)
    assert isinstance(caught.value.__cause__, MismatchError)


def test_a_buffer_that_is_changed_under_way_is_found():
    def race(rank):
        buffer = torch.ones(3)
        work = dist.all_reduce(buffer, async_op=True)
        buffer += 1
        work.wait()
        return buffer.tolist()

    with pytest.raises(EmulatedRankError, match=r"rank 1: input 0 of all_reduce\(sum\) of float32\[3\] was changed"):
        emulate(race, 2)
    assert emulate(race, 2, check=False) == [[2.0] * 3] * 2


def test_results_are_there_after_the_wait_and_not_before():
    def early(rank):
        buffer = torch.ones(2)
        work = dist.all_reduce(buffer, async_op=True)
        dist.barrier()
        seen = buffer.tolist()
        assert work.is_completed()
        return seen, buffer.tolist(), work.get_future().wait()[0].tolist()

    assert emulate(early, 2) == [([1.0, 1.0], [2.0, 2.0], [2.0, 2.0])] * 2


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.int16)), r"gloo do not take torch\.int16"),
        (lambda rank: dist.all_reduce(torch.ones(6)[::2]), "needs a tensor without gaps in memory"),
        (lambda rank: dist.isend(torch.ones(6)[::2], 1 - rank), "send: needs a contiguous tensor"),
        (lambda rank: dist.group.WORLD.allreduce([torch.ones(1)] * 2), "all_reduce: takes one tensor; got 2"),
        (lambda rank: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "3 rows, which 2 ranks do not divide"),
        (lambda rank: dist.all_to_all_single(torch.ones(2), torch.ones(2), [1, 1], [2, 1]), "do not fit 2 rows"),
    ],
)
def test_what_gloo_refuses_or_spoils_is_refused(call, text):
    with pytest.raises(EmulatedRankError, match=text):
        emulate(call, 2)


def test_threads_of_a_rank_have_no_turns():
    def program(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="waited for by the thread of that rank"):
            pool.submit(work.wait).result()
        return work.wait()

    assert emulate(program, 2) == [True, True]


def test_errors_of_a_rank_are_not_swallowed_by_its_fellows():
    def program(rank):
        if rank == 1:
            raise ValueError("cause")
        try:
            dist.barrier()
        except Exception:
            return "went on"

    with pytest.raises(EmulatedRankError, match="ValueError: cause"):
        emulate(program, 2)


def test_wrong_calls_of_emulate():
    with pytest.raises(ValueError, match="world_size: must be at least 1; got 0"):
        emulate(print, 0)
    with pytest.raises(ValueError, match="backend: 'mpi' is no order; choose one of gloo, canonical"):
        emulate(print, 2, "mpi")
    with pytest.raises(EmulatedRankError, match="rank 0 of an emulated world cannot start another one") as caught:
        emulate(lambda rank: emulate(print, 2), 1)
    assert isinstance(caught.value.__cause__, CommError)


def test_arguments_are_passed_on_and_64_ranks_are_no_matter():
    def total(rank, base, *, factor):
        value = torch.tensor([float(base + rank)])
        dist.all_reduce(value)
        return value.item() * factor

    assert emulate(total, 64, args=(1,), kwargs={"factor": 2}) == [64 * 65.0] * 64


def test_dtensor_gradients():
    def gradients(rank):
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]).requires_grad_()
        x = DTensor.from_local(torch.ones(3, 2), mesh)
        (x @ weight.t()).sum().backward()
        return weight.grad.full_tensor()

    assert all(torch.equal(one, torch.full((4, 2), 3.0)) for one in emulate(gradients, 2))
