"""Random programs over two weights: whatever the mixture and the order of their uses, the bits are autograd's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Step = tuple[str, int]
STEPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "matmul": lambda x, w, b: x @ w,
    "matmul, turned": lambda x, w, b: x @ w.T,
    "left": lambda x, w, b: w @ x,
    "addmm": lambda x, w, b: torch.addmm(b, x, w),
    "addmm of the weight": lambda x, w, b: torch.addmm(w, x, w),
    "times": lambda x, w, b: x * w,
    "plus, turned": lambda x, w, b: x + w.t(),
    "relu_": lambda x, w, b: (x + b).relu_(),
    "branches": lambda x, w, b: F.linear(x, w) + x @ w + torch.tanh(x),
    "embedding": lambda x, w, b: x + F.embedding(torch.tensor([0, 2, 1, 2, 0]), w),
    "turned input": lambda x, w, b: F.linear(x.t(), w, b),
}


class Program(nn.Module):
    """Runs steps, some of them in a checkpoint."""

    def __init__(self, steps: list[Step], begin: int, end: int, reentrant: bool) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(5, 5) for _ in range(2))
        self.b = nn.Parameter(torch.randn(5))
        self.steps = steps
        self.begin, self.end, self.reentrant = sorted((begin, end))[0], max(begin, end), reentrant

    def part(self, x: Tensor, steps: list[Step]) -> Tensor:
        for name, which in steps:
            x = torch.tanh(STEPS[name](x, self.weights[which], self.b))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x, self.steps[: self.begin])
        inner: Tensor = checkpoint(self.part, x, self.steps[self.begin : self.end], use_reentrant=self.reentrant)
        return self.part(inner, self.steps[self.end :])


@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 1)), min_size=1, max_size=7),
    st.integers(0, 7),
    st.integers(0, 7),
    st.booleans(),
    st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_random_programs(compare: Any, steps: list[Step], begin: int, end: int, reentrant: bool, delay: int) -> None:
    torch.manual_seed(len(steps))
    xs = [torch.randn(5, 5).requires_grad_() for _ in range(3)]
    outcome = compare(Program(steps, begin, end, reentrant), xs, delay=delay)
    assert outcome.wrong == []


RECORDED = sorted(set(STEPS) - {"addmm of the weight", "times", "plus, turned"})


@given(
    st.lists(st.tuples(st.sampled_from(RECORDED), st.integers(0, 1)), min_size=1, max_size=7),
    st.integers(0, 7),
    st.integers(0, 7),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_random_programs_under_autocast(compare: Any, steps: list[Step], begin: int, end: int, delay: int) -> None:
    torch.manual_seed(len(steps))
    xs = [torch.randn(5, 5).requires_grad_() for _ in range(3)]
    outcome = compare(
        Program(steps, begin, end, False),
        xs,
        context=lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        delay=delay,
    )
    assert outcome.wrong == []
