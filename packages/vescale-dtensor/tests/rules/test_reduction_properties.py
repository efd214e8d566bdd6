"""Reductions of any shape over any dims under any placement, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op

OVER_DIMS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum, "mean": torch.mean, "amax": torch.amax, "var": torch.var, "norm": lambda x, dim, keepdim:
    torch.linalg.vector_norm(x, 2, dim, keepdim), "logsumexp": torch.logsumexp, "any": lambda x, dim, keepdim:
    torch.any(x > 0.5, dim, keepdim), "all": lambda x, dim, keepdim: torch.all(x > -1.0, dim, keepdim),
}  # fmt: skip


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize("name", OVER_DIMS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_over_any_dims(name: str, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    keepdim = data.draw(st.booleans())
    if name == "var" and torch.Size([shape[d] for d in dims]).numel() < 2:
        return  # not defined
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)
    codes = " ".join(data.draw(st.sampled_from([*(f"S{d}" for d in range(x.ndim)), "I", "R", "P"])) for _ in range(2))
    check_op(lambda t: OVER_DIMS[name](t, dim=dims, keepdim=keepdim), [x], [codes], cached_mesh(2, 2))
