"""Operators with integer results inside activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import Shard, distribute_tensor
from vescale_testing import run_threads

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
