"""Tensors of classes that only a plugin knows: its boxes, its mesh and placements, and answers that make no sense."""

import itertools
import math
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale_ckpt import _plugins
from vescale_ckpt._geometry import Box, Explicit, Mesh, Piece, Rule
from vescale_ckpt._state import describe, join_boxes, own_boxes, pack, plain
from vescale_ckpt.errors import LayoutError, StateError
from vescale_testing import fake_ranks

hookimpl = pluggy.HookimplMarker("vescale_ckpt")
Provide = Callable[..., None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Register a function as the only plugin."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()

    def register(vescale_layout: Callable[[torch.Tensor], object]) -> None:
        plugin = ModuleType("toy")
        plugin.vescale_layout = hookimpl(vescale_layout)  # type: ignore[attr-defined]
        _plugins.manager().register(plugin, name="toy")

    yield register
    _plugins.reset()


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


class Ragged(torch.Tensor):
    """A tensor of a class that only a plugin knows."""

    local: torch.Tensor
    whole: tuple[int, ...]
    boxes: list[Any]
    partial: bool = False

    @staticmethod
    def __new__(cls, local: torch.Tensor, whole: tuple[int, ...], boxes: list[Any], **others: Any) -> "Ragged":
        tensor: Ragged = torch.Tensor._make_wrapper_subclass(cls, whole, dtype=local.dtype)
        vars(tensor).update(local=local, whole=whole, boxes=boxes, **others)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(offset=offset, shape=shape)


def vescale_layout(tensor: torch.Tensor) -> object:
    if not isinstance(tensor, Ragged):
        return None
    return SimpleNamespace(
        global_shape=tensor.whole,
        global_stride=torch.empty(tensor.whole, device="meta").stride(),
        boxes=tensor.boxes,
        local=tensor.local,
        replicas=(0, 1),
        partial=tensor.partial,
    )


def ragged(start: int, stop: int, **others: Any) -> Ragged:
    """Elements `start` to `stop` of a tensor of 4 x 5, which begin and end within rows."""
    boxes = [box(b.offset, b.shape) for b in Piece(Box((0, 0), (4, 5)), start, stop).boxes()]
    return Ragged(numbered((4, 5)).flatten()[start:stop].clone(), (4, 5), boxes, **others)


def test_boxes_of_a_plugin(provide: Provide) -> None:
    provide(vescale_layout)
    whole, cuts = numbered((4, 5)), [0, 3, 13, 13, 20]
    said, specs = [], []
    for rank, (start, stop) in enumerate(itertools.pairwise(cuts)):
        tensor = ragged(start, stop)
        held = describe("w", tensor, range(4), rank)
        assert isinstance(held.spec.layout, Explicit)
        check(held, whole, tensor.local, rank)
        assert sum(b.numel for b, _ in held.parts) == stop - start
        said.append(own_boxes([held.spec], rank))
        specs.append(held.spec)
    (joined,) = join_boxes(specs[:1], said)
    assert [len(joined.layout.boxes((4, 5), rank)) for rank in range(4)] == [1, 3, 0, 2]


def test_storage_of_a_plugin_may_have_any_contiguous_shape(provide: Provide) -> None:
    provide(vescale_layout)
    whole = numbered((4, 5))
    for shape in ((10,), (2, 5), (5, 2)):
        tensor = Ragged(whole[1:3].reshape(shape).clone(), (4, 5), [box((1, 0), (2, 5))])
        check(describe("w", tensor, (0,), 0), whole, tensor.local, 0)
    strided = torch.zeros(20, dtype=torch.int32)[::2]
    strided.copy_(whole[1:3].flatten())
    tensor = Ragged(strided, (4, 5), [box((1, 0), (2, 5))])
    check(describe("w", tensor, (0,), 0), whole, tensor.local, 0)
    tensor = Ragged(whole[1:3].reshape(5, 2).t(), (4, 5), [box((1, 0), (1, 5)), box((2, 0), (1, 5))])
    with pytest.raises(LayoutError, match=r"w: .*need a local tensor that is 1-D or contiguous; this one has shape"):
        describe("w", tensor, (0,), 0)


def test_mesh_and_placements_of_a_plugin_are_a_rule_where_they_give_its_boxes(provide: Provide) -> None:
    provide(vescale_layout)
    units = SimpleNamespace(dims=(0,), local_units=(1, 0, 3))
    interleaved = SimpleNamespace(dim=1, interleave=2)
    whole = numbered((4, 6))
    with fake_ranks(3, 2):
        mesh = init_device_mesh("cpu", (3,))
        tensor = Ragged(whole[1:].clone(), (4, 6), [box((1, 0), (3, 6))], device_mesh=mesh, placements=(units,))
        held = describe("w", tensor, range(3), 2)
        assert held.spec.layout == Rule(Mesh((3,), range(3)), ("RS(1,1,0,3)",))
        check(held, whole, tensor.local, 2)
        # Columns 2 and 5: blocks of three columns, each of which is cut
        boxes = [box((0, 2), (4, 1)), box((0, 5), (4, 1))]
        tensor = Ragged(whole[:, [2, 5]].clone(), (4, 6), boxes, device_mesh=mesh, placements=(interleaved,))
        held = describe("w", tensor, range(3), 2)
        assert held.spec.layout == Rule(Mesh((3,), range(3)), ("IS(1,2)",))
        check(held, whole, tensor.local, 2)
        # The same, told in the order of the storage
        boxes = [box((row, column), (1, 1)) for row in range(4) for column in (2, 5)]
        tensor = Ragged(whole[:, [2, 5]].clone(), (4, 6), boxes, device_mesh=mesh, placements=(interleaved,))
        held = describe("w", tensor, range(3), 2)
        assert held.spec.layout == Rule(Mesh((3,), range(3)), ("IS(1,2)",))
        check(held, whole, tensor.local, 2)
        # Other boxes than the placements say
        tensor = Ragged(whole[2:].clone(), (4, 6), [box((2, 0), (2, 6))], device_mesh=mesh, placements=(units,))
        held = describe("w", tensor, range(3), 2)
        assert held.spec.layout == Explicit(((2, (Box((2, 0), (2, 6)),)),))
        check(held, whole, tensor.local, 2)
        # Placements that nobody knows
        tensor = Ragged(whole[2:].clone(), (4, 6), [box((2, 0), (2, 6))], device_mesh=mesh, placements=("Q",))
        assert isinstance(describe("w", tensor, range(3), 2).spec.layout, Explicit)


@pytest.mark.parametrize(
    ("local", "boxes", "message"),
    [
        ((5,), [((3, 0), (2, 5))], r"Box\(offset=\(3, 0\), shape=\(2, 5\)\), which does not lie in a tensor of"),
        ((5,), [((-1, 0), (1, 5))], "does not lie"),
        ((5,), [((0,), (5,))], "does not lie"),
        ((5,), [((0, 0), (1, -5))], "does not lie"),
        ((5,), [((0, 0), (2, 5))], "should hold 10 elements .* has 5"),
        ((5,), [], "should hold 0 elements"),
    ],
    ids=str,
)
def test_a_plugin_that_makes_no_sense_is_refused(provide: Provide, local: Any, boxes: Any, message: str) -> None:
    provide(vescale_layout)
    tensor = Ragged(torch.zeros(local), (4, 5), [box(*b) for b in boxes])
    with pytest.raises(LayoutError, match=f"state: .*w.*{message}"):
        describe("w", tensor, (0,), 0)


def test_other_answers_of_a_plugin(provide: Provide) -> None:
    provide(vescale_layout)
    with pytest.raises(LayoutError, match=r"w still awaits a reduction over ranks. Redistribute it"):
        describe("w", ragged(0, 20, partial=True), (0,), 0)
    with pytest.raises(StateError, match=r"its local tensor is a .*Wrapper"):
        describe("w", Ragged(Wrapper(torch.zeros(20)), (4, 5), [box((0, 0), (4, 5))]), (0,), 0)
    with pytest.raises(StateError, match="meta device"):
        describe("w", Ragged(torch.zeros(20, device="meta"), (4, 5), [box((0, 0), (4, 5))]), (0,), 0)
    with pytest.raises(StateError, match="is a sharded tensor"):
        plain("w", ragged(0, 20))
    tensor = ragged(3, 9)
    assert len(pack([tensor, tensor, ragged(3, 9)]).tensors) == 2


def test_a_plugin_is_not_asked_about_tensors_of_torch(provide: Provide) -> None:
    def asked(tensor: torch.Tensor) -> object:
        raise AssertionError(type(tensor))

    provide(asked)
    describe("w", torch.zeros(2), (0,), 0)
    describe("w", torch.nn.Parameter(torch.zeros(2)), (0,), 0)
    with fake_ranks(2, 1):
        tensor = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        describe("w", tensor, range(2), 1)
