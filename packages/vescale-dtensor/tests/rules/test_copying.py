"""Copies between layouts, `.data`, deep copies and pickles."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, plain_tensors
from vescale_dtensor.errors import PlainTensorError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements


def _value(shape: tuple[int, ...] = (5, 3), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _make(value: torch.Tensor, codes: str) -> DTensor:
    return distribute_tensor(value, cached_mesh(2, 2), placements(codes))


def _same(x: Any, value: torch.Tensor) -> None:
    torch.testing.assert_close(x.full_tensor(), value, rtol=0, atol=0)


@pytest.mark.ranks(4, pool=True)
def test_copy_keeps_the_layout_of_the_target() -> None:
    value = _value()
    with implicit_communication("allow"), torch.no_grad():
        for to in all_codes(2, 2, partial=True):
            for source in ("S0 S1", "P I", "I R"):
                x = _make(torch.zeros(5, 3, dtype=torch.float64), to)
                spec = x._spec
                assert x.copy_(_make(value, source)) is x
                assert x._spec is spec
                _same(x, value)
            x.copy_(_make(value[0], "I S0"))
            _same(x, value[0].expand(5, 3))
            x.copy_(torch.tensor(2.0))
            _same(x, torch.full((5, 3), 2.0, dtype=torch.float64))


@pytest.mark.ranks(4, pool=True)
def test_copy_between_plain_and_distributed() -> None:
    value = _value()
    x = _make(torch.zeros(5, 3, dtype=torch.float64), "S0 I")
    with pytest.raises(PlainTensorError, match="distribute_tensor"):
        x.copy_(value)
    with plain_tensors("replicate"):
        x.copy_(value)
    _same(x, value)
    plain = torch.zeros(5, 3, dtype=torch.float64)
    with implicit_communication("allow"):
        assert plain.copy_(x) is plain
    assert torch.equal(plain, value)


@pytest.mark.ranks(4, pool=True)
def test_copy_is_differentiable() -> None:
    a, b = _value(seed=1).requires_grad_(), _value(seed=1)
    x = _make(b, "S0 I").requires_grad_()
    with implicit_communication("allow"):
        for leaf, target in (
            (a, torch.zeros(5, 3, dtype=torch.float64)),
            (x, _make(torch.zeros(5, 3, dtype=torch.float64), "I S1")),
        ):
            target.copy_(leaf * 2).pow(2).sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)


@pytest.mark.ranks(4, pool=True)
def test_set_data_takes_the_layout_of_the_new_storage() -> None:
    x, y = _make(_value(), "S0 I").requires_grad_(), _make(_value(seed=2), "I S1")
    x.grad = _make(_value(seed=3), "S0 I")
    x.data = y
    assert x._spec is y._spec
    assert x.to_local().data_ptr() == y.to_local().data_ptr()
    assert x.grad._spec is x._spec.dual
    _same(x.grad, _value(seed=3))
    (x * 2).sum().backward()
    _same(x.grad, _value(seed=3) + 2)
    with pytest.raises(PlainTensorError):
        x.data = torch.zeros(5, 3, dtype=torch.float64)


@pytest.mark.ranks(4, pool=True)
def test_deepcopy_and_copy() -> None:
    p = nn.Parameter(_make(_value(), "S0 I"))
    p.note = "mine"  # type: ignore[attr-defined]
    (p * 1).sum().backward()
    c = copy.deepcopy(p)
    assert isinstance(c, nn.Parameter)
    assert isinstance(c, DTensor)
    assert c.requires_grad
    assert c.note == "mine"
    assert c.to_local().data_ptr() != p.to_local().data_ptr()
    _same(c.detach(), _value())
    _same(c.grad, torch.ones(5, 3, dtype=torch.float64))
    assert copy.copy(p).to_local().data_ptr() == p.to_local().data_ptr()
    with pytest.raises(RuntimeError, match="leaf DTensors can be deep-copied"):
        copy.deepcopy(p * 2)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(weights_only: bool) -> None:
    p = nn.Parameter(_make(_value(), "S0 R"))
    buffer = io.BytesIO()
    torch.save({"p": p, "x": p.detach()}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=weights_only)
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["p"].requires_grad
    assert loaded["x"]._spec is p._spec
    _same(loaded["p"].detach(), _value())
    _same(pickle.loads(pickle.dumps(p)).detach(), _value())


@pytest.mark.ranks(4, pool=True)
def test_module_state_dict_between_layouts() -> None:
    with implicit_communication("allow"), plain_tensors("replicate"):
        plain = nn.Linear(3, 5, dtype=torch.float64)
        with torch.no_grad():
            plain.weight.copy_(_value())
        modules = []
        for codes in ("S0 I", "I S1"):
            module = nn.Linear(3, 5, bias=False, dtype=torch.float64)
            module.weight = nn.Parameter(_make(torch.zeros(5, 3, dtype=torch.float64), codes))
            modules.append(module)
        modules[0].load_state_dict({"weight": plain.state_dict()["weight"]})
        modules[1].load_state_dict(modules[0].state_dict())
        _same(modules[1].weight.detach(), _value())
        assert modules[1].to(torch.float32).weight.dtype == torch.float32
        assert isinstance(copy.deepcopy(modules[1]).weight, DTensor)
