"""Stage modules as modules: copied, saved, shown in tracebacks, without values that nobody needs any more."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from vescale_pipe._split import split


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.dropout(self.b(self.a(x).T.T[..., :4]), 0.5, self.training)
        return self.c(h * self.scale.to(torch.float32) + float("inf") * 0.0 * h.detach().isnan())


def stages(model: nn.Module, x: Tensor) -> list[nn.Module]:
    return [stage.module for stage in split(model, at=["b", "c"], example_args=(x,)).stages]


def test_copies_and_pickles() -> None:
    model, x = Model(), torch.randn(2, 4)
    for twin in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        for mode in (True, False):
            model.train(mode)
            made = stages(model, x)
            values: Any = (x,)
            others: Any = (x,)
            for module in made:
                torch.manual_seed(0)
                values = module(*values)
                torch.manual_seed(0)
                others = twin(module)(*others)
            assert torch.equal(torch.nan_to_num(values[0]), torch.nan_to_num(others[0]))


def test_code_shows_in_tracebacks() -> None:
    made = stages(Model(), torch.randn(2, 4))
    try:
        made[0](torch.randn(2, 3))
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
    assert "self._modules['a'](a0)" in text


def test_values_are_dropped_after_their_last_use() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    alive: list[Any] = []
    most = 0

    def note(module: nn.Module, args: Any, out: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(out))
        most = max(most, sum(one() is not None for one in alive))

    graph = split(model, at=["3"], example_args=(torch.randn(2, 4),))
    for layer in model:
        layer.register_forward_hook(note)
    gc.collect()
    with torch.no_grad():
        graph.stages[0].module(torch.randn(2, 4))
    assert most == 2  # the input of a layer and its output


class Glue(nn.Module):
    """Its middle stage is nothing but glue that looks at the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.mark, self.b = nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.mark(self.a(x))
        return self.b(nn.functional.dropout(h + 1, 0.5, self.training))


def test_a_stage_follows_whoever_set_the_mode_last() -> None:
    model, x = Glue(), torch.randn(2, 4)
    graph = split(model, at=["mark", "b"], example_args=(x,))
    model.a.eval()  # no unit that could tell
    model.mark.train(False)
    for stage in graph.stages:
        stage.module._witness = ()
    model.eval()
    assert torch.equal(graph.run(x), model(x))
    graph.stages[1].module.train()
    torch.manual_seed(0)
    out = graph.run(x)
    model.train()
    torch.manual_seed(0)
    assert torch.equal(out, model(x))
    graph.stages[1].module.eval()
    assert not torch.equal(graph.run(x), out)
