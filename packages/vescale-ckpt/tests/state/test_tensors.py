"""Where the elements of a tensor lie on each rank: torch cuts a tensor of known elements, the views must show them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from vescale_ckpt._geometry import Box, Mesh, Rule
from vescale_ckpt._state import describe, pack, plain
from vescale_ckpt.errors import LayoutError, StateError
from vescale_testing import fake_ranks

R = Replicate()


def S(dim: int) -> Shard:
    return Shard(dim)


def SS(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements say where they are."""
    return torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)


def check(held: Any, whole: torch.Tensor, local: torch.Tensor, rank: int) -> None:
    """Assert that the parts show the elements of their boxes, in the memory of `local`, and all of that."""
    assert held.spec.shape == tuple(whole.shape)
    assert held.spec.dtype == str(whole.dtype).removeprefix("torch.")
    assert tuple(box for box, _ in held.parts) == held.spec.layout.boxes(held.spec.shape, rank)
    for box, view in held.parts:
        assert view.shape == box.shape
        assert torch.equal(view, whole[box.slices(Box.whole(tuple(whole.shape)))])
    before = local.clone()
    for _, view in held.parts:
        view.neg_().sub_(1)
    assert torch.equal(local, -before - 1)
    for _, view in held.parts:
        view.neg_().sub_(1)


def check_cover(rule: Rule, shape: tuple[int, ...]) -> None:
    """Assert that each distinct shard holds elements of its own, and all together the whole."""
    count = torch.zeros(shape, dtype=torch.int32)
    for holders in rule.overlapping(shape, Box.whole(shape)):
        for box in rule.boxes(shape, holders[0]):
            count[box.slices(Box.whole(shape))] += 1
    assert bool((count == 1).all())


