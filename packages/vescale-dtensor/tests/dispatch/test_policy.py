"""Implicit communication and plain tensors: what warns, what raises, what counts as implicit."""

from __future__ import annotations

import warnings

import pytest
import torch

from vescale_dtensor import (
    ImplicitCommunicationError,
    ImplicitCommunicationWarning,
    distribute_tensor,
    implicit_communication,
    plain_tensors,
    set_implicit_communication,
)
from vescale_dtensor._dispatch import policy
from vescale_dtensor.errors import PlainTensorError
from vescale_testing import cached_mesh
from vescale_testing.oracle import compare, placements


def _input() -> torch.Tensor:
    return torch.arange(48.0, dtype=torch.float64).reshape(8, 6)


@pytest.mark.ranks(4, pool=True)
def test_the_error_names_operation_layouts_and_remedy() -> None:
    d = distribute_tensor(_input(), cached_mesh(2, 2, names=("dp", "tp")), placements("S0 S1"))
    with implicit_communication("error"), pytest.raises(ImplicitCommunicationError) as caught:
        d.sort(dim=1)
    text = str(caught.value)
    assert "sort" in text
    assert "[8, 6](S(0),S(1))" in text
    assert "mesh(dp=2, tp=2)" in text
    assert "edistribute" in text


@pytest.mark.ranks(4, pool=True)
def test_a_warning_comes_once_per_place_and_on_the_first_rank(rank: int) -> None:
    d = distribute_tensor(_input(), cached_mesh(4), placements("S1"))
    policy._seen.clear()
    with warnings.catch_warnings(record=True) as seen, implicit_communication("warn"):
        warnings.simplefilter("always")
        for _ in range(3):
            compare(d.sort(dim=1).values, _input().sort(dim=1).values)
    found = [w for w in seen if issubclass(w.category, ImplicitCommunicationWarning)]
    assert len(found) == (1 if rank == 0 else 0)
    if found:
        assert found[0].filename == __file__


@pytest.mark.ranks(4, pool=True)
def test_what_is_part_of_the_meaning_is_not_implicit() -> None:
    mesh = cached_mesh(2, 2)
    x, w = (
        distribute_tensor(_input(), mesh, placements("S0 S1")),
        distribute_tensor(_input().T, mesh, placements("I S0")),
    )
    with implicit_communication("error"):
        y = (x @ w.requires_grad_()).relu()  # reduces a pending sum
        (
            y * distribute_tensor(torch.ones(8, 8, dtype=torch.float64), mesh, placements("I I"))
        ).sum().backward()  # slices
        assert y.sum().item() > 0  # reads a value
        x.redistribute(placements("I I"))  # was asked for


def test_policies_are_checked_and_restored() -> None:
    before = policy.state.communication
    with implicit_communication("allow"), implicit_communication("error"):
        assert policy.state.communication == "error"
    assert policy.state.communication == before
    with pytest.raises(ValueError, match='expected "error", "warn" or "allow"'):
        set_implicit_communication("never")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='expected "error" or "replicate"'), plain_tensors("shard"):  # type: ignore[arg-type]
        pass


@pytest.mark.ranks(4, pool=True)
def test_plain_tensors_replicated_on_request() -> None:
    x, w = _input(), torch.ones(6, 2, dtype=torch.float64)
    d = distribute_tensor(x, cached_mesh(4), placements("S0"))
    with pytest.raises(PlainTensorError, match="plain_tensors"):
        d @ w
    w.requires_grad_()
    with plain_tensors("replicate"):
        y = d @ w
        compare(y.detach(), x @ w.detach())
        y.sum().backward()
    expected = torch.ones(6, 2, dtype=torch.float64) * x.sum(0)[:, None]
    assert torch.equal(w.grad, expected)  # summed over the ranks, though the leaf is plain
