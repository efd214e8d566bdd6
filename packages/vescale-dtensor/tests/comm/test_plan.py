"""Plans on meshes far larger than the machine: specs and steps only, nothing is sent."""

from __future__ import annotations

import time

import pytest
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor._comm.plan import plan
from vescale_dtensor._mesh import mesh_info
from vescale_dtensor._spec import chunk, spec_of
from vescale_dtensor.placements import I, P
from vescale_testing import fake_ranks


def test_specs_are_interned() -> None:
    with fake_ranks(4):
        mesh = mesh_info(init_device_mesh("cpu", (2, 2)))
        assert mesh_info(init_device_mesh("cpu", (2, 2))) is mesh
        assert spec_of(mesh, (4, 6), (0, I)) is spec_of(mesh, [4, 6], (0, I))
        assert spec_of(mesh, (4, 6), (0, I)).dual.dual is spec_of(mesh, (4, 6), (0, I))


def test_a_new_process_group_gives_a_new_mesh() -> None:
    with fake_ranks(4):
        before = mesh_info(init_device_mesh("cpu", (4,)))
    with fake_ranks(4):
        assert mesh_info(init_device_mesh("cpu", (4,))) is not before


@pytest.mark.parametrize("rank", [0, 7, 1023])
def test_boxes_of_a_thousand_ranks_tile_the_tensor(rank: int) -> None:
    with fake_ranks(1024, rank=rank):
        mesh = mesh_info(init_device_mesh("cpu", (8, 16, 8)))
        spec = spec_of(mesh, (100, 37), (0, 1, 0))
        cells: set[tuple[int, int]] = set()
        for coordinate in mesh.members((0, 1, 2)):
            (r0, c0), (rows, columns) = spec.box_of(coordinate)
            block = {(r, c) for r in range(r0, r0 + rows) for c in range(c0, c0 + columns)}
            assert not block & cells
            cells |= block
        assert len(cells) == spec.numel
        assert spec.box_of(mesh.coordinate) == (spec.local_offset, spec.local_shape)


def test_planning_is_fast_on_a_thousand_ranks() -> None:
    with fake_ranks(1024, rank=5):
        mesh = mesh_info(init_device_mesh("cpu", (8, 16, 8)))
        start = time.perf_counter()
        for size in range(100):
            plan(spec_of(mesh, (4096 + size, 512), (0, P, I)), (I, 1, 0))
        assert time.perf_counter() - start < 20  # about 1 s; a plan per rank and tensor would take minutes


@pytest.mark.parametrize(("size", "parts"), [(0, 3), (1, 4), (5, 4), (8, 4), (9, 2)])
def test_chunks_follow_torch(size: int, parts: int) -> None:
    import torch

    expected = [len(c) for c in torch.arange(size).chunk(parts)] if size else []
    expected += [0] * (parts - len(expected))
    assert [chunk(size, parts, i)[1] for i in range(parts)] == expected
