"""What other packages learn of a DTensor."""

from __future__ import annotations

import pytest
import torch

from vescale_dtensor import DTensor, distribute_tensor
from vescale_dtensor._layout import from_layout, gradient_reduction, layout_of
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

RANKS = pytest.mark.ranks(4, pool=True)


@RANKS
@pytest.mark.parametrize("codes", ["S0 S1", "S0 I", "I S1", "S0 S0", "I I", "P S0", "R S1"])
def test_boxes_cover_the_whole(codes: str) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    x = torch.arange(35.0).view(5, 7)
    d = distribute_tensor(x, mesh, placements(codes))
    layout = layout_of(d)
    assert layout is not None
    assert layout.global_shape == (5, 7)
    assert layout.global_stride == (7, 1)
    (box,) = layout.boxes
    window = x[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
    assert layout.partial == ("P" in codes)
    if "P" not in codes:
        assert torch.equal(layout.local, window)
    assert layout.local.data_ptr() == d.to_local().data_ptr()
    assert type(layout.local) is torch.Tensor
    coordinate = mesh.get_coordinate()
    axes = [a for a, c in enumerate(codes.split()) if c in "IR"]
    expected = (0, 1)
    for a in axes:
        expected = (expected[0] * 2 + coordinate[a], expected[1] * 2)
    assert layout.replicas == expected
    made = from_layout(d, layout.boxes)
    assert isinstance(made, DTensor)
    assert (made.shape, made.dtype, made.local_offset) == (d.shape, d.dtype, box.offset)
    assert made.placements == tuple(placements(codes.replace("P", "I")))


@RANKS
def test_other_boxes_than_those_of_the_template() -> None:
    line, square = cached_mesh(4), cached_mesh(2, 2, names=("dp", "tp"))
    like = distribute_tensor(torch.zeros(4, 8), line, placements("I"))
    target = distribute_tensor(torch.zeros(4, 8), line, placements("S1"))
    made = from_layout(like, layout_of(target).boxes)  # type: ignore[union-attr]
    assert made.placements == target.placements  # type: ignore[union-attr]
    box = layout_of(like).boxes[0]  # type: ignore[union-attr]
    with pytest.raises(UnsupportedOperationError, match="fit no placements"):
        from_layout(like, [box._replace(offset=(1, 1), shape=(1, 1))])
    like = distribute_tensor(torch.zeros(4, 8), square, placements("I I"))
    quarter = layout_of(distribute_tensor(torch.zeros(4, 8), square, placements("S0 S1")))
    if len(set(square.get_coordinate())) == 1:  # on the diagonal, (S1, S0) gives the same box
        with pytest.raises(UnsupportedOperationError, match="fit several placements; pass a `like`"):
            from_layout(like, quarter.boxes)  # type: ignore[union-attr]
    assert from_layout(torch.zeros(3), []) is None
    assert layout_of(torch.zeros(3)) is None


@RANKS
def test_axes_that_a_gradient_is_pending_on() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    for codes, axes in {"R S0": (0,), "R R": (0, 1), "I S0": (), "S0 R": (1,)}.items():
        found = gradient_reduction(distribute_tensor(torch.zeros(4, 6), mesh, placements(codes)))
        assert found == (mesh, axes)
    assert gradient_reduction(torch.zeros(3)) is None
    assert gradient_reduction(distribute_tensor(torch.zeros(4), cached_mesh(4, 1), placements("I R")))[1] == ()  # type: ignore[index]
