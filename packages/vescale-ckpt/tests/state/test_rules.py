"""Placements and meshes as a manifest writes them."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_ckpt._geometry import Mesh, Rule
from vescale_ckpt._state import rules
from vescale_ckpt._state.rules import placement_text, replicated, rule_of
from vescale_ckpt.errors import LayoutError
from vescale_testing import fake_ranks


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Replicate(), "R"),
        (Shard(0), "S(0)"),
        (Shard(2), "S(2)"),
        (Shard(-1), "S(2)"),
        (Shard(-3), "S(0)"),
        (_StridedShard(1, split_factor=4), "SS(1,4)"),
        (_StridedShard(-1, split_factor=2), "SS(2,2)"),
        (SimpleNamespace(dim=1, interleave=3), "IS(1,3)"),
        (SimpleNamespace(dim=-1, interleave=3), "IS(2,3)"),
        (SimpleNamespace(dims=(0,), local_units=(1, 0, 2)), "RS(1,1,0,2)"),
        (SimpleNamespace(dims=[0, 1], local_units=[5]), "RS(2,5)"),
    ],
    ids=str,
)
def test_placements(placement, text):
    assert placement_text(placement, 3, 4, "w") == text
    Rule(Mesh((1,), (0,)), (text,))  # can be read


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Shard(3), r"Shard\(dim=3\) cuts a dim that a tensor of 3 dims does not have"),
        (Shard(-4), "cuts a dim that a tensor of 3 dims does not have"),
        (SimpleNamespace(dim=3, interleave=1), "cuts a dim"),
        (
            SimpleNamespace(dims=(1,), local_units=(1,)),
            r"a ragged shard flattens the dims 0, 1, ...; this one has \(1,\)",
        ),
        (SimpleNamespace(dims=(), local_units=(1,)), r"this one has \(\)"),
        (Partial(), r"still awaits a reduction over 4 ranks\. Redistribute it to"),
        (Partial("avg"), "still awaits a reduction"),
        (None, "None of class builtins.NoneType, which is not known here"),
        ("S(0)", "which is not known here. Known are Replicate, Shard"),
        (SimpleNamespace(dim=0), "which is not known here"),
    ],
    ids=str,
)
def test_placements_that_are_refused(placement, message):
    with pytest.raises(LayoutError, match=f"state: layer.w.*{message}"):
        placement_text(placement, 3, 4, "layer.w")


def test_nothing_is_pending_on_an_axis_of_one():
    assert placement_text(Partial(), 3, 1, "w") == "R"


def test_replicated_is_one_object_per_world():
    assert replicated(4) is replicated(4)
    assert replicated(4) == Rule(Mesh((4,), range(4)), ("R",))
    assert isinstance(replicated(10**6).mesh.ranks, range)


ROWS = (Shard(0), Shard(0))


def test_axes_stand_in_the_order_in_which_they_cut():
    with fake_ranks(6, 0):
        mesh = init_device_mesh("cpu", (2, 3))

        def rule(order, placements=ROWS, **others):
            entries = tuple(SimpleNamespace(mesh_dims=axes) for axes in order)
            return rule_of(mesh, placements, 2, range(6), "w", SimpleNamespace(shard_order=entries, **others))

        assert rule([(0, 1)]) == Rule(Mesh((2, 3), range(6)), ("S(0)", "S(0)"))
        # Axis 1 is the outer one: place (j, i) of the new mesh is place (i, j) of the old one.
        assert rule([(1, 0)]) == Rule(Mesh((3, 2), (0, 3, 1, 4, 2, 5)), ("S(0)", "S(0)"))
        # One axis per dim: the order does not matter.
        assert rule([(1,), (0,)], (Shard(1), Shard(0))) == Rule(Mesh((2, 3), range(6)), ("S(1)", "S(0)"))
        # Strided shards say the order themselves.
        given = rule([(1, 0)], (_StridedShard(0, split_factor=3), Shard(0)), use_strided_shard_as_shard_order=True)
        assert given == Rule(Mesh((2, 3), range(6)), ("SS(0,3)", "S(0)"))
        assert rule_of(mesh, (Shard(0), Shard(0)), 2, range(6), "w") == rule([(0, 1)])


def test_an_order_of_three_axes():
    with fake_ranks(8, 0):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        spec = SimpleNamespace(shard_order=(SimpleNamespace(mesh_dims=(2, 0)),))
        rule = rule_of(mesh, (Shard(0), Replicate(), Shard(0)), 1, range(8), "w", spec)
        # Axes in the order 2, 0, 1: rank = 4 * i0 + 2 * i1 + i2
        expected = [4 * i0 + 2 * i1 + i2 for i2 in (0, 1) for i0 in (0, 1) for i1 in (0, 1)]
        assert rule == Rule(Mesh((2, 2, 2), expected), ("S(0)", "S(0)", "R"))
        assert [rule.boxes((8,), rank)[0].offset for rank in (0, 1, 4, 5)] == [(0,), (4,), (2,), (6,)]


def test_placements_must_be_as_many_as_axes():
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(LayoutError, match="w has 2 placements on a mesh of 1 axes"):
            rule_of(mesh, (Shard(0), Shard(0)), 2, range(2), "w")


def test_what_is_known_of_a_mesh_goes_with_it():
    class Grid:
        """As much of a DeviceMesh as is looked at."""

        shape, mesh = (2,), torch.tensor([0, 1])

    before, grid = len(rules._known), Grid()
    first = rule_of(grid, (Shard(0),), 2, (0, 1), "w")
    for _ in range(3):
        assert rule_of(grid, (Shard(0),), 2, tuple([0, 1]), "w") is first  # noqa: C409  as of another save
    assert rule_of(grid, (Shard(0),), 2, (1, 0), "w").mesh.ranks == range(1, -1, -1)
    assert len(rules._known) == before + 1
    del grid
    gc.collect()
    assert len(rules._known) == before
