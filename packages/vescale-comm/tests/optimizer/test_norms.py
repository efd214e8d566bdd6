"""Norms and clipping: each element counts once, whatever its mesh."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from vescale_comm._fsdp import fully_shard
from vescale_comm._optimizer.norms import clip_grad_norm_, get_total_norm
from vescale_comm._optimizer.optimizer import DistributedOptimizer
from vescale_comm.errors import CommError

NORMS = [0.0, 1.0, 2.0, 3.0, math.inf]


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    torch.manual_seed(1)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in [(3, 4), (5,), (), (0, 2), (2,)]]
    for parameter in made[:-1]:
        parameter.grad = torch.randn(parameter.shape, dtype=dtype)
    return made


@pytest.mark.parametrize("p", NORMS)
def test_norms_of_plain_gradients_are_those_of_torch(p: float) -> None:
    mine, theirs = parameters(), parameters()
    flat = torch.cat(
        [q.grad.flatten() for q in theirs if q.grad is not None]
    )  # torch cannot take the maximum of nothing
    expected = torch.linalg.vector_norm(flat, p)
    torch.testing.assert_close(get_total_norm(mine, p), expected)
    torch.testing.assert_close(get_total_norm(iter(mine), p), expected)
    if p > 0:
        torch.nn.utils.clip_grad_norm_([q for q in theirs if q.numel()], 0.5, p)
        torch.testing.assert_close(clip_grad_norm_(iter(mine), 0.5, p), expected)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_small_norm_changes_nothing() -> None:
    some = parameters()
    before = [None if p.grad is None else p.grad.clone() for p in some]
    clip_grad_norm_(some, 1e6)
    for parameter, grad in zip(some, before, strict=True):
        assert (parameter.grad is None) if grad is None else torch.equal(parameter.grad, grad)


def test_models_optimizers_and_single_tensors_are_taken() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(get_total_norm(model), expected)
    torch.testing.assert_close(get_total_norm(torch.optim.SGD(model.parameters())), expected)
    torch.testing.assert_close(get_total_norm(model.weight), model.weight.grad.norm())
    assert get_total_norm([nn.Parameter(torch.zeros(3))]) == 0


def test_low_precision_gradients_are_added_in_a_wide_type() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    exact = parameter.grad.double().norm()
    norm = get_total_norm(parameter)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_a_norm_that_is_not_finite_is_an_error_if_asked_for(p: float) -> None:
    some = parameters()
    some[0].grad[0, 0] = math.nan
    before = some[1].grad.clone()
    assert get_total_norm(some, p).isnan()
    with pytest.raises(CommError, match="nan"):
        clip_grad_norm_(some, 1.0, p, error_if_nonfinite=True)
    assert torch.equal(some[1].grad, before)
    with pytest.raises(ValueError, match="at least 0"):
        get_total_norm(some, -1.0)


@pytest.mark.ranks(4)
def test_every_element_counts_once_over_any_mix_of_meshes(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 6), (5, 3), (8,), (3,), (2, 2)]]

    def placed(index: int, mesh: object, placements: list[object]) -> nn.Parameter:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(wholes[index]), mesh, placements))
        parameter.grad = distribute_tensor(wholes[index], mesh, placements)
        return parameter

    plain = nn.Parameter(torch.zeros_like(wholes[3]))
    plain.grad = wholes[3].clone()
    pending = nn.Parameter(distribute_tensor(torch.zeros_like(wholes[4]), mesh, [Replicate(), Replicate()]))
    pending.grad = DTensor.from_local(wholes[4] / 2, mesh, [Replicate(), Partial()])
    some = [
        placed(0, mesh, [Shard(0), Shard(1)]),
        placed(1, mesh, [Replicate(), Shard(0)]),  # five rows: uneven
        placed(2, mesh["tp"], [Shard(0)]),
        plain,
        pending,
    ]
    flat = torch.cat([whole.flatten() for whole in wholes])
    for p in NORMS:
        torch.testing.assert_close(get_total_norm(some, p), torch.linalg.vector_norm(flat, p))
    total = clip_grad_norm_(some, 0.7)
    torch.testing.assert_close(total, flat.norm())
    for parameter, whole in zip(some, wholes, strict=True):
        grad = parameter.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(full, whole * (0.7 / (flat.norm() + 1e-6)))
    # NaN on one rank is NaN on all of them.
    if rank == 3:
        some[0].grad._local_tensor[0, 0] = math.nan
    assert get_total_norm(some).isnan()
    assert get_total_norm(some, math.inf).isnan()
    # Stages of a pipeline: the parameters themselves differ.
    stage = nn.Parameter(torch.zeros(2))
    stage.grad = torch.full((2,), float(rank + 1))
    expected = torch.tensor([float(r + 1) for r in range(world) for _ in range(2)]).norm()
    torch.testing.assert_close(get_total_norm([stage], groups=[dist.group.WORLD]), expected)


@pytest.mark.ranks(3)
def test_gradients_of_a_sharded_optimizer_count_with_others(rank: int, world: int) -> None:
    torch.manual_seed(0)
    build: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()  # noqa: E731
    model = build()
    other = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    other.grad = torch.arange(4, dtype=torch.float64)
    inputs = torch.randn(world * 2, 5, dtype=torch.float64)
    reference = build()
    reference.load_state_dict(model.state_dict())
    reference(inputs).square().mean().backward()
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    optimizer = DistributedOptimizer(model, torch.optim.SGD, lr=0.5, bucket_mb=1e-4, transport="p2p")

    def backward() -> None:
        optimizer.zero_grad()
        model(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.flatten() for t in tensors])

    for p in NORMS:
        backward()
        torch.testing.assert_close(get_total_norm(optimizer, p), torch.linalg.vector_norm(flat(grads), p))
        torch.testing.assert_close(get_total_norm(model, p), torch.linalg.vector_norm(flat(grads), p))
        both = torch.linalg.vector_norm(flat([*grads, other.grad]), p)
        torch.testing.assert_close(get_total_norm([*model.parameters(), other], p), both)
    some = [model[0].weight, model[1].bias]
    torch.testing.assert_close(get_total_norm(some), flat([grads[0], grads[3]]).norm())
    total = optimizer.clip_grad_norm_(0.1)
    torch.testing.assert_close(total, flat(grads).norm())
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    torch.optim.SGD(reference.parameters(), lr=0.5).step()
    optimizer.finish_param_sync()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.ranks(2)
def test_shards_of_fully_shard_count_once(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    reference = copy.deepcopy(model)
    fully_shard(model, transport="p2p")
    inputs = torch.randn(world * 2, 5, dtype=torch.float64)
    model(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()
    reference(inputs).square().mean().backward()
    for p in NORMS:
        flat = torch.cat([q.grad.flatten() for q in reference.parameters() if q.grad is not None])
        torch.testing.assert_close(get_total_norm(model, p), torch.linalg.vector_norm(flat, p))
    before = clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(before, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    torch.testing.assert_close(get_total_norm(model), torch.tensor(0.1, dtype=torch.float64), rtol=1e-4, atol=0)
