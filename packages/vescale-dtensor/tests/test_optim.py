"""Stock optimizers on DTensor parameters against one device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch import optim as opt

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, plain_tensors
from vescale_dtensor._dispatch import policy
from vescale_dtensor.errors import PlainTensorError
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

SHAPES = [(8, 6), (5, 3), (6,), (3, 1), (7, 5)]
CODES = ["S0 I", "I S1", "S0 S0", "R R", "S0 R"]


def _parameters() -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mesh = cached_mesh(2, 2)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    plain = [nn.Parameter(v.clone()) for v in values]
    ours = [nn.Parameter(distribute_tensor(v, mesh, placements(c))) for v, c in zip(values, CODES, strict=True)]
    return plain, ours


def _backward(parameters: list[nn.Parameter], step: int) -> None:
    loss: Any = 0
    for i, p in enumerate(parameters):
        loss = loss + (p * (1.0 + 0.3 * i) + 0.1 * step).pow(2).sum()
    loss.backward()


def _train(
    parameters: list[nn.Parameter], make: Callable[[Any], torch.optim.Optimizer], steps: int = 4
) -> torch.optim.Optimizer:
    optimizer = make(parameters)
    for step in range(steps):
        optimizer.zero_grad()
        _backward(parameters, step)
        optimizer.step()
    return optimizer


def _same(ours: Any, plain: Any, tol: float = 1e-10) -> None:
    for o, p in zip(ours, plain, strict=True):
        assert isinstance(o, DTensor)
        torch.testing.assert_close(o.detach().full_tensor(), p.detach(), rtol=tol, atol=tol)


STOCK: dict[str, Any] = {
    "sgd": (opt.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    "adam": (opt.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (opt.AdamW, {"lr": 0.01}),
    "adagrad": (opt.Adagrad, {"lr": 0.01}),
    "rmsprop": (opt.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "nadam": (opt.NAdam, {"lr": 0.01}),
    "radam": (opt.RAdam, {"lr": 0.01}),
    "adadelta": (opt.Adadelta, {}),
    "adamax": (opt.Adamax, {"lr": 0.01}),
    "asgd": (opt.ASGD, {"lr": 0.01}),
    "rprop": (opt.Rprop, {"lr": 0.01}),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("foreach", [True, False, "fused"])
@pytest.mark.parametrize("name", STOCK)
def test_elementwise_optimizers_run_in_local_mode(name: str, foreach: Any) -> None:
    cls, options = STOCK[name]
    if foreach == "fused" and name not in ("sgd", "adam", "adamw", "adagrad"):
        return
    options = {**options, **({"fused": True} if foreach == "fused" else {"foreach": foreach})}
    plain, ours = _parameters()
    _train(plain, lambda p: cls(p, **options))
    with implicit_communication("error"):
        optimizer = _train(ours, lambda p: cls(p, **options))
    _same(ours, plain)
    for p, c in zip(ours, CODES, strict=True):
        assert p.placements == tuple(placements(c))
        for value in optimizer.state[p].values():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                assert isinstance(value, DTensor)
                assert value._spec is p._spec
    assert ours[3].grad._spec.types == (-3, -3)  # a pending sum stays one after the step


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", ["adafactor", "lbfgs", "of-users"])
def test_optimizers_that_see_whole_tensors_dispatch(name: str) -> None:
    class NormalizedSGD(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / p.grad.norm() * group["lr"])

    make: Callable[[Any], Any] = {
        "adafactor": lambda p: opt.Adafactor(p, lr=0.01), "lbfgs": lambda p: opt.LBFGS(p, lr=0.1, max_iter=3),
        "of-users": NormalizedSGD,
    }[name]  # fmt: skip
    plain, ours = _parameters()
    with implicit_communication("allow"), plain_tensors("replicate"):
        if name == "lbfgs":
            plain, ours = [plain[0]], [ours[0]]
            for parameters in (plain, ours):
                optimizer = make(parameters)

                def closure(parameters: Any = parameters, optimizer: Any = optimizer) -> Any:
                    optimizer.zero_grad()
                    loss = (parameters[0] - 1).pow(2).sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        else:
            _train(plain, make)
            _train(ours, make)
    _same(ours, plain, 1e-8)


@pytest.mark.ranks(4, pool=True)
def test_state_dict_deepcopy_and_load() -> None:
    plain, ours = _parameters()
    a, b = _train(plain, lambda p: opt.AdamW(p, lr=0.01)), _train(ours, lambda p: opt.AdamW(p, lr=0.01))
    state = copy.deepcopy(b.state_dict())
    assert isinstance(state["state"][0]["exp_avg"], DTensor)
    c = opt.AdamW(ours, lr=0.01)
    c.load_state_dict(state)
    for optimizer, parameters in ((a, plain), (c, ours)):
        optimizer.zero_grad()
        _backward(parameters, 9)
        optimizer.step()
    _same(ours, plain)
    assert isinstance(c.state[ours[0]]["exp_avg"], DTensor)


@pytest.mark.ranks(4, pool=True)
def test_state_of_another_layout_or_of_one_device() -> None:
    plain, ours = _parameters()
    a, b = _train(plain, lambda p: opt.Adam(p, lr=0.01)), _train(ours, lambda p: opt.Adam(p, lr=0.01))
    whole = copy.deepcopy(a.state_dict())
    with implicit_communication("allow"):
        b.state[ours[0]]["exp_avg"] = b.state[ours[0]]["exp_avg"].redistribute(placements("I S1"))
        _backward(plain, 5)
        _backward(ours, 5)
        a.step()
        b.step()
        _same(ours, plain)
        c = opt.Adam(ours, lr=0.01)
        c.load_state_dict(copy.deepcopy(whole))
        with pytest.raises(PlainTensorError):
            c.step()
        with plain_tensors("replicate"):
            c.step()
        d = opt.Adam(plain, lr=0.01)
        d.load_state_dict(copy.deepcopy(whole))
        d.step()
        _same(ours, plain)


@pytest.mark.ranks(4, pool=True)
def test_closure_runs_with_dispatch_on_and_errors_restore_it() -> None:
    _, ours = _parameters()
    optimizer = opt.SGD(ours, lr=0.01)
    seen = []

    def closure() -> Any:
        optimizer.zero_grad()
        _backward(ours, 0)
        seen.append(ours[0].shape)
        return ours[0].detach().sum()

    with implicit_communication("allow"):
        loss = optimizer.step(closure)
        assert isinstance(loss, DTensor)
        assert seen == [(8, 6)]
        optimizer.param_groups[0]["lr"] = "wrong"
        with pytest.raises(Exception):  # noqa: B017, PT011
            optimizer.step()
        assert ours[0].shape == (8, 6)
        assert ours[3].grad._spec.types == (-3, -3)


@pytest.mark.ranks(4, pool=True)
def test_a_pending_parameter_is_refused() -> None:
    p = nn.Parameter(distribute_tensor(torch.ones(4), cached_mesh(2, 2), placements("P I")))
    (p * 1).sum().backward()
    with pytest.raises(ValueError, match="pending sum"):
        opt.SGD([p], lr=0.1).step()


@pytest.mark.ranks(4, pool=True)
def test_hooks_schedulers_scaler_and_plain_parameters() -> None:
    plain, ours = _parameters()
    extra = [nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    calls: list[Any] = []
    with implicit_communication("allow"), plain_tensors("replicate"):
        for parameters, own in ((plain, extra[0]), (ours, extra[1])):
            optimizer = opt.AdamW([{"params": parameters}, {"params": [own], "lr": 0.5}], lr=0.01)
            optimizer.register_step_post_hook(lambda o, a, k, p=parameters: calls.append(tuple(p[0].shape)))
            scheduler = opt.lr_scheduler.CosineAnnealingLR(optimizer, 10)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for step in range(3):
                optimizer.zero_grad(set_to_none=False)
                loss: Any = own.sum() * 1.0
                scaler.scale(loss).backward()
                loss = 0
                for p in parameters:
                    loss = loss + (p + step).pow(2).sum()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(parameters, 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
    assert calls == [(8, 6)] * 6
    _same(ours, plain)
    assert torch.equal(extra[0], extra[1])
    assert policy.state.plain == "error"


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(("num_threads", "expected"), [(1, torch.Tensor), (2, DTensor)])
def test_parameters_are_plain_during_a_step_only_where_no_thread_could_see(
    num_threads: int, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[type] = []
    stock = opt.SGD._init_group

    def watching(self: opt.SGD, group: dict[str, Any], *lists: Any) -> Any:
        seen.append(type(group["params"][0]))
        return stock(self, group, *lists)

    monkeypatch.setattr(opt.SGD, "_init_group", watching)
    monkeypatch.setattr(threading, "active_count", lambda: num_threads)
    p = nn.Parameter(distribute_tensor(torch.ones(8, 3), cached_mesh(2, 2), placements("S0 I")))
    p.grad = torch.full_like(p, 2.0)
    opt.SGD([p], lr=0.25).step()
    assert seen == [expected]
    assert type(p) is DTensor
    assert torch.equal(p.detach().full_tensor(), torch.full((8, 3), 0.5))
