"""Every kind of operator on shapes of any size, empty ones too, under any placements: the single device's result."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import distribute_tensor, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements

ONE: dict[str, Callable[[Tensor], Any]] = {
    "exp": torch.exp,
    "scaled": lambda x: x * 2 - 1,
    "sum": torch.sum,
    "sum of last": lambda x: x.sum(-1),
    "sum of first": lambda x: x.sum(0, keepdim=True),
    "norm": torch.linalg.vector_norm,
    "any": lambda x: (x > 0).any(0),
    "prod": torch.prod,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(0).values,
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, -1),
    "transpose": lambda x: x.transpose(0, -1) + 1,
    "flatten": lambda x: x.reshape(-1) * 2,
    "flatten first": lambda x: x.flatten(0, 1) if x.ndim > 1 else x,
    "unflatten": lambda x: x.unsqueeze(0).flatten(0, 1).view(x.shape),
    "expand": lambda x: x.unsqueeze(-1).expand(*x.shape, 3),
    "slice": lambda x: x[1:],
    "step": lambda x: x[..., ::2],
    "chunk": lambda x: x.chunk(2, 0),
    "unbind": lambda x: x.unbind(-1),
    "split": lambda x: x.split(2, -1),
    "cat": lambda x: torch.cat([x, x * 2], 0),
    "stack": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "tril": lambda x: x.tril() if x.ndim > 1 else x,
    "product": lambda x: x @ x.transpose(-1, -2) if x.ndim > 1 else x @ x,
    "repeat": lambda x: x.repeat(2, *(1,) * (x.ndim - 1)),
    "masked": lambda x: x.masked_fill(x > 0, 0.5),
    "interleaved": lambda x: x.repeat_interleave(2, 0),
    "view of rows": lambda x: x.reshape(x.shape[0], -1).sum(1) if x.numel() else x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]) if x.shape[-1] else x,
}

TWO: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": torch.add,
    "mul": torch.mul,
    "where": lambda x, y: torch.where(x > y, x, y),
    "mse": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "einsum": lambda x, y: (x * y).sum(0) @ (x * y).sum(0) if x.ndim == 2 else x - y,
}


def _code(rng: random.Random, shape: tuple[int, ...], size: int) -> str:
    kind = rng.choice("SSSGNIRP")
    if kind == "S":
        return f"S{rng.randrange(len(shape))}"
    if kind == "G":
        units = [rng.randrange(3) for _ in range(size)]
        return f"G{rng.randint(1, len(shape))}/{'.'.join(map(str, units if any(units) else [1] * size))}"
    if kind == "N":
        return f"N{rng.randrange(len(shape))}/{rng.choice([2, 3])}"
    return kind


def _codes(rng: random.Random, x: Tensor) -> str:
    """Codes of two axes that go together and fit the shape."""
    shape = tuple(x.shape)
    while True:
        codes = " ".join(_code(rng, shape, 2) for _ in range(2))
        try:
            distribute_tensor(torch.empty(shape, device="meta"), cached_mesh(2, 2), placements(codes))
        except ValueError:
            continue
        return codes


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize("seed", range(2))
def test_any_operator_on_any_layout(seed: int) -> None:
    rng, mesh = random.Random(seed), cached_mesh(2, 2)
    for name in [*ONE, *TWO]:
        for _ in range(4):
            shape = tuple(rng.choice([0, 1, 2, 3, 5, 6]) for _ in range(rng.randint(1, 3)))
            generator = torch.Generator().manual_seed(sum(shape))
            operands = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + (name in TWO))]
            function = ONE.get(name) or TWO[name]
            codes = [_codes(rng, x) for x in operands]
            try:
                function(*operands)
            except (RuntimeError, IndexError):
                continue  # not defined for this shape
            with implicit_communication("allow"):
                try:
                    check_op(function, operands, codes, mesh)
                except Exception as error:
                    raise AssertionError(f"{name} of {shape} placed {codes}: {error}") from error
