"""The ways to say which elements a caller holds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from vescale_rng._choose import check_local, choose_part
from vescale_rng._layout import Part, part_of_flat, part_of_slices
from vescale_rng.errors import LayoutError
from vescale_testing import fake_ranks


def test_none_is_the_whole() -> None:
    assert choose_part((4, 6), None) == Part.whole((4, 6))
    assert choose_part((4, 6), None, stride=(1, 4)) == Part.whole((4, 6), (1, 4))


def test_slices_and_ranges() -> None:
    wanted: Any = (slice(1, 3), [slice(0, 2), slice(4, 6)])
    assert choose_part((4, 6), wanted) == part_of_slices((4, 6), wanted)
    assert choose_part((4, 6), range(3, 9), stride=(1, 4)) == part_of_flat((4, 6), 3, 9, (1, 4))
    assert choose_part((4, 6), range(9, 9)) == part_of_flat((4, 6), 9, 9)
    assert choose_part((4, 6), range(24)) == part_of_flat((4, 6), 0, 24)


def test_a_part_must_be_of_the_shape() -> None:
    part = Part.whole((4, 6), (1, 4))
    assert choose_part((4, 6), part) is part
    assert choose_part((4, 6), part, stride=[1, 4]) is part
    with pytest.raises(
        LayoutError, match=r"part: made for a tensor of shape \(4, 6\) and strides \(1, 4\), but shape \(6,"
    ):
        choose_part((6, 4), part)
    with pytest.raises(LayoutError, match=r"strides \(1, 4\), but shape \(4, 6\) and stride \(6, 1\)"):
        choose_part((4, 6), part, stride=(6, 1))


def test_mesh_and_placements() -> None:
    with fake_ranks(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2))
        assert choose_part((5, 6), None, mesh, [Shard(0), Shard(1)]) == part_of_slices(
            (5, 6), (slice(3, 5), slice(3, 6))
        )
        assert choose_part((5, 6), None, mesh, (Replicate(), Replicate()), (1, 5)) == Part.whole((5, 6), (1, 5))
        with pytest.raises(LayoutError, match="partial value still awaits a reduction"):
            choose_part((5, 6), None, mesh, [Shard(0), Partial()])
        with pytest.raises(LayoutError, match="part: given beside mesh and placements"):
            choose_part((5, 6), range(3), mesh, [Shard(0), Shard(1)])
        with pytest.raises(LayoutError, match="placements: not given; give mesh and placements together"):
            choose_part((5, 6), None, mesh)
    with pytest.raises(LayoutError, match="mesh: not given; give mesh and placements together"):
        choose_part((5, 6), None, placements=[Shard(0)])


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (range(0, 8, 2), "has step 2; a range over the flattened tensor has step 1"),
        (range(20, 30), "20:30 is not inside the 24 elements"),
        (range(-3, 3), "start, stop: "),
        (range(9, 3), "9:3 is not inside"),
        ((range(2), slice(0, 1)), r"slices\[0\]: .* got range\(0, 2\); write slice\(0, 2\)"),
        ((range(0), slice(0, 1)), r"slices\[0\]: .* got range\(0, 0\)"),
        ((slice(0, 2),), "needs 2, one per dim"),
        ((slice(0, 9), slice(0, 1)), "slice"),
        ((slice(0, 4, 2), slice(0, 1)), "step"),
    ],
)
def test_what_does_not_fit(part: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        choose_part((4, 6), part)


@pytest.mark.parametrize("shape", [5, (2.0,), ("a",), (-1,), (2**63,), (2**70, 0)], ids=str)
@pytest.mark.parametrize("part", [None, (slice(0, 0),), range(0), Part.whole((5,))], ids=str)
def test_what_is_no_shape(shape: Any, part: Any) -> None:
    with pytest.raises(LayoutError, match=r"^shape: "):
        choose_part(shape, part)


@pytest.mark.parametrize("local", [[1, 2], None, torch.eye(2).to_sparse()], ids=["list", "None", "sparse"])
def test_what_is_no_local_tensor(local: Any) -> None:
    with pytest.raises(TypeError, match="local: expected a"):
        check_local(local)


def test_shapes_of_torch_are_shapes() -> None:
    assert choose_part(tuple(torch.empty(2, 3).shape), (slice(0, 1), slice(0, 3))).local_shape == (1, 3)
