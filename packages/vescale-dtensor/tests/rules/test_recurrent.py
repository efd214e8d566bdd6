"""Recurrent layers with a sharded batch, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication, random_mode
from vescale_dtensor._modules import parallelize_module
from vescale_dtensor.errors import ImplicitCommunicationError
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)
LENGTH, WIDTH, HIDDEN = 5, 3, 4
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm-projected": (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"bidirectional": True, "bias": False}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}


def _module(kind: str, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    make, own = KINDS[kind]
    return make(WIDTH, HIDDEN, 2, dtype=torch.float64, **own, **kwargs)  # type: ignore[no-any-return]


def _sequences(rows: int, *, batch_first: bool) -> Tensor:
    x = torch.randn(rows, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x if batch_first else x.transpose(0, 1).contiguous()


def _states(module: nn.Module, rows: int) -> Any:
    """States to start from, other than zero."""
    directions = 2 if module.bidirectional else 1
    generator = torch.Generator().manual_seed(2)
    shapes = [(2 * directions, rows, getattr(module, "proj_size", 0) or HIDDEN), (2 * directions, rows, HIDDEN)]
    h, c = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return (h, c) if isinstance(module, nn.LSTM) else h


def _flat(results: Any) -> list[Tensor]:
    return torch.utils._pytree.tree_leaves(results)  # type: ignore[no-any-return]


@RANKS
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_equal_one_device(kind: str, batch_first: bool) -> None:
    """Even, uneven and empty parts of the batch; states given and not; values and gradients."""
    mesh = cached_mesh(2, 2)
    for rows in (4, 3, 1):
        for given in (False, True):
            single, ours = _module(kind, batch_first=batch_first), _module(kind, batch_first=batch_first)
            parallelize_module(ours, mesh, {})
            x = _sequences(rows, batch_first=batch_first).requires_grad_()
            axis = 0 if batch_first else 1
            placed = distribute_tensor(x.detach(), mesh, [Shard(axis), Shard(axis)]).requires_grad_()
            states = (_states(single, rows),) if given else ()
            with implicit_communication("error"):
                actual = _flat(ours(placed, *states))
            expected = _flat(single(x, *states))
            for a, e in zip(actual, expected, strict=True):
                assert isinstance(a, DTensor)
                assert a.placements == (Shard(1 if a is not actual[0] else axis),) * 2
                torch.testing.assert_close(a.full_tensor(), e, rtol=1e-10, atol=1e-10)
            sum((t * t).sum() for t in expected).backward()
            sum((t * t).sum() for t in actual).backward()
            torch.testing.assert_close(placed.grad.full_tensor(), x.grad, rtol=1e-10, atol=1e-10)
            for p, q in zip(ours.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10)


@RANKS
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_dropout_between_layers_is_that_of_one_device(kind: str) -> None:
    mesh = cached_mesh(2, 2)
    for batch_first in (False, True):
        single = _module(kind, batch_first=batch_first, dropout=0.5)
        ours = parallelize_module(_module(kind, batch_first=batch_first, dropout=0.5), mesh, {})
        x = _sequences(4, batch_first=batch_first)
        placed = distribute_tensor(x, mesh, [Shard(0 if batch_first else 1), Replicate()])
        torch.manual_seed(3)
        expected = _flat(single(x))
        torch.manual_seed(3)
        with random_mode("whole"):
            actual = _flat(ours(placed))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a.full_tensor(), e, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(_flat(ours.eval()(placed))[0].full_tensor(), _flat(single.eval()(x))[0])


@RANKS
def test_time_is_gathered_and_said_so() -> None:
    mesh = cached_mesh(4)
    single, ours = _module("lstm"), parallelize_module(_module("lstm"), mesh, {})
    x = _sequences(2, batch_first=False)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with implicit_communication("error"), pytest.raises(ImplicitCommunicationError, match="lstm moves sharded data"):
        ours(placed)
    with implicit_communication("allow"):
        torch.testing.assert_close(ours(placed)[0].full_tensor(), single(x)[0], rtol=1e-10, atol=1e-10)
