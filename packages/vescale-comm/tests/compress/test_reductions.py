"""Every compressor over emulated ranks: against formulas, and against the sum that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_comm import BufferPlan, PlanError, TensorSpec, plan_group
from vescale_comm._compress.registry import compressor_named
from vescale_comm._transport import FakeTransport, PeerTransport
from vescale_comm.emulator import emulate
from vescale_comm.errors import MismatchError

CPU = torch.device("cpu")
SPECS = [TensorSpec("w", (12, 15)), TensorSpec("b", (7,)), TensorSpec("none", (0, 3)), TensorSpec("one", ())]
LOSSY: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("fp16", {"block": 16}),
    ("int8", {"block": 16}),
    ("powersgd", {"rank": 2, "gain": 1.0}),
    ("topk", {"ratio": 0.2}),
]
ALL = [("none", {}), *LOSSY]
FEEDBACK = [("bf16", {"feedback": True}), ("fp16", {"block": 16, "feedback": True}), *LOSSY[2:]]


def names(cases: Sequence[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in cases]


def plan_for(world: int) -> BufferPlan:
    return plan_group(SPECS, world, multiple=8)


def gradients(plan: BufferPlan, rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    buffer = torch.zeros(plan.numel, dtype=dtype)
    generator = torch.Generator().manual_seed(1000 * step + rank)
    for slot in plan.slots:
        # Ranks have something in common, or nothing would be worth a sum.
        common = torch.randn(slot.numel, generator=torch.Generator().manual_seed(slot.numel), dtype=torch.float64)
        own = torch.randn(slot.numel, generator=generator, dtype=torch.float64)
        buffer[slot.offset : slot.stop] = (common + own).to(dtype)
    return buffer


def run(
    world: int,
    name: str,
    options: dict[str, Any],
    *,
    steps: int = 1,
    scatter: bool = False,
    dtype: torch.dtype = torch.float32,
    divisor: float | None = None,
    make: Callable[[BufferPlan, int, int], Tensor] | None = None,
    state: dict[str, Any] | None = None,
) -> list[Any]:
    """Return per rank the results of all steps, and the compressor."""

    def train(rank: int) -> Any:
        plan = plan_for(world)
        compressor = compressor_named(name)(plan, dtype, CPU, **options)
        if state is not None:
            compressor.load_state_dict(state)
        transport = PeerTransport(dist.group.WORLD)  # type: ignore[arg-type]
        results = []
        for step in range(steps):
            buffer = gradients(plan, rank, step, dtype) if make is None else make(plan, rank, step)
            work = compressor.reduce(buffer, plan, transport, world if divisor is None else divisor, scatter)
            work.wait()
            work.wait()
            results.append(buffer)
        return results, compressor

    return emulate(train, world, "canonical")


def together(found: list[Any], world: int, scatter: bool, step: int = -1) -> Tensor:
    """Return the result that all ranks have, or of which each has its part."""
    shard = plan_for(world).shard
    if scatter:
        return torch.cat([results[step][r * shard : (r + 1) * shard] for r, (results, _) in enumerate(found)])
    first: Tensor = found[0][0][step]
    for results, _ in found[1:]:
        assert torch.equal(results[step], first)
    return first


def mean(world: int, step: int = 0) -> Tensor:
    plan = plan_for(world)
    return sum(gradients(plan, rank, step, torch.float64) for rank in range(world)) / world  # type: ignore[return-value]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("name", "options"), FEEDBACK, ids=names(FEEDBACK))
@pytest.mark.parametrize("scatter", [False, True], ids=["all", "own part"])
def test_with_feedback_all_results_and_what_is_owed_make_the_truth(
    world: int, name: str, options: dict[str, Any], scatter: bool
) -> None:
    """In float64 the sum over steps is exact: nothing is lost and nothing is told twice."""
    steps = 6
    found = run(world, name, options, steps=steps, scatter=scatter, dtype=torch.float64)
    told = sum(together(found, world, scatter, step) for step in range(steps))
    truth = sum(mean(world, step) for step in range(steps))
    owed = torch.zeros_like(truth)
    plan = plan_for(world)
    for _, compressor in found:
        for slot in plan.slots:
            value = compressor.state_dict()[slot.name]["residual"]
            owed[slot.offset : slot.stop] += value.flatten() / world
    assert owed.any()
    assert (told + owed - truth).abs().max() < 1e-12
    assert not told[plan.slots[-1].stop :].any()


@pytest.mark.parametrize("scatter", [False, True], ids=["all", "own part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_the_rounded_sum_of_rounded_numbers(scatter: bool, dtype: torch.dtype) -> None:
    world = 3
    plan = plan_for(world)
    total = torch.zeros(plan.numel)
    for rank in range(world):
        total += gradients(plan, rank, 0, dtype).bfloat16().float()
    want = (total / world).to(dtype) if scatter else (total / world).bfloat16().to(dtype)
    found = run(world, "bf16", {}, scatter=scatter, dtype=dtype)
    assert torch.equal(together(found, world, scatter), want)


@pytest.mark.parametrize(("name", "bound"), [("fp16", 2.0**-11), ("int8", 1 / 254)])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_codes_err_by_what_they_promise(name: str, bound: float, divisor: float) -> None:
    """Once per rank, and once in the answer, each time by a share of the largest number."""
    world = 3
    parts = [gradients(plan_for(world), rank, 0, torch.float64) for rank in range(world)]
    truth = (parts[0] + parts[1] + parts[2]) / divisor
    limit = bound * (sum(part.abs().max() for part in parts) / divisor + truth.abs().max()) * 1.02
    for scatter in (False, True):
        found = run(world, name, {"block": 16}, scatter=scatter, divisor=divisor)
        error = (together(found, world, scatter) - truth).abs().max()
        assert 0 < error < limit


def test_half_precision_sums_do_not_overflow() -> None:
    """pytorch#57410, #59522: sums in fp16 became infinite."""

    def large(plan: BufferPlan, rank: int, step: int) -> Tensor:
        return torch.full((plan.numel,), 60000.0)

    for name in ("fp16", "bf16"):
        (results, _), _, _ = run(3, name, {}, divisor=1, make=large)
        assert torch.allclose(results[0][: plan_for(3).used], torch.tensor(180000.0), rtol=4e-3)


