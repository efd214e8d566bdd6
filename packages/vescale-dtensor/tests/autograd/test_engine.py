"""Checkpointing, saved-tensor hooks, autocast, modes, and gradients of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, plain_tensors
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements


def _data(codes: tuple[str, str] = ("S0 I", "I S0"), dtype: torch.dtype = torch.float64) -> list[tuple[Any, Any]]:
    """(x, w) on one device and (x, w) distributed."""
    mesh = cached_mesh(2, 2)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=dtype) for s in ((8, 6), (6, 6))]
    plain = tuple(v.clone().requires_grad_() for v in values)
    ours = tuple(distribute_tensor(v, mesh, placements(c)).requires_grad_() for v, c in zip(values, codes, strict=True))
    return [plain, ours]  # type: ignore[list-item]


def _same_gradients(
    run: Callable[[Any, Any], None], codes: tuple[str, str] = ("S0 I", "I S0"), tol: float = 1e-10, **kw: Any
) -> None:
    data = _data(codes, **kw)
    with implicit_communication("allow"):
        for x, w in data:
            run(x, w)
        for ours, plain in zip(data[1], data[0], strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), plain.grad, rtol=tol, atol=tol)


def block(x: Any, w: Any) -> Any:
    return F.gelu(F.linear(x, w)).pow(2).sum()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("codes", [("S0 I", "I S0"), ("R R", "R S1"), ("I I", "I I"), ("S0 R", "R S0")])
def test_checkpoint(reentrant: bool, codes: tuple[str, str]) -> None:
    _same_gradients(lambda x, w: checkpoint(block, x, w, use_reentrant=reentrant).backward(), codes)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_of_non_tensor_arguments_and_nested(reentrant: bool) -> None:
    def inner(x: Any, factor: float, flags: dict[str, Any]) -> Any:
        return x.tanh() * factor if flags["scale"] else x

    def outer(x: Any, w: Any, factor: float) -> Any:
        h = checkpoint(inner, F.linear(x, w), factor, {"scale": True}, use_reentrant=reentrant)
        return (h * h).sum()

    _same_gradients(lambda x, w: checkpoint(outer, x, w, 3.0, use_reentrant=reentrant).backward())


@pytest.mark.ranks(4, pool=True)
def test_checkpoint_under_autograd_grad() -> None:
    def run(x: Any, w: Any) -> None:
        x.grad, w.grad = torch.autograd.grad(checkpoint(block, x, w, use_reentrant=False), (x, w))

    _same_gradients(run)


@pytest.mark.ranks(4, pool=True)
def test_save_on_cpu() -> None:
    def run(x: Any, w: Any) -> None:
        with torch.autograd.graph.save_on_cpu():
            y = block(x.exp(), w)
        y.backward()

    _same_gradients(run, tol=1e-9)


@pytest.mark.ranks(4, pool=True)
def test_accumulation_several_roots_and_zero_grad() -> None:
    def run(x: Any, w: Any) -> None:
        for _ in range(2):
            torch.autograd.backward([block(x, w), (x * 2).sum()])
        w.grad.mul_(0.5)

    _same_gradients(run)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", [("S0 I", "I S0"), ("R R", "R R")])
def test_gradient_of_a_gradient(codes: tuple[str, str]) -> None:
    def run(x: Any, w: Any) -> None:
        (g,) = torch.autograd.grad(block(x, w), x, create_graph=True)
        (g * g).sum().backward()

    _same_gradients(run, codes, tol=1e-9)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("tag", ["anomaly", "bfloat16"])
def test_modes(tag: str) -> None:
    def run(x: Any, w: Any) -> None:
        if tag == "anomaly":
            with torch.autograd.detect_anomaly(check_nan=True):
                block(x, w).backward()
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = F.linear(x, w)
                assert y.dtype == torch.bfloat16
            y.float().tanh().sum().backward()

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode warns of its cost
        if tag == "anomaly":
            _same_gradients(run)
        else:
            _same_gradients(run, dtype=torch.float32, tol=0.1)


@pytest.mark.ranks(4, pool=True)
def test_inference_mode_and_no_grad() -> None:
    (x, w), (dx, dw) = _data()
    with implicit_communication("allow"):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                torch.testing.assert_close(block(dx, dw).full_tensor(), block(x, w), rtol=1e-10, atol=1e-10)
        block(dx, dw).backward()
        block(x, w).backward()
        torch.testing.assert_close(dw.grad.full_tensor(), w.grad, rtol=1e-10, atol=1e-10)


class _Sizes(TorchDispatchMode):
    """Keeps the sizes that it sees, and computes with what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.update(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", [("S0 I", "I S0"), ("P I", "I I"), ("R S1", "I S1")])
@pytest.mark.parametrize("plain_loss", [False, True])
def test_dispatch_modes_see_local_tensors_in_backward(codes: tuple[str, str], plain_loss: bool) -> None:
    """A saved leaf comes back as the DTensor that it is, on which a mode would compute as on the whole."""
    modes = []

    def run(x: Any, w: Any) -> None:
        y = (x @ w).softmax(0)
        if plain_loss and isinstance(y, DTensor):
            y = y.full_tensor()
        with plain_tensors("replicate"), _Sizes() as mode:
            y.pow(2).sum().backward()
        modes.append(mode)

    _same_gradients(run, codes)
    if codes[0] == "S0 I" and not plain_loss:
        assert (8, 6) not in modes[1].seen


@pytest.mark.ranks(4, pool=True)
def test_flops_of_backward_are_those_of_this_rank() -> None:
    x, w = _data(("S0 I", "I I"))[1]
    with FlopCounterMode(display=False) as counter:
        (x @ w).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 8 * 6 * 6 // 2


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("code", ["S0 I", "P I", "R I", "S1 S0"])
def test_a_dtensor_as_gradient_of_a_plain_tensor_is_the_whole(code: str) -> None:
    value = torch.arange(48.0).view(8, 6)
    grad = distribute_tensor(value, cached_mesh(2, 2), placements(code))
    for call in (
        lambda x: (x * 2).backward(grad),
        lambda x: torch.autograd.backward([x * 2], [grad]),
        lambda x: setattr(x, "grad", torch.autograd.grad(x * 2, x, grad)[0]),
        lambda x: setattr(x, "grad", torch.func.vjp(lambda a: a * 2, x.detach())[1](grad)[0].detach()),
    ):
        x = torch.zeros(8, 6, requires_grad=True)
        call(x)
        assert torch.equal(x.grad, 2 * value)  # type: ignore[arg-type]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 I", "P I", "R I", "S1 S0"])
def test_gradient_edges_know_what_they_belong_to(codes: str) -> None:
    found = []
    for x, _ in _data((codes, "I I")):
        y = x * 2
        edge = torch.autograd.graph.get_gradient_edge(y)
        inner = torch.autograd.grad(y.pow(2).sum(), [edge, x], retain_graph=True)
        outer = torch.autograd.grad([edge], [x], [torch.ones_like(y)])
        found.append([g.full_tensor() if isinstance(g, DTensor) else g for g in (*inner, *outer)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
