"""Collectives of compressors: what goes over the transport, and reductions of several stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm import TensorSpec, plan_group, transport
from vescale_comm._compress.registry import compressor_named
from vescale_comm._compress.wire import LAG, Staged, Wire
from vescale_comm._transport import FakeTransport
from vescale_comm.errors import TransportError

NAMES = ("none", "bf16", "fp16", "int8", "powersgd", "topk")


class Step:
    """A collective that notes when it is waited for."""

    def __init__(self, log: list[str], name: str, error: BaseException | None = None) -> None:
        self.log, self.name, self.error = log, name, error
        log.append(f"start {name}")

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        self.log.append(f"end {self.name}")


def two_steps(log: list[str], name: str, error: BaseException | None = None) -> Iterator[Step]:
    yield Step(log, f"{name}1", error)
    yield Step(log, f"{name}2")
    log.append(f"done {name}")


def test_second_stages_begin_while_later_buckets_are_launched() -> None:
    """At places that all ranks reach in the same order."""
    log: list[str] = []
    wire = FakeTransport(2)
    works = [Staged(two_steps(log, name), wire) for name in "abcd"]
    assert LAG == 2
    assert log == [
        *("start a1", "start b1", "start c1", "end a1", "start a2"),
        *("start d1", "end b1", "start b2"),
    ]
    del log[:]
    for work in works:
        work.wait()
        work.wait()
    assert log[:4] == ["end a2", "done a", "end b2", "done b"]
    assert log[4:] == [entry for x in "cd" for entry in (f"end {x}1", f"start {x}2", f"end {x}2", f"done {x}")]
    # Another transport has a queue of its own.
    Staged(two_steps(log, "e"), FakeTransport(2))
    assert log[-1] == "start e1"


def test_a_rank_of_many_counts_what_it_would_send() -> None:
    fake = FakeTransport(1024, rank=5)
    plan = plan_group([TensorSpec("w", (1024, 512))], 1024)
    compressor = compressor_named("int8")(plan, torch.float32, torch.device("cpu"))
    compressor.reduce(torch.ones(plan.numel), plan, fake, 1024, False).wait()
    assert [call.operation for call in fake.calls] == ["all_to_all", "all_gather"]
    assert compressor.wire_bytes == sum(call.sent for call in fake.calls) == 2 * 1023 * (512 + 2 * 4)


def test_a_failure_is_told_by_the_reduction_that_failed_at_each_wait() -> None:
    log: list[str] = []
    wire = FakeTransport(2)
    first = Staged(two_steps(log, "a", TransportError("rank 1 is gone")), wire)
    others = [Staged(two_steps(log, name), wire) for name in "bc"]
    for _ in range(2):
        with pytest.raises(TransportError, match="rank 1 is gone"):
            first.wait()
    for work in others:
        work.wait()
    assert "start a2" not in log


def test_steps_that_were_left_in_the_middle_are_no_result() -> None:
    wire = FakeTransport(2)
    for error in (KeyboardInterrupt(), RuntimeError("no kernel")):
        work = Staged(two_steps([], "a", error), wire)
        with pytest.raises(type(error)):
            work.wait()
        for _ in range(2):
            with pytest.raises(TransportError, match=f"interrupted by {type(error).__name__}"):
                work.wait()


def buffers(rank: int, numel: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(numel, generator=generator) for _ in range(count)]


@pytest.mark.ranks(3, pool=True)
def test_all_transports_give_the_same_bits(rank: int, world: int) -> None:
    """Several buckets under way, over two steps, in both modes."""
    plan = plan_group([TensorSpec("w", (40, 60)), TensorSpec("b", (77,))], world)
    kinds = [("p2p", None), ("native", "canonical"), ("shared", None)]
    made = [transport(dist.group.WORLD, kind, order=order) for kind, order in kinds]  # type: ignore[arg-type]
    for one in made:
        rows = torch.arange(9).view(3, 3) + 100 * rank
        work, came = Wire(one).all_to_all(rows)
        work.wait()
        assert came.tolist() == [[100 * source + 3 * rank + i for i in range(3)] for source in range(world)]
        if hasattr(one, "all_to_all"):
            one.all_to_all(torch.empty(0), torch.empty(0)).wait()
            with pytest.raises(ValueError, match="multiple of the number of ranks, 3; got 4"):
                one.all_to_all(torch.zeros(4), torch.zeros(4))
    for name in NAMES:
        for scatter in (False, True):
            found: list[list[Tensor]] = []
            for one in made:
                compressors = [compressor_named(name)(plan, torch.float32, torch.device("cpu")) for _ in range(4)]
                results = []
                for _ in range(2):
                    some = buffers(rank, plan.numel, 4)
                    for buffer in some:
                        buffer[plan.used :] = 0
                    works = [c.reduce(b, plan, one, world, scatter) for c, b in zip(compressors, some, strict=True)]
                    for work in works:
                        work.wait()
                    results += some
                own = slice(rank * plan.shard, (rank + 1) * plan.shard) if scatter else slice(None)
                found.append([result[own] for result in results])
            for others in found[1:]:
                for got, want in zip(others, found[0], strict=True):
                    assert torch.equal(got, want), (name, scatter)
            if not scatter:
                everybody: list[Any] = [None] * world
                dist.all_gather_object(everybody, found[0])
                for others in everybody:
                    assert all(torch.equal(a, b) for a, b in zip(others, found[0], strict=True)), name
    for one in made:
        one.close()