def test_powersgd_projects_on_what_it_sees() -> None:
    """The result is the mean matrix projected on the columns of mean @ basis; what is owed is orthogonal to those."""
    world, rank = 3, 2
    basis = torch.randn(15, rank, dtype=torch.float64)
    matrix = mean(world)[: 12 * 15].view(12, 15)
    q, _ = torch.linalg.qr(matrix @ basis)
    options = {"rank": rank, "gain": 1.0}
    found = run(world, "powersgd", options, dtype=torch.float64, state={"w": {"basis": basis}})
    result = together(found, world, False)
    assert torch.allclose(result[:180].view(12, 15), q @ q.t() @ matrix, atol=1e-12)
    assert torch.allclose(result[180:188], mean(world)[180:188], atol=1e-12)
    for r, (_, compressor) in enumerate(found):
        own = gradients(plan_for(world), r, 0, torch.float64)[:180].view(12, 15)
        state = compressor.state_dict()
        assert torch.allclose(state["w"]["residual"], own - q @ q.t() @ own, atol=1e-12)
        # The basis of the next step spans the rows of the result.
        span, _ = torch.linalg.qr(state["w"]["basis"])
        assert torch.allclose(span @ span.t() @ matrix.t() @ q, matrix.t() @ q, atol=1e-10)
        assert torch.equal(state["w"]["basis"], found[0][1].state_dict()["w"]["basis"])


def test_powersgd_starts_when_it_is_told() -> None:
    """pytorch#51427: a start at iteration 1 failed. Until the start, bits are the uncompressed ones."""
    plain = run(2, "none", {}, steps=3)
    for start in (0, 1, 2):
        found = run(2, "powersgd", {"rank": 1, "gain": 1.0, "start": start}, steps=3)
        same = [torch.equal(together(found, 2, False, step), together(plain, 2, False, step)) for step in range(3)]
        assert same == [step < start for step in range(3)]


