"""Ranks as threads of one process: specs, caches and streams must not leak from one rank into another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, distribute_tensor, randn
from vescale_testing import run_threads
from vescale_testing.oracle import placements


def _layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.gelu(F.layer_norm(x, (16,)) @ up), down).square().mean()


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((9, 16), (16, 24), (5, 24))]


@pytest.mark.parametrize(
    ("shape", "codes"),
    [((8,), ("S0", "R", "I")), ((2, 4), ("S0 I", "I S1", "I S1")), ((2, 2, 2), ("S0 S0 I", "I I S1", "I I S1")),
     ((2, 2, 4), ("S0 S0 I", "I I S1", "R I S1"))],
    ids=str,
)  # fmt: skip
def test_a_layer_and_its_gradients(shape: tuple[int, ...], codes: tuple[str, ...]) -> None:
    plain = [t.requires_grad_() for t in _inputs()]
    expected = _layer(*plain)
    expected.backward()

    def body(rank: int) -> tuple[Tensor, list[Tensor]]:
        mesh = init_device_mesh("cpu", shape)
        args = [
            distribute_tensor(t, mesh, placements(c)).requires_grad_() for t, c in zip(_inputs(), codes, strict=True)
        ]
        loss = _layer(*args)
        assert isinstance(loss, DTensor)
        loss.backward()
        return loss.detach().full_tensor(), [a.grad.full_tensor() for a in args]

    world = torch.Size(shape).numel()
    for loss, grads in run_threads(world, body):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
        for grad, t in zip(grads, plain, strict=True):
            torch.testing.assert_close(grad, t.grad, rtol=1e-10, atol=1e-12)


def test_each_thread_knows_its_own_part() -> None:
    def body(rank: int) -> tuple[int, ...]:
        mesh = init_device_mesh("cpu", (16,))
        d = distribute_tensor(torch.arange(32.0), mesh, placements("S0"))
        assert d.local_offset == (2 * rank,)
        return tuple(d.to_local().int().tolist())

    assert run_threads(16, body) == [(2 * r, 2 * r + 1) for r in range(16)]


def test_threads_have_streams_of_their_own() -> None:
    def body(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (4,))
        generator = torch.Generator().manual_seed(7)
        return randn(8, device_mesh=mesh, placements=placements("S0"), generator=generator).to_local()

    parts = run_threads(4, body)
    assert len({tuple(p.tolist()) for p in parts}) == 4
    again = run_threads(4, body)
    for a, b in zip(parts, again, strict=True):
        assert torch.equal(a, b)
