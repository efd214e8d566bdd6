"""Python code between modules that looks at the inputs: what it saw is checked for other inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vescale_pipe._split import split


class Masked(nn.Module):
    """Leaves a mask of ones away, as Hugging Face's models do, and limits lengths by a number in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("most", torch.tensor(3))

    def forward(self, x: Tensor, *, mask: Tensor, length: Tensor | None = None) -> Tensor:
        h = self.a(x)
        if not mask.bool().all():
            h = h * mask[:, None]
        if length is not None:
            h = h[:, : min(length.max().item(), int(self.most))]
            h = nn.functional.pad(h, (0, 4 - h.shape[1]))
        return self.b(h)


def test_other_values_are_recorded_anew() -> None:
    model, x = Masked(), torch.randn(3, 4)
    ones, some = torch.ones(3), torch.tensor([1.0, 0.0, 1.0])
    graph = split(model, at=["b"], example_args=(x,), example_kwargs={"mask": ones})
    assert graph.matches((torch.randn(3, 4),), {"mask": ones})
    assert not graph.matches((x,), {"mask": some})
    assert torch.equal(graph.run(x, mask=some), model(x, mask=some))
    assert torch.equal(graph.run(x, mask=ones), model(x, mask=ones))
    other = graph.for_batch((x,), {"mask": some})
    assert other is not graph
    assert other is graph.for_batch((x,), {"mask": torch.zeros(3)})
    for length in ([1, 2, 1], [2, 2, 2], [3, 1, 1]):
        kwargs = {"mask": some, "length": torch.tensor(length)}
        assert torch.equal(graph.run(x, **kwargs), model(x, **kwargs))
    kwargs = {"mask": some, "length": torch.tensor([1, 2, 0])}
    assert graph.for_batch((x,), kwargs) is graph.for_batch((x,), {"mask": some, "length": torch.tensor([0, 2, 2])})


def test_what_is_no_tensor_is_part_of_the_example() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, flag: bool = False) -> Tensor:
            return self.b(-self.a(x) if flag else self.a(x))

    model, x = Model(), torch.randn(3, 4)
    graph = split(model, at=["b"], example_args=(x, False))
    assert graph.matches((x, False))
    assert not graph.matches((x, True))
    assert not graph.matches((x,))
    assert not graph.matches((x.double(), False))
    assert torch.equal(graph.run(x, True), model(x, True))


class Packed(nn.Module):
    """The number of rows that are kept is a Python number, read of no value but of a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        h = self.a(x)
        rows = keep.nonzero().flatten()
        picked = torch.arange(x.shape[0])[keep]
        return self.b(h[rows] / rows.shape[0] + h[picked] / picked.shape[0])


def test_shapes_that_depend_on_values() -> None:
    model, x = Packed(), torch.randn(4, 4)
    graph = split(model, at=["b"], example_args=(x, torch.tensor([True, False, True, False])))
    for keep in ([True, True, True, False], [False, True, False, True], [True] * 4):
        assert torch.equal(graph.run(x, torch.tensor(keep)), model(x, torch.tensor(keep)))
    assert graph.matches((x, torch.tensor([False, True, True, False])))
    assert not graph.matches((x, torch.tensor([True, True, True, False])))