def test_powersgd_of_a_matrix_of_low_rank_is_exact() -> None:
    def low(plan: BufferPlan, rank: int, step: int) -> Tensor:
        torch.manual_seed(rank)
        buffer = torch.zeros(plan.numel, dtype=torch.float64)
        # Each rank has rank 1, together they have rank 2; numbers as small as late in training.
        buffer[:180] = 1e-30 * torch.outer(torch.randn(12), torch.randn(15)).flatten()
        return buffer

    for dtype in (torch.float64, torch.float32):
        found = run(2, "powersgd", {"gain": 1.0}, steps=3, dtype=dtype, make=lambda *a: low(*a).to(dtype))  # noqa: B023
        want = (low(plan_for(2), 0, 0) + low(plan_for(2), 1, 0)) / 2
        assert (together(found, 2, False).double() - want).abs().max() < 1e-5 * want.abs().max()


def test_powersgd_recovers_from_gradients_of_zero() -> None:
    """A basis of zeros would send zeros for ever."""

    def late(plan: BufferPlan, rank: int, step: int) -> Tensor:
        return gradients(plan, rank, 0) * (step > 0)

    found = run(2, "powersgd", {"rank": 2, "gain": 1.0}, steps=3, make=late)
    first, second = together(found, 2, False, 0), together(found, 2, False, 1)
    assert not first.any()
    assert second[:180].norm() > 0.3 * mean(2)[:180].norm()


def test_topk_sends_the_largest() -> None:
    world = 3
    want = torch.zeros(plan_for(world).numel, dtype=torch.float64)
    for rank in range(world):
        own = gradients(plan_for(world), rank, 0, torch.float64)
        for slot, count in zip(plan_for(world).slots, (36, 2, 0, 1), strict=True):
            ranked = sorted(range(slot.offset, slot.stop), key=lambda place: -abs(own[place].item()))
            for place in ranked[:count]:
                want[place] += own[place]
    for scatter in (False, True):
        found = run(world, "topk", {"ratio": 0.2}, scatter=scatter, dtype=torch.float64)
        assert torch.allclose(together(found, world, scatter), want / world, atol=1e-12)
    found = run(world, "topk", {"ratio": 1.0}, dtype=torch.float64)
    assert torch.allclose(together(found, world, False), mean(world), atol=1e-12)


@pytest.mark.parametrize(("name", "options"), ALL, ids=names(ALL))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives_and_is_over_with_the_next_step(
    name: str, options: dict[str, Any], bad: float
) -> None:
    def spoiled(plan: BufferPlan, rank: int, step: int) -> Tensor:
        buffer = gradients(plan, rank, step)
        if rank == 1 and step == 1:
            buffer[17] = bad
        return buffer

    found = run(2, name, options, steps=4, make=spoiled)
    for results, compressor in found:
        finite = [bool(result.isfinite().all()) for result in results]
        assert finite == [True, False, True, True]
        assert not results[1][17].isfinite()
        assert not results[1][plan_for(2).used :].any()  # the padding, which lives on
        for values in compressor.state_dict().values():
            assert bool(torch.as_tensor(values.get("residual", 0.0)).isfinite().all())


@pytest.mark.parametrize(("name", "options"), ALL, ids=names(ALL))
def test_one_rank_sends_nothing_and_loses_nothing(name: str, options: dict[str, Any]) -> None:
    plan = plan_for(1)
    compressor = compressor_named(name)(plan, torch.float32, CPU, **options)
    for step in range(2):
        buffer = gradients(plan, 0, step)
        compressor.reduce(buffer, plan, FakeTransport(1), 2.0, False).wait()
        assert torch.equal(buffer, gradients(plan, 0, step) / 2)
    assert compressor.wire_bytes == 0


@pytest.mark.parametrize(("name", "options"), LOSSY, ids=names(LOSSY))
def test_buckets_of_next_to_nothing(name: str, options: dict[str, Any]) -> None:
    plan = plan_group([TensorSpec("none", (0,)), TensorSpec("one", ())], 4)

    def reduce(rank: int) -> list[float]:
        compressor = compressor_named(name)(plan, torch.float32, CPU, **options)
        buffer = torch.zeros(plan.numel)
        buffer[0] = rank + 1
        compressor.reduce(buffer, plan, PeerTransport(dist.group.WORLD), 1, False).wait()  # type: ignore[arg-type]
        return buffer.tolist()

    for result in emulate(reduce, 4, "canonical"):
        assert result == pytest.approx([10, 0, 0, 0], rel=0.02)
    nothing = plan_group([TensorSpec("none", (0,))], 2, multiple=4)
    compressor = compressor_named(name)(nothing, torch.float32, CPU, **options)
    compressor.reduce(torch.zeros(nothing.numel), nothing, FakeTransport(2), 2, False).wait()
    assert all(not values["residual"].numel() for values in compressor.state_dict().values() if "residual" in values)


