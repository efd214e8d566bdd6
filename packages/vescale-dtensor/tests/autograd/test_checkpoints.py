"""Activation checkpointing: operators with integer results, checkpoints inside checkpoints and offloading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Shard, distribute_tensor, implicit_communication
from vescale_testing import cached_mesh, run_threads
from vescale_testing.oracle import placements

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda x: x * x.topk(1, -1).values,
    "sort": lambda x: x * x.sort(-1).values,
    "max": lambda x: x * x.max(-1, keepdim=True).values,
    "kthvalue": lambda x: x * x.kthvalue(2, -1, keepdim=True).values,
    "cummax": lambda x: x * x.cummax(-1).values,
    "median": lambda x: x * x.median(-1, keepdim=True).values,
    "gather": lambda x: x.gather(1, x.argsort(-1)) * x,
}


@pytest.mark.parametrize("reentrant", [True, False])
def test_indices_are_saved_alike_in_both_runs(reentrant: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    expected = []
    for fn in FUNCTIONS.values():
        plain = x.clone().requires_grad_()
        fn(plain).sum().backward()
        expected.append(plain.grad)

    def body(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (4,))
        found = []
        for fn in FUNCTIONS.values():
            d = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
            checkpoint(fn, d, use_reentrant=reentrant).sum().backward()
            found.append(d.grad.full_tensor())
        return found

    for got in run_threads(4, body):
        for name, mine, theirs in zip(FUNCTIONS, got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, msg=name)


def _nested(x: Tensor, w: Tensor) -> Tensor:
    """A checkpoint in a checkpoint; sums over a sharded dim show whether dispatch is on."""

    def block(x: Tensor, w: Tensor) -> Tensor:
        h = checkpoint(lambda x, w: (x @ w).tanh() * x.mean(), x * 1, w, use_reentrant=False)
        y: Tensor = checkpoint(lambda h: h.softmax(0).exp(), h, use_reentrant=False)
        return y

    y: Tensor = checkpoint(block, x, w, use_reentrant=False)
    return y


def _offloaded(x: Tensor, w: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        y: Tensor = checkpoint(lambda x, w: (x @ w).tanh() * x.mean(), x * 1, w, use_reentrant=False)
    return y


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("codes", ["S0", "S1", "P", "R"])
@pytest.mark.parametrize("fn", [_nested, _offloaded])
def test_recomputation_under_other_hooks_sees_dtensors(fn: Callable[[Tensor, Tensor], Tensor], codes: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, dtype=torch.float64, generator=generator) for s in ((4, 6), (6, 3))]
    plain = [v.clone().requires_grad_() for v in values]
    fn(*plain).pow(2).sum().backward()
    layouts = (placements(codes), placements("I"))
    ours = [distribute_tensor(v, cached_mesh(2), p).requires_grad_() for v, p in zip(values, layouts, strict=True)]
    with implicit_communication("allow"):
        fn(*ours).pow(2).sum().backward()
        for p, d in zip(plain, ours, strict=True):
            assert isinstance(d.grad, DTensor)
            torch.testing.assert_close(d.grad.full_tensor(), p.grad)
