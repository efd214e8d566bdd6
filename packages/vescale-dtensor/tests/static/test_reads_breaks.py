"""Numbers of Python that follow from values or histories of tensors: a shape, a size, a text, where a tensor lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

from vescale_dtensor import static
from vescale_dtensor.errors import StaticWarning

MASK, OTHER = tensor([True, False, False]), tensor([True, True, False])
ONE, TWO = tensor(1), tensor(2)
V = torch.arange(3.0)

SHAPES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Tensor, Tensor]] = {
    "full": (lambda n, v: torch.full((n,), 1.0), ONE, TWO),
    "full by name": (lambda n, v: torch.full(size=(n,), fill_value=1.0), ONE, TWO),
    "new_full": (lambda n, v: v.new_full((n,), 1.0), ONE, TWO),
    "normal": (lambda n, v: torch.normal(0.0, 1.0, size=(n,)), ONE, TWO),
    "multinomial": (lambda n, v: torch.multinomial(v + 1, n), ONE, TWO),
    "multinomial by name": (lambda n, v: torch.multinomial(v + 1, num_samples=n), ONE, TWO),
    "select": (lambda n, v: v.new_ones(2, 3).select(n, 0), tensor(0), ONE),
    "quantile": (lambda n, v: torch.quantile(v.new_ones(2, 3), 0.5, dim=n), tensor(0), ONE),
    "topk": (lambda n, v: torch.topk(v, k=n)[0], ONE, TWO),
    "narrow": (lambda n, v: v.narrow(0, 0, length=n), ONE, TWO),
    "arange": (lambda n, v: torch.arange(end=n), ONE, TWO),
    "view": (lambda n, v: v.new_ones(4).view(n, -1), ONE, TWO),
    "pad": (lambda n, v: F.pad(v, pad=(0, n)), ONE, TWO),
    "slice": (lambda n, v: v[n:], ONE, TWO),
    "where": (lambda x, v: torch.where(condition=x)[0], MASK, OTHER),
    "masked_select": (lambda x, v: torch.masked_select(input=v, mask=x), MASK, OTHER),
    "index": (lambda x, v: torch.ops.aten.index(v, [x]), MASK, OTHER),
    "nonzero": (lambda x, v: torch.nonzero(x, as_tuple=True)[0], MASK, OTHER),
    "combinations": (lambda x, v: torch.combinations(x), V, V[:2]),
    "tensor_split": (lambda n, v: v.tensor_split(tensor_indices_or_sections=n)[0], tensor([1]), tensor([2])),
    "repeat_interleave": (lambda n, v: v.repeat_interleave(repeats=n), tensor([1, 2, 1]), tensor([2, 2, 3])),
    "one_hot": (lambda n, v: F.one_hot(n, num_classes=-1)[0], tensor([0, 1]), tensor([0, 2])),
    "bincount": (lambda n, v: torch.bincount(n, minlength=2), tensor([1]), tensor([4])),
    "unique": (lambda n, v: torch.unique(n, sorted=False), tensor([1, 1]), tensor([1, 2])),
    "nnz": (lambda x, v: v.new_empty(x.to_sparse()._nnz()), tensor([0.0, 1]), tensor([1.0, 1])),
    "values": (lambda x, v: x.to_sparse().coalesce().values(), tensor([0.0, 1]), tensor([1.0, 1])),
    "indices": (lambda x, v: x.to_sparse().indices()[0], tensor([0.0, 1]), tensor([1.0, 1])),
    "csr": (lambda x, v: x.to_sparse_csr().col_indices(), tensor([[0.0, 1]]), tensor([[1.0, 1]])),
    "coo": (lambda x, v: torch.sparse_coo_tensor(x, torch.ones(1)), tensor([[0]]), tensor([[1]])),
    "given nnz": (lambda x, v: x._values(), tensor([0.0, 1]).to_sparse(), tensor([1.0, 1]).to_sparse()),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_that_depends_on_values_is_found(name: str) -> None:
    """Recorded with one value, called with another: Python multiplies by a size of the result."""
    function, first, second = SHAPES[name]

    def sized(x: Tensor, v: Tensor) -> Tensor:
        return v * function(x, v).size(0)

    fixed = static(sized)
    with pytest.warns(StaticWarning):
        fixed(first, V)
    for x in (first, second, first, second):
        assert torch.equal(fixed(x, V), sized(x, V))


def _negative(x: Tensor) -> Tensor:
    return torch._neg_view(x)  # type: ignore[no-any-return]


HISTORIES: dict[str, tuple[Callable[[Tensor], Any], Callable[[], Tensor]]] = {
    "text": (lambda x: len(str(x)), lambda: V * 100),
    "offset": (lambda x: x.storage_offset(), lambda: torch.arange(4.0)[1:]),
    "base": (lambda x: x._base is None, lambda: torch.arange(4.0)[1:]),
    "view": (lambda x: x._is_view(), lambda: torch.arange(4.0)[1:]),
    "memory": (lambda x: x.untyped_storage().nbytes(), lambda: torch.arange(4.0)[1:]),
    "shared": (lambda x: x.is_shared(), lambda: V.clone().share_memory_()),
    "negative": (lambda x: x.is_neg(), lambda: _negative(-V)),
    "gradient": (lambda x: x.grad is None, lambda: V.clone()),
}


@pytest.mark.parametrize("name", HISTORIES)
@pytest.mark.filterwarnings("ignore::vescale_dtensor.errors.StaticWarning")
def test_what_python_asks_of_a_tensor_is_asked_again(name: str) -> None:
    asked, other = HISTORIES[name]

    def function(x: Tensor) -> Tensor:
        return x * (1 + int(asked(x)))

    fixed = static(function)
    for _ in range(3):
        fixed(V)
    x = other()
    for _ in range(3):
        assert torch.equal(fixed(x), function(x))
        assert torch.equal(fixed(V), function(V))


def test_conjugates_are_another_signature() -> None:
    fixed = static(lambda x: x * (2 if x.is_conj() else 1))
    x = torch.ones(3, dtype=torch.cfloat)
    for _ in range(3):
        assert torch.equal(fixed(x), x)
        assert torch.equal(fixed(x.conj()), x.conj() * 2)
    assert fixed.static_code().count("def program") == 2


def test_numbers_that_decide_no_shape_leave_a_call_static() -> None:
    def function(x: Tensor, n: Tensor) -> Tensor:
        filled = torch.full((3,), n) + x.new_full((3,), n) + torch.clamp(x, max=n)
        return filled + torch.where(condition=x > 1, input=x, other=n)

    fixed = static(function)
    for number in (0.5, 1.0, 1.5, 2.0):
        assert torch.equal(fixed(V, tensor(number)), function(V, tensor(number)))
    adjacency = static(lambda a, x: torch.sparse.mm(a, x))
    for factor in (1.0, 2.0, 3.0):
        a = (torch.eye(3) * factor).to_sparse()
        assert torch.equal(adjacency(a, V.view(3, 1)), factor * V.view(3, 1))
    for one in (fixed, adjacency):
        assert one.static_code().count("def program") == 1
