"""Models of transformers and torch, not a line of which is changed, by plans of the zoo, against one device.

Ten AdamW steps on dp x tp with sequence parallelism: losses, and parameters at the end. Whatever a plan does
not say is an error, so these also show that nothing is gathered behind its back.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication, parallelize_module
from vescale_testing import cached_mesh
from vescale_testing.models import Double, Example, examples

EXAMPLES = examples()
STEPS = 10


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _double(v) for k, v in value.items()}
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _losses(example: Example, model: nn.Module, inputs: dict[str, Any], target: Tensor, *, own: bool) -> list[Tensor]:
    """Losses of ten steps, by the formula in the precision of the result, or the model's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(**inputs, labels=target).loss if own else example.loss(model(**inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def _compare(name: str, mesh_shape: tuple[int, int], dtype: torch.dtype, tolerance: float) -> None:
    example = EXAMPLES[name]
    if example.needs:
        pytest.importorskip(example.needs)
    mesh = cached_mesh(*mesh_shape, names=("dp", "tp"))
    single = example.built().to(dtype)
    parallel = parallelize_module(copy.deepcopy(single), mesh, example.plan)
    inputs, target = example.batch()
    if dtype == torch.float64:
        inputs, target = _double(inputs), _double(target)
    own = example.labels and dtype == torch.float32
    placed = target
    if not own:
        cut = [axis == "dp" or example.spread for axis in ("dp", "tp")]
        placed = distribute_tensor(target, mesh, [Shard(example.batch_dim) if c else Replicate() for c in cut])
    with Double() if dtype == torch.float64 else contextlib.nullcontext():
        expected = _losses(example, single, inputs, target, own=own)
        with implicit_communication("error"):
            actual = _losses(example, parallel, inputs, placed, own=own)
    for step, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert isinstance(mine, DTensor)
        difference = (mine.full_tensor() - theirs).abs().item()
        assert difference <= tolerance, f"{name}: the loss of step {step} differs by {difference}"
    assert expected[-1] < expected[0], "the model learns nothing, so equal losses prove little"
    if dtype == torch.float64:
        for (key, p), q in zip(parallel.named_parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=0, atol=1e-7, msg=f"{name}: {key}")


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_training_equals_one_device(name: str) -> None:
    _compare(name, (2, 2), torch.float64, 1e-9)
    _compare(name, (2, 2), torch.float32, 1e-4)


@pytest.mark.ranks(4, pool=True, timeout=120)
def test_more_ranks_than_key_and_value_heads() -> None:
    _compare("Llama", (1, 4), torch.float64, 1e-9)
