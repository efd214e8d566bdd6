"""Values that are changed in place, also by another stage than the one that made them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._split import split
from vescale_pipe.errors import SplitError


def check(model: nn.Module, x: Tensor, **options: Any) -> Any:
    """Split a model and compare the result and all gradients with a copy that is not split."""
    whole = copy.deepcopy(model)
    graph = split(model, example_args=(x,), **options)
    torch.manual_seed(1)
    out = graph.run(x.clone())
    torch.manual_seed(1)
    expected = whole(x.clone())
    assert torch.equal(out, expected)
    assert out.dtype == expected.dtype
    out.sum().backward()
    expected.sum().backward()
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    return graph


class InPlace(nn.Module):
    """Glue that writes into values, also into one of another stage and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(x.shape[0], 16)
        table[:, 8:] = self.a(x)
        row = table[:, :8]
        row.add_(1)
        h = self.b(table[:, 8:] + row)
        h += 1
        flat = h.view(-1)
        flat.add_(1)
        g = self.c(h * 2)
        h.view(-1)[1:].mul_(2)
        g[0] = 3.0
        return g + h + table[:, :8] + row


@pytest.mark.parametrize("at", [["b"], ["c"], ["b", "c"]])
def test_in_place(at: list[str]) -> None:
    check(InPlace(), torch.randn(4, 8), at=at)


def test_in_place_through_a_view_of_another_stage() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            row = h[0]
            g = self.b(2 * h)
            row.add_(1)
            return g + h

    check(Model(), torch.randn(4, 8), num_stages=1)
    with pytest.raises(SplitError, match=r"add_ \(test_cut.*\), on stage 1, changes .*getitem.* in place.*module 'a'"):
        split(Model(), at=["b"], example_args=(torch.randn(4, 8),))


def test_in_place_on_the_batch_happens_once() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return self.b(self.a(x) + x) + x

    model, x = Model(), torch.randn(4, 8)
    graph = split(model, at=["b"], example_args=(x,))
    before = x.clone()
    out = graph.run(x)
    assert torch.equal(x, before)
    assert torch.equal(out, model(x.clone()))


class Shared(nn.Module):
    """A normalisation that is called on two stages would count in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.b(self.norm(self.a(x))))


def test_a_buffer_that_changes_on_two_stages() -> None:
    with pytest.raises(
        SplitError, match=r"buffer 'norm.num_batches_tracked' is changed by module 'norm' .* on stages 0, 1"
    ):
        split(Shared(), at=["b"], example_args=(torch.randn(4, 8),))
    check(Shared(), torch.randn(4, 8), num_stages=1)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.b(self.a(x)) * self.count


def test_a_buffer_that_glue_changes_on_two_stages() -> None:
    class Model(Counting):
        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            h = self.b(self.a(x))
            self.count[:].add_(1)
            return h * self.count

    check(Model(), torch.randn(4, 8), num_stages=1)
    with pytest.raises(SplitError, match=r"buffer 'count' is changed by add_ .* on stages 0, 1"):
        split(Model(), at=["b"], example_args=(torch.randn(4, 8),))


def test_a_buffer_that_is_sent_is_as_it_was() -> None:
    model, x = Counting(), torch.randn(4, 8)
    check(model, x, at=["b"])
    first, second = split(model, at=["b"], example_args=(x,)).stages
    model.count.zero_()
    # Two micro-batches pass the first stage before one passes the second.
    one, two = first.module(x), first.module(x)
    assert [float(value) for values in (one, two) for value in values if value.numel() == 1] == [1.0, 2.0]
    assert [port.key for port in second.inputs] == [0, 0]


class TwoResults(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * 2
        return x, x.view(-1)


class SharedResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.two, self.b = nn.Linear(8, 8), TwoResults(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, flat = self.two(self.a(x))
        g = self.b(h + 1)
        flat.add_(1)
        return g + h


def test_results_that_share_memory() -> None:
    check(SharedResults(), torch.randn(4, 8), num_stages=1)
    with pytest.raises(SplitError, match="on stage 1, changes item"):
        split(SharedResults(), at=["b"], example_args=(torch.randn(4, 8),))
