"""Rehearsals: what is given up early, and arguments of all kinds without their data."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor._auto import Machine
from vescale_dtensor._auto.mesh import RehearsalMesh
from vescale_dtensor._auto.meter import Most, TooMuch
from vescale_dtensor._auto.rehearse import Example, Key, Rehearsal
from vescale_dtensor._auto.skeleton import skeleton
from vescale_dtensor._dispatch.engine import clear_caches
from vescale_testing import fake_ranks

CHOICES = {Key("parameter", "0.weight"): (0,), Key("parameter", "0.bias"): (0,), Key("parameter", "2.weight"): (1,)}


def test_what_communicates_too_long_is_given_up_and_remembered() -> None:
    example = Example((torch.ones(4, 8),), {})
    with fake_ranks(4, rank=0):
        mesh = RehearsalMesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        fresh = Rehearsal(skeleton(model), mesh, example, Machine()).cost(CHOICES)
        rehearsal = Rehearsal(skeleton(model), mesh, example, Machine())
        for most in (0.0, fresh.communication / 2, 0.0):
            with pytest.raises(TooMuch):
                rehearsal.cost(CHOICES, most=Most(most))
        assert rehearsal.cost({}, most=Most(0.0)).communication == 0.0
        assert rehearsal.cost(CHOICES, most=Most(fresh.communication)) == fresh
    assert fresh.communication > 0
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_what_computes_or_keeps_too_much_is_given_up() -> None:
    example = Example((torch.ones(4, 8),), {})
    with fake_ranks(4, rank=0):
        mesh = RehearsalMesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        fresh = Rehearsal(skeleton(model), mesh, example, Machine()).cost(CHOICES, memory=True)
        rehearsal = Rehearsal(skeleton(model), mesh, example, Machine())
        assert rehearsal.state(CHOICES) == (fresh.parameters, fresh.state)
        for most in (Most(flops=fresh.flops - 1), Most(memory=fresh.memory - 1), Most(memory=fresh.state - 1)):
            with pytest.raises(TooMuch):
                rehearsal.cost(CHOICES, memory=True, most=most)
        assert rehearsal.cost(CHOICES, memory=True, most=Most(fresh.communication, fresh.flops, fresh.memory)) == fresh


def test_work_is_that_of_a_rank_whatever_was_known_before() -> None:
    """Rules find some shapes by a run on whole meta tensors, once: no work of a rank."""
    clear_caches()
    example = Example((torch.ones(8, 3, 8, 8),), {})
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    with fake_ranks(4, rank=0):
        mesh = RehearsalMesh(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        rehearsal = Rehearsal(skeleton(model), mesh, example, Machine())
        flops = rehearsal.cost({Key("input", "", ()): (0,)}).flops
        assert rehearsal.cost({}).flops == 4 * flops
    first, second = 2 * 8 * 4 * 6 * 6 * 27, 2 * 8 * 4 * 4 * 4 * 36
    assert 4 * flops == 2 * first + 3 * second  # nobody asks for the gradient of the input


@dataclass
class Batch:
    x: Tensor
    rows: int


Pair = namedtuple("Pair", "first second")


def test_arguments_without_data() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    batch, pair = Batch(x, 2), Pair([x, None], {"y": x, 3: "text"})
    ghosts = Example((batch,), {"pair": pair}).on_meta(None)
    assert type(ghosts.args[0]) is Batch
    assert ghosts.args[0].rows == 2
    made = ghosts.kwargs["pair"]
    assert type(made) is Pair
    assert made.first[1] is None
    assert made.second[3] == "text"
    for t in (ghosts.args[0].x, made.first[0], made.second["y"]):
        assert t.is_meta
        assert t.requires_grad
        assert t.shape == (2, 3)
    assert batch.x is x
    assert pair.first[0] is x
