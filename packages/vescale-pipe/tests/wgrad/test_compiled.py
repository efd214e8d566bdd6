"""Compiled modules: their weights' gradients come in I, with one warning; the others wait."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from vescale_pipe._wgrad import WeightGradStore


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_modules_come_in_i(in_place: bool) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    plain = copy.deepcopy(inner)
    if in_place:
        inner.compile(backend="aot_eager")
        stage = nn.Sequential(nn.Linear(8, 8), inner)
    else:
        stage = nn.Sequential(nn.Linear(8, 8), torch.compile(inner, backend="aot_eager", fullgraph=True))
    whole = nn.Sequential(copy.deepcopy(stage[0]), plain)
    store = WeightGradStore(stage)
    deferred = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for m in range(3):
            x = torch.randn(4, 8)
            whole(x).square().sum().backward()
            before = [None if p.grad is None else p.grad.clone() for p in stage.parameters()]
            with store.recording(m):
                y = stage(x)
            with store.backward(m):
                y.square().sum().backward()
            deferred.append(
                [
                    p.grad is old or (p.grad is not None and old is not None and torch.equal(p.grad, old))
                    for p, old in zip(stage.parameters(), before, strict=True)
                ]
            )
            store.run(m)
    mine = [one for one in caught if "has made one piece" in str(one.message)]
    assert len(mine) == 1
    assert "1 module(s): '1'" in str(mine[0].message)
    assert deferred == [[True, False, False, False, False, False]] * 3
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(stage.parameters(), whole.parameters(), strict=True))
