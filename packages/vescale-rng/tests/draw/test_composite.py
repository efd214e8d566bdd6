"""Composite operators, which inference mode shows whole, run what they run without a mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_rng._draw.composite import is_composite, run_composite


class Through(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_composite(func):
            with self:
                return run_composite(func, args, kwargs or {})
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dropout_in_inference_mode_is_dropout(p, dtype):
    x = torch.rand(40, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.manual_seed(1)
    expected, state = F.dropout(x, p), torch.get_rng_state()
    torch.manual_seed(1)
    with torch.inference_mode(), Through() as mode:
        got = F.dropout(x, p)
    assert torch.equal(got, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert "native_dropout.default" not in mode.seen
    assert ("bernoulli_.float" in mode.seen) == (p == 0.3)


def test_what_is_made_of_others():
    aten = torch.ops.aten
    assert is_composite(aten.dropout.default)
    assert not is_composite(aten.native_dropout.default)
    assert not is_composite(aten.uniform_.default)
