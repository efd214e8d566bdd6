"""Tensor -> part and local tensor: real DTensors of torch, plain tensors, tensors that plugins know."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from vescale_rng import _plugins
from vescale_rng._layout import Box, Part, part_of_boxes, part_of_mesh, part_of_tensor
from vescale_rng._layout import tensor as module
from vescale_rng.errors import LayoutError
from vescale_testing import cached_mesh, fake_ranks

RANKS = pytest.mark.ranks(4, pool=True)


def holds(tensor: torch.Tensor, whole: torch.Tensor) -> Part:
    """Check that the boxes of the local tensor have the elements that the whole has there; return the part."""
    part, local = part_of_tensor(tensor)
    assert type(local) is torch.Tensor
    views = part.views(local)
    for box, view in zip(part.boxes, views, strict=True):
        assert torch.equal(view, whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))])
    assert part.global_shape == tuple(whole.shape)
    assert sum(view.numel() for view in views) == local.numel()
    return part


@RANKS
@pytest.mark.parametrize("placements", [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (Replicate(), Shard(1))], ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 3), (1, 2), (0, 4)], ids=str)
def test_a_dtensor_of_torch(shape: tuple[int, ...], placements: tuple[Any, ...]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    d = distribute_tensor(whole, cached_mesh(2, 2, names=("dp", "tp")), placements)
    part = holds(d, whole)
    assert part_of_tensor(d)[0] is part
    assert part_of_tensor(d)[1].data_ptr() == d.to_local().data_ptr()
    assert part == part_of_mesh(shape, d.device_mesh, placements)


@RANKS
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_the_stride_of_the_whole_is_kept(order: tuple[int, int]) -> None:
    whole = torch.arange(24).view(4, 6).permute(order)
    d = distribute_tensor(torch.arange(24).view(4, 6), cached_mesh(4), [Shard(0)]).permute(order)
    assert holds(d, whole).global_stride == whole.stride()


@RANKS
@pytest.mark.parametrize("rows", [8, 12])
def test_the_parameters_of_fsdp2_with_tensor_parallelism(rows: int) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    linear = torch.nn.Linear(3, rows, bias=False)
    whole = torch.arange(rows * 3.0).view(rows, 3)
    with torch.no_grad():
        linear.weight.copy_(whole)
    parallelize_module(linear, mesh["tp"], ColwiseParallel())
    fully_shard(linear, mesh=mesh["dp"])
    assert "_StridedShard" in repr(linear.weight.placements)
    part = holds(linear.weight, whole)
    assert len(part.boxes) == 1


@RANKS
def test_what_has_no_part(rank: int) -> None:
    mesh = cached_mesh(4)
    partial = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(LayoutError, match="Reduce it first"):
        part_of_tensor(partial)
    crooked = DTensor.from_local(torch.ones(rank + 1), mesh, [Shard(0)], run_check=False, shape=(10,), stride=(1,))
    if rank == 2:  # torch.chunk gives 3, 3, 3 and 1, this tensor has 1, 2, 3 and 4
        assert part_of_tensor(crooked)[0].boxes == (Box((6,), (3,)),)
    else:
        with pytest.raises(LayoutError, match=r"has a local tensor of shape \(\d,\) on this rank, but this one has"):
            part_of_tensor(crooked)


@RANKS
def test_a_rank_outside_of_the_mesh(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False)
    if rank > 1:
        with pytest.raises(LayoutError, match="this process is not in the mesh"):
            part_of_mesh((4,), mesh, [Shard(0)])
        assert part_of_mesh((4,), mesh, [Shard(0)], coordinate=(1,)).boxes == (Box((2,), (2,)),)
    else:
        assert part_of_mesh((4,), mesh, [Shard(0)]).boxes == (Box((2 * rank,), (2,)),)


@RANKS
def test_a_local_tensor_that_a_collective_still_writes() -> None:
    whole = torch.arange(8)
    d = distribute_tensor(whole, cached_mesh(4), [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert type(d._local_tensor) is not torch.Tensor
    assert holds(d, whole).is_whole


def order_of(*axes: int) -> tuple[Any, ...]:
    return (SimpleNamespace(tensor_dim=0, mesh_dims=axes),)


@pytest.mark.parametrize("rank", range(4))
def test_mesh_axes_in_another_order(rank: int) -> None:
    with fake_ranks(4, rank=rank):
        mesh = init_device_mesh("cpu", (2, 2))
        meta = TensorMeta(torch.Size((7,)), (1,), torch.float32)
        spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta)
        spec.shard_order = order_of(1, 0)  # the second axis cuts first
        whole = torch.arange(7.0)
        first, second = rank // 2, rank % 2
        local = torch.tensor_split(whole, [4])[second].split(2)[first]
        d = DTensor(local, spec, requires_grad=False)
        assert holds(d, whole).local_shape == tuple(local.shape)


def test_parts_are_kept_by_spec_and_go_with_it() -> None:
    with fake_ranks(4, rank=1):
        mesh = init_device_mesh("cpu", (4,))
        d = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
        part, _ = part_of_tensor(d)
        key = id(d._spec)
        assert module._parts[key][-1] is part
        d._spec.tensor_meta = TensorMeta(torch.Size((6,)), (1,), torch.float32)  # as torch's resizing operators do
        assert part_of_tensor(d)[0].global_shape == (6,)
        d._spec.tensor_meta = None
        with pytest.raises(LayoutError, match="has no shape yet"):
            part_of_tensor(d)
        del d
        gc.collect()
        assert key not in module._parts


class Tagged(torch.Tensor):
    """Overrides nothing."""


class Sharded(torch.Tensor):
    """Overrides operators: it may hold a shard."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class TaggedParameter(torch.nn.Parameter):
    """Overrides nothing either."""