@pytest.mark.parametrize("shape", [(), (7,), (0,), (2, 3), (4, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e5m2, torch.complex64, torch.uint16])
def test_plain_tensors_are_held_by_all(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape).to(dtype)
    held = describe("w", tensor, range(6), 4)
    assert held.spec.layout == Rule(Mesh((6,), range(6)), ("R",))
    assert (held.spec.name, held.spec.shape, held.spec.dtype) == ("w", shape, str(dtype)[6:])
    if tensor.numel():
        ((box, view),) = held.parts
        assert box == Box.whole(shape)
        assert view.data_ptr() == tensor.data_ptr()
    else:
        assert held.parts == []


def test_views_have_no_history_and_write_through() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    ((_, view),) = describe("w", parameter, (0,), 0).parts
    assert not view.requires_grad
    view.fill_(3)
    assert torch.equal(parameter, torch.full((2, 3), 3.0))


def test_strided_views_stay_where_they_are() -> None:
    whole = numbered((6, 8))
    for tensor in (whole.t(), whole[::2, 1::3], whole[2:, 3]):
        held = describe("w", tensor, (0, 1), 1)
        check(held, tensor.clone(), tensor, 1)


PLACEMENTS = {
    "R R": (R, R),
    "S0 R": (S(0), R),
    "R S1": (R, S(1)),
    "S0 S1": (S(0), S(1)),
    "S1 S0": (S(1), S(0)),
    "S0 S0": (S(0), S(0)),
    "S-1 S-1": (S(-1), S(-1)),
    "SS0 S0": (SS(0, 3), S(0)),  # as FSDP over tensor parallel
    "SS1 S1": (SS(1, 3), S(1)),
    "SS0 R": (SS(0, 2), R),
    "R SS1": (R, SS(1, 4)),
}
SHAPES = [(12, 6), (7, 5), (1, 1), (3, 17), (13, 2), (0, 4), (4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", PLACEMENTS)
def test_torch_dtensors(name: str, shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for rank in range(6):
        with fake_ranks(6, rank):
            mesh = init_device_mesh("cpu", (2, 3))
            tensor = distribute_tensor(whole.clone(), mesh, PLACEMENTS[name], src_data_rank=None)
            local = tensor.to_local()
            held = describe("w", tensor, range(6), rank)
            assert isinstance(held.spec.layout, Rule)
            assert held.spec.layout.mesh == Mesh((2, 3), range(6))
            check(held, whole, local, rank)
    check_cover(held.spec.layout, shape)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 11, 16])
def test_uneven_and_empty_shards_of_a_large_mesh(size: int) -> None:
    whole = numbered((size, 3))
    for rank in range(8):
        with fake_ranks(8, rank):
            tensor = distribute_tensor(whole.clone(), init_device_mesh("cpu", (8,)), [S(0)], src_data_rank=None)
            held = describe("w", tensor, range(8), rank)
            check(held, whole, tensor.to_local(), rank)
            assert len(held.parts) == (1 if len(whole.chunk(8)) > rank else 0)


def test_three_axes_that_cut_one_dim() -> None:
    whole = numbered((29, 2))
    for rank in range(8):
        with fake_ranks(8, rank):
            mesh = init_device_mesh("cpu", (2, 2, 2))
            tensor = distribute_tensor(whole.clone(), mesh, [S(0), S(0), S(0)], src_data_rank=None)
            check(describe("w", tensor, range(8), rank), whole, tensor.to_local(), rank)


@pytest.mark.parametrize("rows", [8, 12, 9, 10, 3])
def test_parameters_of_fsdp_over_tensor_parallel(rows: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = {"up.weight": numbered((rows, 8)).float(), "down.weight": numbered((8, rows)).float()}
    seen = {name: torch.zeros(tensor.shape) for name, tensor in whole.items()}
    rules = {}
    for rank in range(4):
        with fake_ranks(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = torch.nn.Sequential()
            model.add_module("up", torch.nn.Linear(8, rows, bias=False))
            model.add_module("down", torch.nn.Linear(rows, 8, bias=False))
            model.load_state_dict(whole)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
            fully_shard(model, mesh=mesh["dp"])
            for name, tensor in pack({"model": model}).tensors:
                held = describe(name, tensor, range(4), rank)
                expected = whole[name.removeprefix("model.")]
                assert isinstance(held.spec.layout, Rule)
                rules[name] = held.spec.layout.placements
                check(held, expected, tensor.to_local(), rank)  # type: ignore[attr-defined]
                for box, view in held.parts:
                    seen[name.removeprefix("model.")][box.slices(Box.whole(tuple(expected.shape)))] += view * 0 + 1
    for tensor in seen.values():
        assert bool((tensor == 1).all())
    assert rules["model.up.weight"] == ("SS(0,2)", "S(0)")
    assert rules["model.down.weight"] == ("S(0)", "S(1)")


@pytest.mark.parametrize("rows", [12, 7, 4, 1])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_axes_that_cut_in_another_order(order: tuple[int, int], rows: int) -> None:
    whole, sizes = numbered((rows, 2)), (2, 3)
    for rank in range(6):
        with fake_ranks(6, rank):
            mesh = init_device_mesh("cpu", sizes)
            place, local = mesh.get_coordinate(), whole
            assert place is not None
            for axis in order:
                pieces = [*local.chunk(sizes[axis]), *[local[:0]] * sizes[axis]]
                local = pieces[place[axis]]
            local = local.clone()
            meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
            cut = (ShardOrderEntry(tensor_dim=0, mesh_dims=order),)
            spec = DTensorSpec(mesh, (S(0), S(0)), meta, shard_order=cut)
            tensor = DTensor(local, spec, requires_grad=False)
            held = describe("w", tensor, range(6), rank)
            check(held, whole, local, rank)
    check_cover(held.spec.layout, (rows, 2))  # type: ignore[arg-type]


def test_sub_meshes() -> None:
    whole = numbered((5, 4))
    for rank in range(4):
        with fake_ranks(4, rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
            tensor = distribute_tensor(whole.clone(), mesh["tp"], [S(0)], src_data_rank=None)
            held = describe("w", tensor, range(4), rank)
            first = rank // 2 * 2
            assert held.spec.layout == Rule(Mesh((2,), (first, first + 1)), ("S(0)",))
            check(held, whole, tensor.to_local(), rank)


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with fake_ranks(4, 3):
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = distribute_tensor(numbered((4, 2)), mesh, [S(0)], src_data_rank=None)
        held = describe("w", tensor, range(4), 3)
    assert held.spec.layout == Rule(Mesh((2,), (0, 1)), ("S(0)",))
    assert held.parts == []


def test_ranks_are_counted_in_the_group_that_saves() -> None:
    whole, ranks = numbered((4, 2)), (6, 4, 5, 7)
    with fake_ranks(8, 4):
        mesh = DeviceMesh("cpu", [4, 5, 6, 7])
        tensor = distribute_tensor(whole.clone(), mesh, [S(0)], src_data_rank=None)
        held = describe("w", tensor, ranks, 1)
        assert held.spec.layout == Rule(Mesh((4,), (1, 2, 0, 3)), ("S(0)",))
        check(held, whole, tensor.to_local(), 1)
        # Another group on the same mesh
        other = describe("w", tensor, range(4, 8), 0)
        assert other.spec.layout == Rule(Mesh((4,), range(4)), ("S(0)",))
        with pytest.raises(LayoutError, match=r"w lies on a mesh with the ranks \[6, 7\].*Pass a process_group"):
            describe("w", tensor, (4, 5), 0)


def test_tensors_of_one_layout_share_one_rule() -> None:
    with fake_ranks(2, 0):
        mesh, ranks = init_device_mesh("cpu", (2,)), (0, 1)
        tensors = [distribute_tensor(numbered((4, n + 1)), mesh, [S(0)], src_data_rank=None) for n in range(3)]
        rules = [describe("w", tensor, ranks, 0).spec.layout for tensor in tensors]
        assert rules[0] is rules[1] is rules[2]
        plain_ones = [describe("w", torch.zeros(n), ranks, 0).spec.layout for n in range(3)]
        assert plain_ones[0] is plain_ones[1] is plain_ones[2]


def test_pending_reductions_are_refused() -> None:
    with fake_ranks(4, 0):
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in ([Partial(), R], [S(0), Partial("max")]):
            tensor = DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False)
            with pytest.raises(LayoutError, match=r"layer\.w has the placement Partial.*over 2 ranks.*Redistribute it"):
                describe("layer.w", tensor, range(4), 0)
        mesh = init_device_mesh("cpu", (4, 1))
        tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [S(0), Partial()], run_check=False)
        layout = describe("w", tensor, range(4), 0).spec.layout
        assert layout == Rule(Mesh((4, 1), range(4)), ("S(0)", "R"))


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ((3, 4), "rank 0 should hold 8 elements .* but its local tensor of shape .3, 4. has 12.*pass `shape`"),
        ((1, 4), "rank 0 should hold 8 elements"),
        ((4, 2), "the local tensor of rank 0 has the shape .4, 2."),
        ((8, 1), "the local tensor of rank 0 has the shape .8, 1."),
    ],
    ids=str,
)
def test_local_tensors_that_do_not_fit_are_refused(local: tuple[int, ...], message: str) -> None:
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(
            torch.zeros(local), mesh, [S(0)], run_check=False, shape=torch.Size([4, 4]), stride=(4, 1)
        )
        with pytest.raises(LayoutError, match=f"state: w: .*{message}"):
            describe("w", tensor, range(2), 0)


def test_dtensors_are_tied_by_memory_and_layout() -> None:
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        a = distribute_tensor(numbered((4, 2)), mesh, [S(0)], src_data_rank=None)
        b = distribute_tensor(numbered((4, 2)), mesh, [S(0)], src_data_rank=None)
        other = DTensor.from_local(a.to_local(), mesh, [R], run_check=False)
        packed = pack({"a": a, "tied": a.detach(), "b": b, "local": a.to_local(), "other": other})
    assert [name for name, _ in packed.tensors] == ["a", "b", "local", "other"]
    assert packed.tree["tied"] == packed.tree["a"] == {"$tensor": 0}


def test_empty_shards_of_different_dtensors_are_not_tied() -> None:
    with fake_ranks(4, 3):
        mesh = init_device_mesh("cpu", (4,))
        tensors = [distribute_tensor(numbered((2, 2)), mesh, [S(0)], src_data_rank=None) for _ in range(5)]
        assert len(pack(tensors).tensors) == 5
        assert len(pack([tensors[0], tensors[0].detach()]).tensors) == 1


class Wrapper(torch.Tensor):
    """Shows other elements than it holds, as tensors of scaled 8-bit floats do."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        tensor: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


class Overriding(torch.Tensor):
    """Holds what it shows, but nobody can know."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class Harmless(torch.Tensor):
    """Overrides nothing."""


class HarmlessParameter(torch.nn.Parameter):
    """Overrides nothing."""


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "wrapper": (lambda: Wrapper(torch.zeros(2)), r"Wrapper, a tensor class that may hold other bytes.*vescale_layout"),
    "overriding": (lambda: torch.zeros(2).as_subclass(Overriding), "Overriding, a tensor class"),
    "masked": (
        lambda: torch.masked.MaskedTensor(torch.zeros(2), torch.ones(2, dtype=torch.bool)),
        "MaskedTensor, a tensor class",
    ),
    "meta": (lambda: torch.zeros(2, device="meta"), "on the meta device, which has no data. Materialize it"),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "UninitializedParameter of a lazy module, .* Run the module once"),
    "lazy buffer": (
        lambda: torch.nn.parameter.UninitializedBuffer(),
        "UninitializedBuffer of a lazy module, .* Run the module once",
    ),
    "coo": (lambda: torch.eye(2).to_sparse(), "layout torch.sparse_coo. Save its indices and values"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "layout torch.sparse_csr"),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        "is a quantized tensor. Save its int_repr",
    ),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), "is a nested tensor. Save its"),
    "bits": (lambda: torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "has the dtype torch.bits8"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of features of torch that are not final
@pytest.mark.parametrize("kind", REFUSED)
def test_tensors_that_cannot_be_saved(kind: str) -> None:
    make, message = REFUSED[kind]
    tensor = make()
    for act in (
        lambda: describe("layer.w", tensor, (0,), 0),
        lambda: plain("layer.w", tensor),
        lambda: pack({"layer": {"w": tensor}}),
    ):
        with pytest.raises(StateError, match=f"state: layer.w .*{message}"):
            act()


def test_fake_tensors_have_no_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(2)
    with pytest.raises(StateError, match="w is a FakeTensor, which has no data"):
        describe("w", fake, (0,), 0)


def test_subclasses_that_override_nothing_are_plain() -> None:
    for tensor in (
        torch.ones(2).as_subclass(Harmless),
        HarmlessParameter(torch.ones(2)),
        torch.nn.Buffer(torch.ones(2)),
    ):
        ((_, view),) = describe("w", tensor, (0,), 0).parts
        assert torch.equal(view.as_subclass(torch.Tensor), torch.ones(2))


def test_wrappers_in_dtensors_are_refused() -> None:
    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.zeros(4), mesh, [S(0)], src_data_rank=None)
        tensor._local_tensor = Wrapper(torch.zeros(2))
        with pytest.raises(StateError, match=r"w is sharded, and its local tensor is a .*Wrapper, a tensor class"):
            describe("w", tensor, range(2), 0)


def test_results_of_pending_collectives_are_awaited() -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    inner = torch.arange(3)
    held = describe("w", AsyncCollectiveTensor(inner), (0,), 0)
    assert torch.equal(held.parts[0][1], inner)


def test_unknown_placements_are_refused() -> None:
    class Spiral(Shard):
        pass

    with fake_ranks(2, 0):
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(torch.zeros(4), mesh, [S(0)], src_data_rank=None)
        tensor._spec.placements = (Spiral(0),)
        with pytest.raises(LayoutError, match=r"w has the placement .*Spiral, which is not known here. Known are"):
            describe("w", tensor, range(2), 0)


def test_own_tensors_are_plain() -> None:
    held = plain("rng", torch.ones(3, 2))
    assert held.spec.layout == Rule(Mesh((1,), range(1)), ("R",))
    with fake_ranks(2, 1):
        tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [S(0)], src_data_rank=None)
        with pytest.raises(StateError, match=r"rng is marked .* local\(...\), but it is a sharded tensor.*Take it out"):
            plain("rng", tensor)
