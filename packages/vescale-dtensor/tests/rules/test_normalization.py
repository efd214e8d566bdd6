"""Normalization layers against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, compare, placements, random_codes

CASES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "layer": (lambda x: F.layer_norm(x, (6,)), [(5, 3, 6)]),
    "layer-affine": (lambda x, w, b: F.layer_norm(x, [6], weight=w, bias=b, eps=1e-6), [(5, 3, 6), (6,), (6,)]),
    "layer-weight": (lambda x, w: torch.layer_norm(x, (6,), w), [(5, 3, 6), (6,)]),
    "layer-two": (lambda x, w, b: F.layer_norm(x, (3, 6), w, b), [(5, 3, 6), (3, 6), (3, 6)]),
    "native": (lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0], [(5, 3, 6), (6,), (6,)]),
    "rms": (lambda x: F.rms_norm(x, (6,)), [(5, 3, 6)]),
    "rms-weight": (lambda x, w: F.rms_norm(x, [6], weight=w, eps=1e-6), [(5, 3, 6), (6,)]),
    "group": (lambda x, w, b: F.group_norm(x, 4, w, b), [(5, 8, 3), (8,), (8,)]),
    "group-plain": (lambda x: F.group_norm(x, 2), [(4, 6, 3)]),
    "instance": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [(5, 8, 3, 2), (8,), (8,)]),
    "batch": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(5, 8, 3), (8,), (8,)]),
    "batch-plain": (lambda x: F.batch_norm(x, None, None, training=True, eps=1e-3), [(7, 4)]),
    "batch-eval": (lambda x, m, v, w: F.batch_norm(x, m.detach(), v.detach().exp(), w), [(5, 8, 3), (8,), (8,), (8,)]),
    "local-response": (lambda x: F.local_response_norm(x, 3), [(5, 8, 4)]),
    "normalize": (lambda x: F.normalize(x, dim=-1), [(5, 8, 4)]),
}


def data(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    fn, shapes = CASES[case]
    args = [data(s, i) for i, s in enumerate(shapes)]
    for codes in random_codes(args, len(mesh_shape), seed=len(case), count=20):
        check_op(fn, args, codes, mesh)


@pytest.mark.ranks(4, pool=True)
def test_batch_and_sequence_stay_sharded() -> None:
    mesh = cached_mesh(2, 2)
    with implicit_communication("error"):
        for codes in ["S0 S1", "S0 I", "S1 S0"]:
            check_op(CASES["layer-affine"][0], [data(s) for s in CASES["layer-affine"][1]], [codes, "I I", "R I"], mesh)
            check_op(CASES["rms-weight"][0], [data(s) for s in CASES["rms-weight"][1]], [codes, "I I"], mesh)
        for codes in [
            ["S0 S1", "I S0", "I S0"],
            ["S1 S0", "S0 I", "S0 I"],
            ["S1 S1", "S0 S0", "S0 S0"],
            ["S0 I", "I I", "I I"],
        ]:
            check_op(CASES["group"][0], [data(s) for s in CASES["group"][1]], codes, mesh)
        for codes in ["S0 S2", "S0 S0", "S2 I"]:
            check_op(CASES["batch"][0], [data(s) for s in CASES["batch"][1]], [codes, "I I", "I I"], mesh)
            check_op(CASES["instance"][0], [data(s) for s in CASES["instance"][1]], [codes, "I I", "I I"], mesh)


NORMS = {
    "batch": (lambda: nn.BatchNorm1d(6), (9, 6)),
    "batch-2d": (lambda: nn.BatchNorm2d(4, momentum=0.3), (5, 4, 3, 2)),
    "batch-cumulative": (lambda: nn.BatchNorm1d(4, momentum=None), (6, 4, 3)),
    "batch-stateless": (lambda: nn.BatchNorm1d(4, track_running_stats=False, affine=False), (6, 4, 3)),
    "instance": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (6, 4, 3)),
    "layer": (lambda: nn.LayerNorm(6), (9, 6)),
    "rms": (lambda: nn.RMSNorm(6), (9, 6)),
    "group": (lambda: nn.GroupNorm(2, 4), (6, 4, 3)),
}


def distributed(module: nn.Module, mesh: Any) -> nn.Module:
    """The module with replicated parameters and buffers."""
    whole = placements(" ".join("I" * mesh.ndim))
    for name, p in list(module.named_parameters()):
        module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, whole)))
    for name, b in list(module.named_buffers()):
        module.register_buffer(name, distribute_tensor(b, mesh, whole))
    return module


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("case", NORMS)
def test_modules_and_their_running_statistics(case: str) -> None:
    mesh = cached_mesh(2, 2)
    make, shape = NORMS[case]
    for codes in ["S0 S0", "S0 S1", "S1 I", "I I", "R S0", "P S0", "I P"]:
        torch.manual_seed(3)
        plain = make().double()
        for p in plain.parameters():
            nn.init.uniform_(p, 0.5, 1.5)
        ours = distributed(make().double(), mesh)
        with torch.no_grad():
            for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
                p.copy_(distribute_tensor(q.detach(), mesh, placements("I I")))
        for step in range(3):
            if step == 2:
                plain.eval()
                ours.eval()
            x = data(shape, step)
            a = x.clone().requires_grad_()
            b = distribute_tensor(x, mesh, placements(codes)).requires_grad_()
            want, got = plain(a), ours(b)
            compare(got, want)
            weights = data(shape, 9)
            (want * weights).sum().backward()
            (got * distribute_tensor(weights, mesh, placements("I I"))).sum().backward()
            compare(b.grad, a.grad)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10)
        for p, q in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(p.to_local(), q, rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
def test_one_value_per_channel_is_an_error() -> None:
    x = distribute_tensor(data((1, 4)), cached_mesh(4), placements("S0"))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(x, None, None, training=True)


@pytest.mark.ranks(4, pool=True)
def test_lost_updates_of_running_statistics_are_refused() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(data((6, 4)), mesh, placements("S0"))
    mean, var = (distribute_tensor(data((4,)).abs(), mesh, placements("S0")) for _ in range(2))
    with pytest.raises(UnsupportedOperationError, match=r"running_mean.*update would be lost"):
        torch.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)