def test_plain_tensors_are_whole() -> None:
    for tensor in (
        torch.empty(2, 3).t(),
        torch.nn.Parameter(torch.empty(3, 2)),
        torch.nn.Buffer(torch.empty(2)),
        torch.empty(2, 2).as_subclass(Tagged),
        TaggedParameter(torch.empty(3)),
        torch.empty(2, 3, device="meta"),
    ):
        part, local = part_of_tensor(tensor)
        assert local is tensor
        assert part == Part.whole(tensor.shape, tensor.stride())


def test_a_class_that_nobody_knows_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"no plugin knows how a .*Sharded is sharded.*vescale_layout"):
        part_of_tensor(torch.empty(2).as_subclass(Sharded))
    with pytest.raises(LayoutError, match=r"expected a torch\.Tensor, but got list"):
        part_of_tensor([1])  # type: ignore[arg-type]


Provide = Callable[[Callable[[torch.Tensor], Any]], None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Register a function as the only plugin."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()

    def register(answer: Callable[[torch.Tensor], Any]) -> None:
        def vescale_layout(tensor: torch.Tensor) -> Any:
            return answer(tensor)

        plugin = ModuleType("toy")
        vars(plugin)["vescale_layout"] = pluggy.HookimplMarker("vescale_rng")(vescale_layout)
        _plugins.manager().register(plugin, name="toy")

    yield register
    _plugins.reset()


def layout(local: torch.Tensor, *boxes: Box, partial: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        global_shape=torch.Size((4, 6)),
        global_stride=[1, 4],
        boxes=[SimpleNamespace(offset=list(box.offset), shape=box.shape) for box in boxes],
        local=local,
        replicas=(0, 1),
        partial=partial,
    )


def test_a_layout_of_a_plugin(provide: Provide) -> None:
    local = torch.arange(6).view(3, 2).t()
    provide(lambda tensor: layout(local, Box((1, 2), (2, 3))))
    part, found = part_of_tensor(torch.empty(6).as_subclass(Sharded))
    assert found is local
    assert part == part_of_boxes((4, 6), [Box((1, 2), (2, 3))], stride=(1, 4))
    assert torch.equal(part.views(found)[0], local)


def test_a_ragged_layout_of_a_plugin(provide: Provide) -> None:
    local = torch.arange(6).view(2, 3)
    provide(lambda tensor: layout(local, Box((0, 4), (1, 2)), Box((1, 0), (1, 4))))
    part, found = part_of_tensor(torch.empty(6).as_subclass(Sharded))
    assert part.local_shape == (2, 3)
    assert [view.tolist() for view in part.views(found)] == [[[0, 1]], [[2, 3, 4, 5]]]


def test_layouts_of_a_plugin_that_are_refused(provide: Provide) -> None:
    tensor = torch.empty(6).as_subclass(Sharded)
    answers = [
        layout(torch.empty(2), Box((0, 0), (1, 2)), partial=True),
        layout(torch.empty(3), Box((0, 0), (1, 2))),
        layout(torch.empty(2), Box((0, 5), (1, 2))),
    ]
    provide(lambda tensor: answers.pop(0))
    for message in ("Sharded that is partial", "hold 2 elements, but a local tensor", "is not inside"):
        with pytest.raises(LayoutError, match=message):
            part_of_tensor(tensor)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_tensors_are_refused(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is in beta
        sparse = torch.eye(3).to_sparse(layout=layout)
    for tensor in (sparse, torch.nn.Parameter(sparse)):
        with pytest.raises(LayoutError, match=r"tensor: expected a dense tensor, but got torch.sparse_c"):
            part_of_tensor(tensor)


@pytest.mark.slow
def test_nothing_needs_torch_dtensor() -> None:
    program = """
import sys, types, torch
for name in [*sys.modules, "torch.distributed.tensor"]:
    if name.startswith("torch.distributed.tensor"):
        sys.modules[name] = None  # importing it fails now
from vescale_rng._layout import Part, part_of_mesh, part_of_tensor
assert part_of_tensor(torch.empty(2))[0] == Part.whole((2,))
class Mine(torch.Tensor): pass
assert part_of_tensor(torch.empty(2).as_subclass(Mine))[0] == Part.whole((2,))
blocks = types.SimpleNamespace(dim=0, interleave=2)
print(part_of_mesh((8,), (2,), [blocks], coordinate=(1,)).boxes)
"""
    alone = os.environ | {_plugins.OFF: "all"}  # the plugins of siblings may need it
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str((Box((2,), (2,)), Box((6,), (2,))))
