"""Training with dropout on a mesh, and what moves the state of a generator on the way, against one device."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("vescale_dtensor")

from vescale_dtensor import Replicate, Shard, distribute_tensor, parallelize_module
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_testing import cached_mesh, run_ranks
from vescale_testing.oracle import placements

EXAMPLE = Path(__file__).parents[4] / "examples" / "nanogpt"
STEPS = 10


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nanogpt_for_rng_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _reset(model: Any) -> None:
    """Draw the parameters as the constructor did."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    model.initialize()


def _train(model: nn.Module, batches: Any, place: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _, (tokens, targets) in zip(range(STEPS), batches, strict=False):
        _, loss = model(place(tokens), place(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are in the repository only")
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("sizes", [{"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}], ids=str)
def test_gpt_is_initialized_and_trained_as_on_one_device(sizes: dict[str, int]) -> None:
    data, gpt = _example("data"), _example("model")
    config = gpt.GPTConfig(dropout=0.1, n_layer=2, n_embd=32, n_head=4, block_size=32)
    text = data.standard_library_text(1 << 14)
    mesh = cached_mesh(*sizes.values(), names=tuple(sizes))
    cut = [Shard(0) if name == "dp" else Replicate() for name in sizes]

    torch.manual_seed(0)
    single = gpt.GPT(config)
    expected = _train(single, data.batches(text, batch_size=4, length=32, seed=1), lambda t: t)
    state = torch.get_rng_state()

    torch.manual_seed(0)
    with torch.device("meta"):
        parallel = gpt.GPT(config)
    parallel = parallelize_module(parallel, mesh, "nanogpt")
    parallel.to_empty(device="cpu")
    _reset(parallel)
    batches = data.batches(text, batch_size=4, length=32, seed=1)
    actual = _train(parallel, batches, lambda t: distribute_tensor(t, mesh, cut))

    assert torch.equal(torch.get_rng_state(), state)
    assert actual[0] == pytest.approx(expected[0], abs=1e-6)
    assert max(abs(a - e) for a, e in zip(actual, expected, strict=True)) <= 1e-5


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("code", ["S0 I", "S0 S1", "I S2", "I I"])
def test_checkpointed_layers_draw_as_on_one_device(code: str, reentrant: bool) -> None:
    mesh = cached_mesh(2, 2)
    value = torch.linspace(-1, 1, 5 * 4 * 6).view(5, 4, 6)

    def layer(x: Tensor) -> Tensor:
        return F.dropout(F.gelu(x) + torch.randn_like(x), 0.3).pow(2)

    results = []
    for place in (lambda t: t.clone(), lambda t: distribute_tensor(t, mesh, placements(code))):
        x = place(value).requires_grad_()
        torch.manual_seed(5)
        y: Any = checkpoint(layer, checkpoint(layer, x, use_reentrant=reentrant), use_reentrant=reentrant)
        torch.rand(3)
        y.sum().backward()
        results.append((y.detach(), x.grad, torch.get_rng_state()))
    (y1, grad1, state1), (y2, grad2, state2) = results
    assert torch.equal(state1, state2)
    assert torch.equal(y2.full_tensor(), y1)
    assert torch.equal(grad2.full_tensor(), grad1)


@pytest.mark.ranks(4, pool=True)
def test_forked_and_restored_states() -> None:
    mesh = cached_mesh(4)
    results = []
    for place in (lambda t: t, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
        x = place(torch.ones(9, 5))
        torch.manual_seed(3)
        values = [F.dropout(x, 0.5)]
        with torch.random.fork_rng():
            torch.manual_seed(8)
            values.append(torch.randn_like(x))
        values.append(F.dropout(x, 0.5))
        state = torch.get_rng_state()
        values.append(torch.rand_like(x))
        torch.set_rng_state(state)
        values.append(torch.rand_like(x))
        results.append((values, torch.get_rng_state()))
    (expected, state), (actual, own_state) = results
    assert torch.equal(state, own_state)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.full_tensor(), e)
    assert torch.equal(actual[3].to_local(), actual[4].to_local())


def _some_steps(world: int, state: Tensor | None, steps: int) -> tuple[list[Tensor], Tensor]:
    """Draw on `world` ranks, from a saved state; what came out, whole, and the state at the end."""
    torch.manual_seed(11)
    if state is not None:
        torch.set_rng_state(state)
    x = distribute_tensor(torch.ones(7, 6), cached_mesh(world), [Shard(0)])
    values = []
    for _ in range(steps):
        values += [F.dropout(x, 0.4).full_tensor(), x.clone().normal_().full_tensor(), torch.rand(2)]
        with implicit_communication("allow"):
            values.append(torch.poisson(x).full_tensor())
    return values, torch.get_rng_state()


def test_a_job_goes_on_with_another_number_of_ranks() -> None:
    torch.manual_seed(11)
    x, expected = torch.ones(7, 6), []
    for _ in range(6):
        expected += [F.dropout(x, 0.4), x.clone().normal_(), torch.rand(2), torch.poisson(x)]
    end = torch.get_rng_state()

    state, values = None, []
    for world in (4, 2, 1):
        parts = run_ranks(_some_steps, world, kwargs={"world": world, "state": state, "steps": 2}, pool=True)
        assert all(torch.equal(s, parts[0][1]) for _, s in parts)
        values += parts[0][0]
        state = parts[0][1]
    assert all(torch.equal(a, e) for a, e in zip(values, expected, strict=True))
    assert state is not None
    assert torch.equal(state, end)


@pytest.mark.ranks(2, pool=True)
def test_a_copied_model_draws_on_its_own_state() -> None:
    mesh = cached_mesh(2)
    layer = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
    torch.manual_seed(1)
    layer[0].reset_parameters()
    expected = layer(torch.ones(3, 4)).detach()
    torch.manual_seed(1)
    ours = copy.deepcopy(layer)
    for name, parameter in ours[0].named_parameters():
        setattr(ours[0], name, nn.Parameter(distribute_tensor(parameter.detach() * 0, mesh, [Shard(0)])))
    ours[0].reset_parameters()
    actual = ours(distribute_tensor(torch.ones(3, 4), mesh))
    torch.testing.assert_close(actual.detach().full_tensor(), expected, rtol=1e-6, atol=1e-6)
