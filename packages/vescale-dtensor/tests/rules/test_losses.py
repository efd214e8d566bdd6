"""Losses against one device: batch sharded, classes sharded, every reduction and option."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Partial, Replicate, Shard, distribute_tensor
from vescale_dtensor._comm import record
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements, random_codes

REDUCTIONS = ["mean", "sum", "none"]
MESHES = [(4,), (2, 2)]


def _logits(shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, class indices with two ignored ones, class weights."""
    generator = torch.Generator().manual_seed(seed)
    dim = 0 if len(shape) == 1 else 1
    tokens = shape[:dim] + shape[dim + 1 :]
    target = torch.randint(shape[dim], tokens, generator=generator)
    if target.numel() > 3:
        target.view(-1)[[0, 3]] = -100
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits, target, torch.rand(shape[dim], generator=generator, dtype=torch.float64) + 0.5


def _indices(reduction: str, smoothing: float, weight: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    def fn(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None = None) -> torch.Tensor:
        return F.cross_entropy(x, t, w, reduction=reduction, label_smoothing=smoothing)

    return fn


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(6, 7), (5, 6, 3), (2, 5, 3, 2), (7,), (3, 2)], ids=str)
def test_cross_entropy_with_class_indices(shape: tuple[int, ...], reduction: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    x, t, _ = _logits(shape)
    for smoothing in (0.0, 0.3):
        for codes in random_codes((x, t), len(mesh_shape), seed=len(shape), count=6):
            with implicit_communication("allow"):
                check_op(_indices(reduction, smoothing, None), (x, t), codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_with_class_weights(smoothing: float, reduction: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in ((6, 7), (5, 6, 3)):
        x, t, w = _logits(shape)

        def fn(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, t, w.detach(), reduction=reduction, label_smoothing=smoothing)

        for codes in random_codes((x, t, w), len(mesh_shape), seed=3, count=8):
            with implicit_communication("allow"):
                check_op(fn, (x, t, w), codes, mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_with_probabilities(smoothing: float, reduction: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in ((6, 7), (5, 6, 3), (7,)):
        x, _, w = _logits(shape)
        t = torch.softmax(_logits(shape, seed=1)[0], 0 if len(shape) == 1 else 1)
        for codes in random_codes((x, t, w), len(mesh_shape), seed=5, count=6):

            def fn(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                weight = w.detach() if codes[0] != "I" else None  # noqa: B023
                return F.cross_entropy(x, t, weight, reduction=reduction, label_smoothing=smoothing)

            with implicit_communication("allow"):
                check_op(fn, (x, t, w), codes, mesh)


def _collectives(run: Callable[[], Any]) -> list[record.Collective]:
    seen: list[record.Collective] = []
    record.listeners.append(seen.append)
    try:
        run()
    finally:
        record.listeners.remove(seen.append)
    return seen


@pytest.mark.ranks(4, pool=True)
def test_sharded_classes_send_numbers_per_token_only() -> None:
    mesh = cached_mesh(2, 2)
    x, t, _ = _logits((6, 1000))
    logits = distribute_tensor(x, mesh, [Shard(0), Shard(1)]).requires_grad_()
    target = distribute_tensor(t, mesh, [Shard(0), Replicate()])

    def step() -> None:
        with implicit_communication("error"):
            loss = F.cross_entropy(logits, target)
            assert loss.placements == (Partial(), Replicate())
            loss.backward()

    seen = _collectives(step)
    assert [c.name for c in seen] == ["all_reduce"] * 3
    assert sum(c.num_bytes for c in seen) == 3 * 3 * 8 + 8
    assert logits.grad is not None
    assert logits.grad.placements == (Shard(0), Shard(1))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", list(itertools.product(["S0", "S1", "I", "R"], ["S0", "I"])), ids=str)
def test_no_valid_token_gives_nan(codes: tuple[str, str]) -> None:
    x, t, _ = _logits((6, 7))
    with implicit_communication("allow"):
        for reduction in REDUCTIONS:
            check_op(
                lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r),
                (x, torch.full_like(t, -100)),
                codes,
                cached_mesh(4),
            )


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("code", ["S0", "S1", "I"])
def test_other_ignore_index_and_empty_batch(code: str) -> None:
    x, t, _ = _logits((6, 7))
    t = t.clamp_min(0)
    with implicit_communication("allow"):
        check_op(lambda x, t: F.cross_entropy(x, t, ignore_index=2), (x, t), [code, "I"], cached_mesh(4))
        for reduction in REDUCTIONS:
            empty = (torch.zeros(0, 7, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
            check_op(lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r), empty, [code, "I"], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("bad", [-1, 7])
def test_target_outside_the_classes_raises(bad: int) -> None:
    mesh = cached_mesh(4)
    x, t, _ = _logits((6, 7))
    t[2] = bad
    with pytest.raises((IndexError, RuntimeError)):
        F.cross_entropy(distribute_tensor(x, mesh, [Shard(1)]), distribute_tensor(t, mesh))


@pytest.mark.ranks(4, pool=True)
def test_masked_logits_and_narrow_types() -> None:
    mesh = cached_mesh(4)
    x, t, _ = _logits((6, 8))
    x[:, 5] = -math.inf
    t = t.masked_fill(t == 5, 1)
    with implicit_communication("error"):
        check_op(F.cross_entropy, (x, t), ["S1", "I"], mesh)
        check_op(F.cross_entropy, (x.bfloat16(), t), ["S1", "I"], mesh, rtol=2e-2, atol=2e-2)
        big = torch.full((4096, 4), 40.0, dtype=torch.float16)  # the sum of the losses overflows, the mean does not
        big[:, 0] = 0
        zeros = torch.zeros(4096, dtype=torch.int64)
        for code in ("S0", "S1"):
            target = distribute_tensor(zeros, mesh, [Shard(0) if code == "S0" else Replicate()])
            loss = F.cross_entropy(distribute_tensor(big, mesh, placements(code)), target)
            assert abs(loss.full_tensor().item() - 41.0986) < 0.1


@pytest.mark.ranks(4, pool=True)
def test_second_derivative_and_weight_gradient_raise() -> None:
    mesh = cached_mesh(4)
    x, t, w = _logits((6, 8))
    logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    target = distribute_tensor(t, mesh)
    with pytest.raises(UnsupportedOperationError, match="second derivatives"):
        torch.autograd.grad(F.cross_entropy(logits, target), logits, create_graph=True)
    weight = distribute_tensor(w, mesh).requires_grad_()
    with pytest.raises(UnsupportedOperationError, match="weight"):
        F.cross_entropy(logits, target, weight, label_smoothing=0.1)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction: str, mesh_shape: tuple[int, ...]) -> None:
    mesh = cached_mesh(*mesh_shape)
    for shape in ((6, 7), (5, 6, 3), (7,)):
        x, t, w = _logits(shape)
        for codes in random_codes((x, t, w), len(mesh_shape), seed=7, count=6):
            for weighted in (False, True):

                def fn(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
                    return F.nll_loss(x, t, w.detach() if weighted else None, reduction=reduction)  # noqa: B023

                with implicit_communication("allow"):
                    check_op(fn, (x, t, w), codes, mesh)


ELEMENTWISE: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "mse": (F.mse_loss, 2, {}),
    "mse-weighted": (lambda x, y, w, **k: F.mse_loss(x, y, weight=w, **k), 3, {}),
    "l1": (F.l1_loss, 2, {}),
    "smooth_l1": (F.smooth_l1_loss, 2, {"beta": 0.7}),
    "huber": (F.huber_loss, 2, {"delta": 0.6}),
    "bce": (F.binary_cross_entropy, 2, {}),
    "bce-weighted": (lambda x, y, w, **k: F.binary_cross_entropy(x, y, w.detach(), **k), 3, {}),
    "bce_logits": (F.binary_cross_entropy_with_logits, 2, {}),
    "bce_logits-pos": (
        lambda x, y, w, **k: F.binary_cross_entropy_with_logits(x, y, pos_weight=w.detach(), **k),
        3,
        {},
    ),
    "kl_div": (F.kl_div, 2, {}),
    "kl_div-log": (F.kl_div, 2, {"log_target": True}),
    "poisson": (F.poisson_nll_loss, 2, {"full": True}),
    "soft_margin": (lambda x, y, **k: F.soft_margin_loss(x, y.detach(), **k), 2, {}),
    "hinge": (F.hinge_embedding_loss, 2, {}),
    "margin_ranking": (F.margin_ranking_loss, 3, {"margin": 0.1}),
    "gaussian": (F.gaussian_nll_loss, 3, {}),
    "triplet": (F.triplet_margin_loss, 3, {}),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses(name: str, reduction: str, mesh_shape: tuple[int, ...]) -> None:
    fn, count, options = ELEMENTWISE[name]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(1)
    args = [torch.rand(5, 3, generator=generator, dtype=torch.float64) * 0.8 + 0.1 for _ in range(count)]
    for codes in random_codes(args, len(mesh_shape), seed=11, count=6):
        with implicit_communication("allow"):
            check_op(fn, args, codes, mesh, kwargs={"reduction": reduction, **options})


@pytest.mark.ranks(4, pool=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["mse", "l1", "smooth_l1", "huber", "bce", "bce_logits", "kl_div", "poisson", "triplet"]
)
def test_sharded_losses_communicate_nothing(name: str) -> None:
    fn, count, options = ELEMENTWISE[name]
    args = [torch.linspace(0.1, 0.9, 15, dtype=torch.float64).view(5, 3) ** n for n in range(1, count + 1)]
    mesh = cached_mesh(2, 2)
    ours = [distribute_tensor(a, mesh, [Shard(0), Replicate()]) for a in args]
    seen = _collectives(lambda: fn(*ours, **options))
    assert not seen


@pytest.mark.ranks(4, pool=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rowwise_losses(reduction: str) -> None:
    mesh = cached_mesh(4)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    sign = torch.tensor([1, -1, 1, 1, -1, -1])
    labels = torch.tensor([0, 2, 1, 0, 1, 2])
    many = torch.tensor([[0, 1, -1], [2, -1, -1], [1, 0, -1], [0, -1, 1], [0, 1, 2], [1, -1, 0]])
    with implicit_communication("error"):
        for code in ("S0", "I", "R"):
            check_op(F.cosine_embedding_loss, (x, y, sign), [code] * 3, mesh, kwargs={"reduction": reduction})
            check_op(F.multi_margin_loss, (x, labels), [code] * 2, mesh, kwargs={"reduction": reduction})
            check_op(F.multilabel_margin_loss, (x, many), [code] * 2, mesh, kwargs={"reduction": reduction})
    with implicit_communication("allow"):
        check_op(F.cosine_embedding_loss, (x, y, sign), ["S1", "S0", "I"], mesh, kwargs={"reduction": reduction})
        check_op(F.kl_div, (x, y), ["S1", "S0"], mesh, kwargs={"reduction": "batchmean", "log_target": True})


@pytest.mark.ranks(4, pool=True)
def test_similarity_and_distance() -> None:
    mesh = cached_mesh(4)
    x, y = (torch.randn(6, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    for codes in random_codes((x, y), 1, seed=1, count=12):
        with implicit_communication("allow"):
            for dim in (0, 1, -1):
                check_op(lambda x, y, d=dim: F.cosine_similarity(x, y, d), (x, y), codes, mesh)
            check_op(F.pairwise_distance, (x, y), codes, mesh)
            check_op(lambda x, y: F.pairwise_distance(x, y, keepdim=True), (x, y), codes, mesh)