def test_bytes_on_the_wire() -> None:
    """Of 1 MiB over 4 ranks; a plain all_reduce sends 1.5 MiB per rank, a reduce_scatter half of that."""
    plan = plan_group([TensorSpec("w", (512, 512))], 4)
    want = {
        ("none", False): 1.5 * 2**20,
        ("none", True): 0.75 * 2**20,
        ("bf16", False): 0.75 * 2**20,
        ("bf16", True): 0.375 * 2**20,
        ("fp16", False): 0.75 * 2**20 * (1 + 1 / 512),
        ("int8", False): 0.375 * 2**20 * (1 + 1 / 64),
        ("int8", True): 0.1875 * 2**20 * (1 + 1 / 64),
        ("powersgd", False): 2 * 2 * 512 * 4 * 1.5,
        ("topk", False): 3 * 2622 * 8,
    }

    def reduce(rank: int) -> dict[Any, float]:
        found = {}
        for name, scatter in want:
            transport = PeerTransport(dist.group.WORLD)  # type: ignore[arg-type]
            compressor = compressor_named(name)(plan, torch.float32, CPU)
            compressor.reduce(torch.ones(plan.numel), plan, transport, 4, scatter).wait()
            found[name, scatter] = compressor.wire_bytes
        return found

    for found in emulate(reduce, 4, "canonical"):
        assert found == want


@pytest.mark.parametrize(("name", "options"), FEEDBACK, ids=names(FEEDBACK))
def test_a_saved_state_goes_on_bit_for_bit(name: str, options: dict[str, Any]) -> None:
    def go_on(rank: int) -> bool:
        plan = plan_for(2)
        transport = PeerTransport(dist.group.WORLD)  # type: ignore[arg-type]
        first, second = (compressor_named(name)(plan, torch.float32, CPU, **options) for _ in range(2))
        for step in range(5):
            if step == 3:
                second.load_state_dict(first.state_dict())
            results = [gradients(plan, rank, step), gradients(plan, rank, step)]
            first.reduce(results[0], plan, transport, 2, False).wait()
            if step >= 3:
                second.reduce(results[1], plan, transport, 2, False).wait()
                assert torch.equal(*results)
        second.load_state_dict({})
        return second.state_dict() == {}

    assert emulate(go_on, 2, "canonical") == [True, True]


def test_wrong_use_is_refused() -> None:
    plan = plan_for(2)
    with pytest.raises(ValueError, match=r"TopK takes gradients of real floating point; got torch.complex64 .* of w"):
        compressor_named("topk")(plan, torch.complex64, CPU)
    with pytest.raises(ValueError, match="ratio: top-k needs 0 < ratio <= 1; got 0"):
        compressor_named("topk")(plan, torch.float32, CPU, ratio=0)
    with pytest.raises(ValueError, match=r"rank: PowerSGD needs rank >= 1.*\(0, 0, 2.0\)"):
        compressor_named("powersgd")(plan, torch.float32, CPU, rank=0)
    compressor = compressor_named("powersgd")(plan, torch.float32, CPU)
    other = plan_group([TensorSpec("v", (2,))], 2)
    with pytest.raises(PlanError, match=r"PowerSGD was made for the bucket of w, b, none, \.\.\."):
        compressor.reduce(torch.zeros(other.numel), other, FakeTransport(2), 2, False)
    with pytest.raises(MismatchError, match="v is not in the bucket of w, b, none"):
        compressor.load_state_dict({"v": {}})
    compressor = compressor_named("powersgd")(plan, torch.float32, CPU, gain=1)
    with pytest.raises(MismatchError, match=r"basis of w has shape \[15, 3\], but this PowerSGD needs \[15, 2\]"):
        compressor.load_state_dict({"w": {"basis": torch.zeros(15, 3)}})
