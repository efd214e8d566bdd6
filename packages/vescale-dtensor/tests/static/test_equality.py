"""Models as they are in the wild, static: the bits of the dynamic path, and the losses of one device."""

from __future__ import annotations

import copy

import pytest
import torch

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, parallelize_module, static
from vescale_testing import cached_mesh
from vescale_testing.models import examples

STEPS = 4
MODELS = ("ResNet", "LSTM", "MultiheadAttention")


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize("name", MODELS)
def test_a_static_model_has_the_bits_of_the_dynamic_path(name: str) -> None:
    """`benchmarks/static_equality.py` does so for all models, longer, and in float64."""
    example = examples()[name]
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    single = example.built()
    one, two = (parallelize_module(copy.deepcopy(single), mesh, example.plan) for _ in range(2))
    static(two)
    inputs, target = example.batch()
    where = [Shard(example.batch_dim) if axis == "dp" or example.spread else Replicate() for axis in ("dp", "tp")]
    placed = distribute_tensor(target, mesh, where)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (single, one, two)]
    for _ in range(STEPS):
        losses = []
        for model, optimizer, wanted in zip((single, one, two), optimizers, (target, placed, placed), strict=True):
            optimizer.zero_grad()
            losses.append(example.loss(model(**inputs), wanted))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(losses[1].to_local(), losses[2].to_local())
        torch.testing.assert_close(losses[2].full_tensor(), losses[0], rtol=1e-4, atol=1e-4)
        for (key, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local()), key
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), key
        for a, b in zip(one.buffers(), two.buffers(), strict=True):
            assert torch.equal(*[t.to_local() if isinstance(t, DTensor) else t for t in (a, b)])
    assert two.static_code().count("def program") == 1
