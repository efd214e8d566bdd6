"""What can't be recorded is an error that names the value and the place."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._split import split
from vescale_pipe.errors import SplitError


class Model(nn.Module):
    """Two layers and any glue between them."""

    def __init__(self, glue: Callable[[Model, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(4.0))
        self.scale = nn.Parameter(torch.ones(4))
        self.plain = torch.arange(4.0)
        self.kept: Any = None
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.glue(self, self.a(x), x))


def branch(model: Model, h: Tensor, x: Tensor) -> Tensor:
    if h.sum() > 0:
        return h
    return -h


def sparse(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h[h > 0].reshape(-1, 4)


def replace(model: Model, h: Tensor, x: Tensor) -> Tensor:
    model.count = model.count + 1
    return h


def draw(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h if torch.rand(()) > 0.5 else -h


def draw_in_python(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h * random.random()


class Cache:
    def __init__(self) -> None:
        self.held: list[Tensor] = []


class Caching(nn.Linear):
    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            cache.held.append(x)
        self.last = x * 2
        return super().forward(x)


def cached(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return model.extra(h, cache=Cache())


def by_attribute(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return model.extra(h) + model.extra.last * 2


@pytest.mark.parametrize(
    ("glue", "message"),
    [
        (
            branch,
            r"test_recorder.py:\d+ in branch: bool\(\) reads the result of gt .*not known when the model is split",
        ),
        (lambda model, h, x: h * h.mean().item(), r"item\(\) reads the result of mean"),
        (lambda model, h, x: h * float(model.scale[0]), r"float\(\) reads the result of getitem"),
        (lambda model, h, x: h * model.scale.tolist()[0], r"tolist\(\) reads parameter 'scale'"),
        (sparse, r"test_recorder.py:\d+ in sparse.*can't be recorded without values"),
        (replace, r"buffer 'count' is replaced during the forward"),
        (draw, r"bool\(\) reads the result of gt \(test_recorder.py:\d+ in draw\)"),
        (draw_in_python, r"code between modules drew from Python's or numpy's random numbers"),
        (cached, r"in cached: a Cache carries tensors from call to call.*use_cache=False"),
        (by_attribute, r"in by_attribute: uses a tensor of shape \(3, 4\) that comes out of a module by another way"),
    ],
    ids=["branch", "item", "float", "tolist", "shape", "buffer", "random", "python", "cache", "attribute"],
)
def test_refused(glue: Any, message: str) -> None:
    model = Model(glue)
    model.extra = Caching(4, 4)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(SplitError, match=message):
        split(model, at=["b"], example_args=(torch.randn(3, 4),))
    # The model is as it was, whatever happened.
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert "__call__" not in vars(nn.Linear)
    assert vars(nn.Module)["__call__"].__name__ == "_wrapped_call_impl"


def positions(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h * torch.arange(h.shape[1], device=h.device, dtype=h.dtype) + h.new_zeros(4) + torch.zeros_like(h)


def devices(model: Model, h: Tensor, x: Tensor) -> Tensor:
    assert h.device == torch.device("cpu")
    assert h.is_cpu
    assert not h.is_meta
    assert not h.is_cuda
    return h.to("cpu").to(h.device, torch.float64).float().cpu().to(x)


def tables(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h * model.table + model.plain.to(h.dtype) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def counted(model: Model, h: Tensor, x: Tensor) -> Tensor:
    model.count += 1
    return h * model.count


def unpacked(model: Model, h: Tensor, x: Tensor) -> Tensor:
    values, where = h.max(0)
    one, *others = h.unbind(0)
    pieces = list(h)
    return torch.stack([one + values, *others]) + torch.stack(pieces) * where[None] + h.split(2, -1)[0].repeat(1, 2)


def properties(model: Model, h: Tensor, x: Tensor) -> Tensor:
    h = h.T.contiguous().mT.contiguous()
    same = h.float().contiguous()
    return h.detach() + h.data + h.real + h.view(h.shape) + torch.linalg.norm(h) + same


def cached_attribute(model: Model, h: Tensor, x: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.arange(4.0)
    return h + model.kept


def drawn(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h + torch.rand(4) + torch.randn_like(h) + torch.empty(4).normal_()


def looked_at_inputs(model: Model, h: Tensor, x: Tensor) -> Tensor:
    return h * 2 if x.abs().sum() > 1e9 else h + int(x.shape[0])


def nested(model: Model, h: Tensor, x: Tensor) -> Tensor:
    index = torch.tensor([1, 0, 2])
    return h[index, :][index[:1] : 3, ...].new_tensor([1.0]) + h[index] + torch.einsum("ij,kj->ik", h, h) @ h


@pytest.mark.parametrize(
    "glue",
    [positions, devices, tables, counted, unpacked, properties, cached_attribute, drawn, looked_at_inputs, nested],
    ids=lambda glue: glue.__name__,
)
def test_recorded(glue: Any) -> None:
    model, x = Model(glue), torch.randn(3, 4)
    graph = split(model, at=["b"], example_args=(x,))
    results = []
    for run in (graph.run, model):
        model.zero_grad()
        model.count.zero_()
        model.kept = None
        torch.manual_seed(5)
        out = run(x)
        out.sum().backward()
        results.append([out.detach(), model.count.clone(), *(p.grad.clone() for p in (model.a.weight, model.b.weight))])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
