"""`embedding_bag` and `ctc_loss` against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


BAGS = torch.tensor([[0, 3, 6], [4, 4, 1], [2, 0, 5], [6, 6, 6], [1, 2, 3]])
WEIGHT, SCALE = _values(7, 4), _values(5, 3)
FLAT, OFFSETS = BAGS.reshape(-1), torch.tensor([0, 2, 2, 9])


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    def fn(bags: Any, weight: Any, **kwargs: Any) -> Any:
        return F.embedding_bag(bags, weight, mode=mode, **kwargs)

    meshes = cached_mesh(4), cached_mesh(2, 2)
    with implicit_communication("error"):
        for codes in (["S0", "I"], ["I", "S1"], *([["I", "S0"]] if mode != "max" else [])):
            check_op(fn, [BAGS, WEIGHT], codes, meshes[0])
        check_op(fn, [BAGS, WEIGHT], ["S0 I", "I S1"], meshes[1])
        if mode != "max":
            check_op(fn, [BAGS, WEIGHT], ["S0 I", "I S0"], meshes[1])
        for codes in (["I", "I", "S1"], *([["I", "I", "S0"]] if mode == "sum" else [])):
            check_op(
                lambda x, o, w: F.embedding_bag(x, w, o, mode=mode),
                [FLAT, OFFSETS, WEIGHT],
                ["I", *codes[1:]],
                meshes[0],
            )
    with implicit_communication("allow"):
        for padding in (0, -1):
            for codes in (["S0", "S0"], ["I", "S0"], ["S0", "I"]):
                check_op(fn, [BAGS, WEIGHT], codes, meshes[0], kwargs={"padding_idx": padding})


@pytest.mark.ranks(4, pool=True)
def test_weights_of_samples() -> None:
    def fn(bags: Any, weight: Any, scale: Any) -> Any:
        return F.embedding_bag(bags, weight, mode="sum", per_sample_weights=scale)

    with implicit_communication("error"):
        for codes in (["S0", "I", "S0"], ["I", "S1", "I"], ["I", "S0", "I"]):
            check_op(fn, [BAGS, WEIGHT, SCALE], codes, cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_what_embedding_bag_refuses() -> None:
    mesh = cached_mesh(4)
    bags = distribute_tensor(BAGS, mesh, placements("S0"))
    for codes, kwargs in (("S0", {"max_norm": 1.0}), ("I", {"sparse": True})):
        weight = distribute_tensor(WEIGHT, mesh, placements(codes))
        with pytest.raises(UnsupportedOperationError, match="embedding_bag"):
            F.embedding_bag(bags, weight, **kwargs)  # type: ignore[arg-type]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_ctc_loss(reduction: str) -> None:
    logits = _values(6, 5, 4)
    targets = torch.tensor([[1, 2, 3], [3, 3, 1], [2, 1, 2], [1, 1, 1], [2, 3, 0]])
    lengths = torch.tensor([6, 6, 5, 6, 6]), torch.tensor([3, 2, 3, 1, 2])
    tuples = [tuple(t.tolist()) for t in lengths]

    def fn(x: Any, targets: Any, *lengths: Any) -> Any:
        return F.ctc_loss(x.log_softmax(2), targets, *(lengths or tuples), reduction=reduction, zero_infinity=True)

    with implicit_communication("error"):
        check_op(fn, [logits, targets], ["S1", "S0"], cached_mesh(4))
        check_op(fn, [logits, targets, *lengths], ["S1 I", *["S0 I"] * 3], cached_mesh(2, 2))
    with implicit_communication("allow"):
        check_op(fn, [logits, targets], ["S0 S1", "I S0"], cached_mesh(2, 2))
