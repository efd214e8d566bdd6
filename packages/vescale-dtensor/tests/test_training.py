"""Twenty steps of a GPT on real text, parallel against one device: losses, and parameters at the end.

The model is the example's, unchanged; the plan is the zoo's. Whatever is wrong anywhere in the package
(a rule, a gradient type, the optimizer's local mode, clipping) shows here as a drifting loss.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, parallelize_module, random_mode
from vescale_testing import cached_mesh

EXAMPLE = Path(__file__).parents[3] / "examples" / "nanogpt"
STEPS = 20
LOSS_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
PARAMETER_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def _example(name: str) -> ModuleType:
    found = sys.modules.get(f"nanogpt_{name}")
    if found is not None:
        return found
    spec = importlib.util.spec_from_file_location(f"nanogpt_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _train(model: nn.Module, batches: object, steps: int, place: object) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step, (tokens, targets) in zip(range(steps), batches, strict=False):  # type: ignore[call-overload]
        torch.manual_seed(1000 + step)
        _, loss = model(place(tokens), place(targets))  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _compare(
    dtype: torch.dtype,
    mesh_shape: dict[str, int],
    *,
    dropout: float = 0.0,
    steps: int = STEPS,
    batch: int = 4,
    **sizes: int,
) -> None:
    data, gpt = _example("data"), _example("model")
    config = gpt.GPTConfig(dropout=dropout, **sizes)
    torch.manual_seed(0)
    single = gpt.GPT(config).to(dtype)
    if dtype == torch.float32:
        _freeze_key_biases(single)
    mesh = cached_mesh(*mesh_shape.values(), names=tuple(mesh_shape))
    parallel = parallelize_module(copy.deepcopy(single), mesh, "nanogpt")
    text = data.standard_library_text(1 << 16)
    placements = [Shard(0) if name == "dp" else Replicate() for name in mesh_shape]

    def batches() -> object:
        return data.batches(text, batch_size=batch, length=config.block_size, seed=1)

    expected = _train(single, batches(), steps, lambda t: t)
    with random_mode("whole"):
        actual = _train(parallel, batches(), steps, lambda t: distribute_tensor(t, mesh, placements))
    worst = max(abs(a - e) for a, e in zip(actual, expected, strict=True))
    assert worst <= LOSS_TOLERANCE[dtype], f"losses differ by {worst}"
    assert expected[-1] < expected[0] - 0.1, "the model learns nothing, so equal losses prove nothing"
    for (name, e), a in zip(single.named_parameters(), parallel.parameters(), strict=True):
        assert isinstance(a, DTensor)
        difference = (a.detach().full_tensor() - e.detach()).abs().max().item()
        assert difference <= PARAMETER_TOLERANCE[dtype], f"{name} differs by {difference}"


def _freeze_key_biases(model: nn.Module) -> None:
    """Freeze the key biases: their exact gradient is zero, and AdamW would scale up its rounding noise."""
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpt_trains_as_on_one_device(dtype: torch.dtype, dropout: float) -> None:
    sizes = {"n_layer": 4, "n_embd": 128, "n_head": 4, "block_size": 128}
    _compare(dtype, {"dp": 2, "tp": 2}, dropout=dropout, **sizes)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"tp": 4}, {"dp": 1, "tp": 4}, {"dp": 4, "tp": 1}], ids=str)
def test_other_meshes(mesh: dict[str, int]) -> None:
    _compare(torch.float64, mesh, dropout=0.1, steps=8, n_layer=2, n_embd=32, n_head=4, block_size=32)


@pytest.mark.slow
@pytest.mark.ranks(4, timeout=120)
def test_uneven_batch_and_sequence() -> None:
    """Batch 5 over 2 ranks, sequence 31 over 2, vocabulary 257 over 2."""
    _compare(
        torch.float64, {"dp": 2, "tp": 2}, dropout=0.1, steps=8, batch=5,
        n_layer=2, n_embd=32, n_head=4, block_size=31, vocab_size=257,
    )  # fmt: skip
