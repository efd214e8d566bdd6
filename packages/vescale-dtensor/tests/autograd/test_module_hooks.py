"""Hooks of modules and tensors see global gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements


def _modules() -> tuple[nn.Module, nn.Module]:
    mesh = cached_mesh(2, 2)
    torch.manual_seed(0)
    plain = nn.Linear(6, 6, dtype=torch.float64)
    ours = copy.deepcopy(plain)
    ours.weight = nn.Parameter(distribute_tensor(plain.weight.detach(), mesh, placements("I S0")))
    ours.bias = nn.Parameter(distribute_tensor(plain.bias.detach(), mesh, placements("I S0")))
    return plain, ours


def _inputs(codes: str = "S0 I") -> tuple[Any, Any]:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.clone().requires_grad_(), distribute_tensor(x, cached_mesh(2, 2), placements(codes)).requires_grad_()


def _close(ours: Any, plain: Any) -> None:
    assert isinstance(ours, DTensor)
    assert ours.shape == plain.shape
    torch.testing.assert_close(ours.detach().full_tensor(), plain.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 I", "I I", "R R", "S0 S1"])
def test_full_backward_hooks(codes: str) -> None:
    seen: list[list[Any]] = []
    grads = []
    with implicit_communication("allow"):
        for module, x in zip(_modules(), _inputs(codes), strict=True):
            calls: list[Any] = []
            seen.append(calls)
            module.register_full_backward_pre_hook(lambda m, go, calls=calls: calls.append(go[0]) or (go[0] * 2,))
            module.register_full_backward_hook(
                lambda m, gi, go, calls=calls: calls.extend((gi[0], go[0])) or (gi[0] * 3,)
            )
            module(x).pow(2).sum().backward()
            grads.append((x.grad, module.weight.grad))
        for ours, plain in zip(seen[1] + list(grads[1]), seen[0] + list(grads[0]), strict=True):
            _close(ours, plain)


@pytest.mark.ranks(4, pool=True)
def test_tensor_hooks_and_retain_grad() -> None:
    seen: list[Any] = []

    def double(grad: Any) -> Any:
        seen.append(grad)
        return grad * 2

    with implicit_communication("allow"):
        for x in _inputs():
            h = x * 2
            h.retain_grad()
            h.register_hook(double)
            (h * h).sum().backward()
            seen += [h.grad, x.grad]
        for ours, plain in zip(seen[3:], seen[:3], strict=True):
            _close(ours, plain)


@pytest.mark.ranks(4, pool=True)
def test_post_accumulate_hook_gets_the_parameter() -> None:
    _, x = _inputs()
    seen: list[Any] = []
    x.register_post_accumulate_grad_hook(lambda p: seen.append((p is x, type(p.grad), tuple(p.grad.shape))))
    with implicit_communication("allow"):
        (x * x).sum().backward()
    assert seen == [(True, DTensor, (8, 6))]


@pytest.mark.ranks(4, pool=True)
def test_hooks_that_are_not_full_are_refused() -> None:
    plain, ours = _modules()
    for module, x in zip((plain, ours), _inputs(), strict=True):
        module.register_backward_hook(lambda module, grad_input, grad_output: None)
        if isinstance(x, DTensor):
            with pytest.raises(UnsupportedOperationError, match="register_full_backward_hook"):
                module(x)
        else:
            module(x).sum().backward()
