"""DTensors of vescale_dtensor: the same rule, boxes and elements as torch's own DTensor with the same placements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

pytest.importorskip("vescale_dtensor")

import vescale_dtensor as vd
from vescale_ckpt._geometry import Box, Mesh, Rule
from vescale_ckpt._state import describe, digest, pack, plain
from vescale_ckpt.errors import LayoutError, StateError
from vescale_testing import cached_mesh, fake_ranks

CHOICES: list[Placement] = [Replicate(), Shard(0), Shard(1)]
SHAPES = [(12, 6), (7, 5), (1, 9), (2, 1), (0, 3), (3, 4, 2)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_same_as_torch(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for rank in range(6):
        with fake_ranks(6, rank):
            mesh = init_device_mesh("cpu", (2, 3))
            for placements in itertools.product(CHOICES, repeat=2):
                ours = vd.distribute_tensor(whole, mesh, placements)
                theirs = torch_distribute(whole.clone(), mesh, placements, src_data_rank=None)
                held, expected = (describe("w", tensor, range(6), rank) for tensor in (ours, theirs))
                assert isinstance(held.spec.layout, Rule)
                assert held.spec == expected.spec
                assert [box for box, _ in held.parts] == [box for box, _ in expected.parts]
                for (box, view), (_, other) in zip(held.parts, expected.parts, strict=True):
                    assert torch.equal(view, whole[box.slices(Box.whole(shape))])
                    assert torch.equal(view, other)
                small = [digest([one.spec], {"w": {"$tensor": 0}}, {}) for one in (held, expected)]
                assert small[0] == small[1]


def test_views_are_memory_of_the_tensor() -> None:
    with fake_ranks(2, 1):
        mesh = init_device_mesh("cpu", (2,))
        tensor = vd.distribute_tensor(numbered((4, 3)), mesh, [Shard(0)])
        parameter = torch.nn.Parameter(tensor)
        ((box, view),) = describe("w", parameter, range(2), 1).parts
        assert box == Box((2, 0), (2, 3))
        assert not view.requires_grad
        assert type(view) is torch.Tensor
        view.zero_()
        assert not tensor.to_local().any()


def test_transposed_memory() -> None:
    whole = numbered((6, 4))
    for rank in range(2):
        with fake_ranks(2, rank):
            mesh = init_device_mesh("cpu", (2,))
            tensor = vd.distribute_tensor(whole, mesh, [Shard(0)]).t()
            held = describe("w", tensor, range(2), rank)
            assert held.spec.shape == (4, 6)
            assert held.spec.layout == Rule(Mesh((2,), range(2)), ("S(1)",))
            ((box, view),) = held.parts
            assert torch.equal(view, whole.t()[box.slices(Box.whole((4, 6)))])


def test_sub_meshes() -> None:
    whole = numbered((5, 2))
    for rank in range(4):
        with fake_ranks(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))["tp"]
            held = describe("w", vd.distribute_tensor(whole, mesh, [Shard(0)]), range(4), rank)
            first = rank // 2 * 2
            assert held.spec.layout == Rule(Mesh((2,), (first, first + 1)), ("S(0)",))


def test_pending_sums_are_refused() -> None:
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        tensor = vd.distribute_tensor(numbered((4, 2)), mesh, [Partial()])
        with pytest.raises(LayoutError, match=r"w still awaits a reduction over ranks. Redistribute it"):
            describe("w", tensor, range(2), 0)


def test_ties_and_marks() -> None:
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        a, b = (vd.distribute_tensor(numbered((4, 2)), mesh, [Shard(0)]) for _ in range(2))
        assert [name for name, _ in pack({"a": a, "b": b, "c": a.detach(), "d": a.to_local()}).tensors] == [
            "a",
            "b",
            "d",
        ]
        with pytest.raises(StateError, match=r"w is marked .*local.* but it is a sharded tensor"):
            plain("w", a)


def test_empty_parts_of_different_tensors_are_not_tied() -> None:
    with fake_ranks(4, 3):
        mesh = init_device_mesh("cpu", (4,))
        tensors = [vd.distribute_tensor(numbered((2, 2)), mesh, [Shard(0)]) for _ in range(20)]
        assert len(pack(tensors).tensors) == 20
        assert len(pack([tensors[0], tensors[0].detach()]).tensors) == 1


@pytest.mark.ranks(4, pool=True)
def test_on_real_ranks(rank: int, world: int) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    whole = numbered((7, 6))
    count = torch.zeros(7, 6)
    model = torch.nn.ParameterDict()
    for number, placements in enumerate(itertools.product(CHOICES, repeat=2)):
        model[str(number)] = torch.nn.Parameter(vd.distribute_tensor(whole, mesh, placements))
    for number, (_, tensor) in enumerate(pack(model).tensors):
        held = describe("w", tensor, range(world), rank)
        assert isinstance(held.spec.layout, Rule)
        count.zero_()
        for box, view in held.parts:
            assert torch.equal(view, whole[box.slices(Box.whole((7, 6)))])
            copies = len(held.spec.layout.holders((7, 6), rank))
            count[box.slices(Box.whole((7, 6)))] = 1 / copies
        dist.all_reduce(count)
        assert bool((count == 1).all()), number
