"""What tests of split backwards share: a plain loop as the oracle, and the same loop in two parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._wgrad import WeightGradStore

Call = Callable[[Any, Tensor], Tensor]


@dataclass
class Outcome:
    """What differs, and which gradients came in W."""

    wrong: list[str]
    deferred: list[str]


class Compare:
    """Runs micro-batches whole and in two parts, on equal copies of a module."""

    def __call__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        call: Call = lambda module, x: module(x),
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        delay: int = 1,
    ) -> Outcome:
        """Return what differs.

        Args:
            module: what runs.
            inputs: one per micro-batch, whose layouts and flags are kept.
            call: calls it.
            context: around each forward.
            delay: micro-batches between I and W.
        """
        torch.manual_seed(3)
        plain = copy.deepcopy(module)
        expected = []
        for x in inputs:
            leaf = _leaf(x)
            with context():
                y = call(plain, _inner(leaf))
            dy = torch.randn(y.shape).to(y.dtype)
            y.backward(dy)
            expected.append((y.detach(), dy, leaf.grad))
        outcome = Outcome([], [])
        store = WeightGradStore(module)
        for m, x in enumerate(inputs):
            leaf = _leaf(x)
            with context(), store.recording(m):
                y = call(module, _inner(leaf))
            before = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
            with store.backward(m):
                y.backward(expected[m][1])
            if not torch.equal(y, expected[m][0]):
                outcome.wrong.append(f"output {m}")
            if not _same(leaf.grad, expected[m][2]):
                outcome.wrong.append(f"gradient of input {m}")
            if m == 0:
                unchanged = {name for name, p in module.named_parameters() if _same(p.grad, before[name])}
            if m >= delay:
                store.run(m - delay)
        for m in range(max(0, len(inputs) - delay), len(inputs)):
            store.run(m)
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            if not _same(p.grad, q.grad) or (p.grad is not None and p.grad.stride() != q.grad.stride()):
                outcome.wrong.append(name)
            if name in unchanged and p.grad is not None:
                outcome.deferred.append(name)
        assert not store.pending()
        return outcome


def _leaf(x: Tensor) -> Tensor:
    leaf = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x.detach())
    return leaf.requires_grad_(x.requires_grad)


def _inner(leaf: Tensor) -> Tensor:
    """Return what a stage gets: not a leaf, where there is a gradient."""
    return torch.ops.aten._unsafe_view(leaf, leaf.shape) if leaf.requires_grad and leaf.is_contiguous() else leaf


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)


@pytest.fixture(scope="session")
def compare() -> Compare:
    """Compare a backward in two parts with a whole one."""
    return Compare()
