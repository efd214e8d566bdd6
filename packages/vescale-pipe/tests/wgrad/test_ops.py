"""Each operator, split, gives the bits of a whole backward: per dtype, layout and shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_pipe._wgrad import WeightGradStore

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
SHAPES = ((7,), (5, 7), (2, 5, 7), (1, 5, 7), (2, 3, 5, 7), (1, 1, 5, 7))


class Own(nn.Module):
    """A weight, a bias, and a function of both."""

    def __init__(self, shape: tuple[int, ...], call: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, dtype=dtype))
        self.b = nn.Parameter(torch.randn(shape[-1], dtype=dtype))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.w, self.b)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "contiguous", grad: bool = True) -> list[Tensor]:
    made = []
    for _ in range(3):
        x = torch.randn(shape, dtype=dtype)
        if layout == "transposed":
            x = x.transpose(0, -2).contiguous().transpose(0, -2)
        elif layout == "turned":
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif layout == "slice":
            x = torch.cat([x, x], -1)[..., : shape[-1]]
        elif layout == "part of a batch":
            x = torch.cat([x, x], 1)[:, : shape[1]]
        made.append(x.requires_grad_(grad))
    return made


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(compare: Any, shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    layouts = ["contiguous"]
    if len(shape) > 1:
        layouts += ["transposed", "turned", "slice", "part of a batch"]
    for layout in layouts:
        outcome = compare(nn.Linear(7, 9, bias=bias, dtype=dtype), inputs(shape, dtype, layout))
        assert (outcome.wrong, outcome.deferred) == ([], ["weight"]), layout


@every_dtype
def test_linear_with_a_weight_in_another_layout(compare: Any, dtype: torch.dtype) -> None:
    for rows, columns in ((9, 7), (1, 7), (9, 1), (1, 1)):
        layer = nn.Linear(columns, rows, dtype=dtype)
        layer.weight = nn.Parameter(torch.randn(columns, rows, dtype=dtype).t())
        outcome = compare(layer, inputs((5, columns), dtype))
        assert (outcome.wrong, outcome.deferred) == ([], ["weight"])


@every_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_linear_of_an_input_without_gradient(compare: Any, bias: bool, dtype: torch.dtype) -> None:
    outcome = compare(nn.Linear(7, 9, bias=bias, dtype=dtype), inputs((2, 5, 7), dtype, grad=False))
    assert (outcome.wrong, outcome.deferred) == ([], ["weight"])


def test_linear_by_name(compare: Any) -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, bias=b, weight=w)

    outcome = compare(Own((7, 7), call), inputs((5, 7), torch.float32))
    assert (outcome.wrong, outcome.deferred) == ([], ["w"])


@every_dtype
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"groups": 2, "dilation": 2}, {"padding": "same"}, {"padding": "valid"}],
    ids=str,
)
def test_conv(compare: Any, kind: Any, bias: bool, options: dict[str, Any], dtype: torch.dtype) -> None:
    dims = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kind]
    conv = kind(4, 6, 3, bias=bias, dtype=dtype, **options)
    for shape in ((2, 4, *[6] * dims), (4, *[6] * dims)):
        for grad in (True, False):
            outcome = compare(conv, inputs(shape, dtype, grad=grad))
            assert (outcome.wrong, sorted(outcome.deferred)) == ([], ["bias", "weight"] if bias else ["weight"])
            conv.zero_grad()


@every_dtype
def test_conv_channels_last(compare: Any, dtype: torch.dtype) -> None:
    conv = nn.Conv2d(4, 6, 3, dtype=dtype).to(memory_format=torch.channels_last)
    images = [x.detach().to(memory_format=torch.channels_last) for x in inputs((2, 4, 6, 6), dtype)]
    outcome = compare(conv, [x.requires_grad_() for x in images])
    assert (outcome.wrong, outcome.deferred) == ([], ["weight", "bias"])


def test_conv_with_uneven_padding_is_left_alone(compare: Any) -> None:
    def call(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.conv1d(x, w, padding="same", dilation=1)

    with pytest.warns(UserWarning, match="even kernel lengths"):
        outcome = compare(Own((4, 4, 2), call), inputs((2, 4, 6), torch.float32))
    assert (outcome.wrong, outcome.deferred) == ([], [])


@every_dtype
@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}], ids=str
)
def test_embedding(compare: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    ids = [torch.randint(0, 11, (3, 4)) for _ in range(3)]
    outcome = compare(nn.Embedding(11, 5, dtype=dtype, **options), ids)
    assert (outcome.wrong, outcome.deferred) == ([], ["weight"])


def test_embeddings_that_are_left_alone(compare: Any) -> None:
    ids = [torch.randint(0, 11, (3, 4)) for _ in range(3)]
    outcome = compare(nn.Sequential(nn.Embedding(11, 5, max_norm=1.0), nn.Linear(5, 5)), ids)
    assert (outcome.wrong, outcome.deferred) == ([], ["1.weight"])


def test_a_sparse_embedding_is_left_alone() -> None:
    table, plain = nn.Embedding(11, 5, sparse=True), nn.Embedding(11, 5, sparse=True)
    plain.load_state_dict(table.state_dict())
    ids = torch.randint(0, 11, (3, 4))
    store = WeightGradStore(table)
    with store.recording(0):
        y = table(ids)
    with store.backward(0):
        y.sum().backward()
    plain(ids).sum().backward()
    assert store.pending() == [(0, [])]
    assert table.weight.grad is not None
    assert plain.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight.grad.to_dense(), plain.weight.grad.to_dense())
    store.run(0)


TURNED: dict[str, Callable[..., Tensor]] = {
    "x @ w": lambda x, w, b: x @ w,
    "x @ w.T": lambda x, w, b: x @ w.T,
    "matmul(x, w.t())": lambda x, w, b: torch.matmul(x, w.t()),
    "x.matmul(w.transpose(0, 1))": lambda x, w, b: x.matmul(w.transpose(0, 1)),
    "x @ w.transpose(-1, -2)": lambda x, w, b: x @ torch.transpose(w, -1, -2),
    "x @ w.mT + b": lambda x, w, b: x @ w.mT + b,
}


@every_dtype
@pytest.mark.parametrize("name", TURNED)
def test_matmul(compare: Any, name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES[1:]:
        for layout in ("contiguous", "transposed", "slice", "part of a batch"):
            outcome = compare(Own((7, 7), TURNED[name], dtype), inputs(shape, dtype, layout))
            assert (outcome.wrong, outcome.deferred) == ([], ["w"]), (shape, layout)


SQUARE: dict[str, Callable[..., Tensor]] = {
    "mm": lambda x, w, b: torch.mm(x, w),
    "x.mm": lambda x, w, b: x.mm(w.t()),
    "w @ x": lambda x, w, b: w @ x,
    "mm(w.t(), x)": lambda x, w, b: torch.mm(w.t(), x),
    "addmm": lambda x, w, b: torch.addmm(b, x, w, alpha=0.3, beta=2),
    "addmm with the weight on the left": lambda x, w, b: torch.addmm(b, w.t(), x, alpha=0.3),
    "b.addmm": lambda x, w, b: b.addmm(x, w),
}


@every_dtype
@pytest.mark.parametrize("name", SQUARE)
def test_products_of_matrices(compare: Any, name: str, dtype: torch.dtype) -> None:
    for layout in ("contiguous", "turned", "slice"):
        outcome = compare(Own((7, 7), SQUARE[name], dtype), inputs((7, 7), dtype, layout))
        assert (outcome.wrong, outcome.deferred) == ([], ["w"])


BATCHED: dict[str, Callable[..., Tensor]] = {
    "bmm": lambda x, w, b: torch.bmm(x, w),
    "x @ w": lambda x, w, b: x @ w,
    "w @ x": lambda x, w, b: w @ x,
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x, w, alpha=0.3),
    "b.baddbmm": lambda x, w, b: b.baddbmm(w, x, beta=2),
}


@every_dtype
@pytest.mark.parametrize("name", BATCHED)
def test_batches_of_products(compare: Any, name: str, dtype: torch.dtype) -> None:
    for layout in ("contiguous", "turned", "transposed", "slice"):
        outcome = compare(Own((3, 5, 5), BATCHED[name], dtype), inputs((3, 5, 5), dtype, layout))
        assert (outcome.wrong, outcome.deferred) == ([], ["w"]), layout


ALONE: dict[str, Callable[..., Tensor]] = {
    "einsum": lambda x, w, b: torch.einsum("ik,kn->in", x, w),
    "a vector": lambda x, w, b: w @ x[0],
    "a view of the weight": lambda x, w, b: F.linear(x, w[:3]),
    "a computed weight": lambda x, w, b: F.linear(x, w * 2),
    "the weight by itself": lambda x, w, b: w @ w + x,
    "the weight by its transpose": lambda x, w, b: w.T @ w + x,
    "a weight added to its product": lambda x, w, b: torch.addmm(w, x, w),
    "complex": lambda x, w, b: (x.to(torch.complex64) @ w.to(torch.complex64)).real,
    "reals of the weight": lambda x, w, b: x @ w.real.abs(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_left_alone(compare: Any, name: str) -> None:
    outcome = compare(Own((7, 7), ALONE[name]), inputs((7, 7), torch.float32))
    assert (outcome.wrong, outcome.deferred) == ([], [])
