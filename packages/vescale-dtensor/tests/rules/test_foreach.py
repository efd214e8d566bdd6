"""Functions on lists of tensors against the same functions on one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication
from vescale_dtensor._comm.record import listeners
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

LAYOUTS = ["S0 I", "I S1", "R R", "P I", "S0 S1", "S0 S0", "P P"]
SHAPES = [(8, 6), (5, 3), (4, 4), (6, 2), (7, 5), (2, 3), (3, 3)]


def _values(seed: int, *, positive: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    return [v.abs() + 0.5 for v in values] if positive else values


def _lists(seed: int, shift: int = 0, *, positive: bool = False) -> tuple[list[torch.Tensor], list[DTensor]]:
    """The same list plain and distributed, each element under a layout of its own, and last a plain element."""
    mesh = cached_mesh(2, 2)
    values = _values(seed, positive=positive)
    codes = [LAYOUTS[(i + shift) % len(LAYOUTS)] for i in range(len(values))]
    ours: list[Any] = [distribute_tensor(v, mesh, placements(c)) for v, c in zip(values, codes, strict=True)]
    values.append(torch.full((2,), 1.5, dtype=torch.float64))
    ours.append(torch.full((2,), 1.5, dtype=torch.float64))
    return values, ours


def _close(ours: Any, plain: Any, tol: float = 1e-10) -> None:
    assert len(ours) == len(plain)
    for o, p in zip(ours, plain, strict=True):
        o = o.full_tensor() if isinstance(o, DTensor) else o
        torch.testing.assert_close(o, p, rtol=tol, atol=tol)


def _scalar(value: float) -> DTensor:
    return distribute_tensor(torch.tensor(value, dtype=torch.float64), cached_mesh(2, 2), placements("P I"))


UNARY = ["abs", "exp", "sqrt", "neg", "reciprocal", "sign", "tanh", "round", "clone", "log1p"]


@pytest.mark.ranks(4, pool=True)
def test_unary() -> None:
    with implicit_communication("allow"):
        for name in UNARY:
            plain, ours = _lists(0, positive=True)
            function = getattr(torch, f"_foreach_{name}")
            _close(function(ours), function(plain))
            inplace = getattr(torch, f"_foreach_{name}_", None)
            if inplace is not None:
                specs = [o._spec if isinstance(o, DTensor) else None for o in ours]
                inplace(plain)
                inplace(ours)
                _close(ours, plain)
                assert [o._spec if isinstance(o, DTensor) else None for o in ours] == specs


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "maximum", "minimum", "pow", "clamp_max", "clamp_min"])
def test_binary_with_lists_and_scalars(name: str) -> None:
    function, inplace = getattr(torch, f"_foreach_{name}"), getattr(torch, f"_foreach_{name}_")
    with implicit_communication("allow"):
        for shift in (0, 3):
            for other in ("list", "scalar", "scalars", "tensor"):
                if other == "tensor" and name not in ("add", "mul", "div"):
                    continue
                a, da = _lists(1, positive=True)
                b, db = _lists(2, shift, positive=True)
                second: tuple[Any, Any] = {
                    "list": (b, db), "scalar": (0.7, 0.7), "scalars": ([0.1 + i for i in range(len(a))],) * 2,
                    "tensor": (torch.tensor(0.3, dtype=torch.float64), _scalar(0.3)),
                }[other]  # fmt: skip
                _close(function(da, second[1]), function(a, second[0]))
                inplace(a, second[0])
                inplace(da, second[1])
                _close(da, a)


@pytest.mark.ranks(4, pool=True)
def test_ternary_copy_zero_and_alpha() -> None:
    with implicit_communication("allow"):
        lists = [_lists(s, s, positive=True) for s in (1, 2, 3)]
        plain, ours = [x[0] for x in lists], [x[1] for x in lists]
        for name in ("addcmul", "addcdiv"):
            function = getattr(torch, f"_foreach_{name}")
            _close(function(*ours, value=0.5), function(*plain, value=0.5))
            _close(function(*ours, [0.5] * len(ours[0])), function(*plain, [0.5] * len(plain[0])))
        for weight in (0.3, None):
            _close(
                torch._foreach_lerp(ours[0], ours[1], weight or ours[2]),
                torch._foreach_lerp(plain[0], plain[1], weight or plain[2]),
            )
        _close(torch._foreach_add(ours[0], ours[1], alpha=2), torch._foreach_add(plain[0], plain[1], alpha=2))
        torch._foreach_lerp_(ours[0], ours[1], 0.1)
        torch._foreach_lerp_(plain[0], plain[1], 0.1)
        _close(ours[0], plain[0])
        torch._foreach_copy_(ours[0], ours[2])
        _close(ours[0], plain[2])
        torch._foreach_zero_(ours[0])
        _close(ours[0], [torch.zeros_like(p) for p in plain[0]])
        _close(torch._foreach_pow(2.0, ours[1]), torch._foreach_pow(2.0, plain[1]))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("order", [2, 1, 0, 3.0, math.inf, -math.inf, 0.5])
def test_norms_are_global_and_batched(order: float) -> None:
    plain, ours = _lists(4)
    seen: list[Any] = []
    listeners.append(seen.append)
    try:
        norms = torch._foreach_norm(ours, order)
    finally:
        listeners.clear()
    _close(norms, torch._foreach_norm(plain, order))
    assert len(seen) <= 5  # two kinds of pending sums, three sets of sharded axes; eight tensors


@pytest.mark.ranks(4, pool=True)
def test_norms_of_low_precision_and_other_dtypes() -> None:
    mesh = cached_mesh(2, 2)
    big = torch.full((8, 8), 200.0, dtype=torch.float16)
    x = distribute_tensor(big, mesh, placements("S0 S1"))
    (norm,) = torch._foreach_norm([x])
    assert norm.dtype == torch.float16
    assert norm.item() == torch._foreach_norm([big])[0].item() == 1600
    (wide,) = torch._foreach_norm([x], 2, torch.float32)
    assert wide.dtype == torch.float32


@pytest.mark.ranks(4, pool=True)
def test_max_and_nan() -> None:
    plain, ours = _lists(5)
    _close(torch._foreach_max(ours), torch._foreach_max(plain))
    value = torch.arange(6.0)
    value[1] = math.nan
    (m,) = torch._foreach_max([distribute_tensor(value, cached_mesh(2, 2), placements("S0 S0"))])
    assert math.isnan(m.item())


@pytest.mark.ranks(4, pool=True)
def test_gradients_pass_one_by_one() -> None:
    with implicit_communication("allow"):
        results = []
        for xs in _lists(6):
            xs = [x.detach().requires_grad_() for x in xs]
            loss = sum(t.pow(2).sum() for t in torch._foreach_mul(xs[:-1], 2.0))
            loss.backward()  # type: ignore[union-attr]
            results.append([x.grad for x in xs[:-1]])
        _close(results[1], results[0])


@pytest.mark.ranks(4, pool=True)
def test_gradient_scaler_sees_infinity_of_other_ranks() -> None:
    mesh = cached_mesh(2, 2)
    grads = [torch.ones(8), torch.ones(6, 2)]
    grads[0][7] = math.inf
    ours = [distribute_tensor(g, mesh, placements(c)) for g, c in zip(grads, ("S0 S0", "P I"), strict=True)]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(ours, found, torch.tensor(0.5))
    assert found.item() == 1.0
    assert ours[1].full_tensor().tolist() == [[0.5, 0.5]] * 6
    assert ours[1]._spec.types[0] == -3
