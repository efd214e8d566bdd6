"""`Part` itself: what it refuses, the views it gives, and what it is as a key."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from vescale_rng._layout import Box, Part, part_of_boxes, part_of_flat
from vescale_rng.errors import LayoutError

PAIR = (Box((0, 0), (2, 2)), Box((2, 2), (1, 2)))


@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 4), (0, 3), (3, 0)], ids=str)
def test_the_whole(shape: tuple[int, ...]) -> None:
    part = Part.whole(shape)
    whole = torch.arange(part.numel).view(shape)
    assert part.global_stride == whole.stride()
    assert part.numel == whole.numel()
    assert part.local_shape == shape
    assert part.is_whole
    views = part.views(whole)
    assert len(views) == (1 if part.numel else 0)
    assert all(torch.equal(view, whole) for view in views)


def test_the_whole_of_another_stride() -> None:
    whole = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    part = Part.whole(whole.shape, whole.stride())
    assert part.global_stride == (60, 1, 15, 3)
    assert part != Part.whole(whole.shape)
    assert Part.whole(np.array([2, 3])) == Part.whole([2, 3])


def test_a_part_is_not_whole_if_it_lacks_or_permutes_something() -> None:
    assert not part_of_boxes((2, 2), [Box((0, 0), (1, 2))]).is_whole
    swapped = (Box((1,), (1,)), Box((0,), (1,)))
    assert not Part((2,), (1,), (2,), swapped, None).is_whole


def test_views_share_memory_with_a_local_tensor_of_any_strides() -> None:
    local = torch.zeros(2, 3).t()
    part = Part((5, 4), (4, 1), (3, 2), PAIR, (((0, 2), (0, 2)), ((2, 3), (0, 2))))
    first, second = part.views(local)
    first.fill_(1)
    second.copy_(torch.tensor([[2, 3]]))
    assert local.tolist() == [[1, 1], [1, 1], [2, 3]]


@pytest.mark.parametrize("shape", [(6,), (2, 3), (3, 1, 2)], ids=str)
def test_boxes_one_after_the_other(shape: tuple[int, ...]) -> None:
    local = torch.arange(6).view(shape)
    first, second = Part((3, 4), (4, 1), (6,), PAIR, None).views(local)
    assert first.tolist() == [[0, 1], [2, 3]]
    assert second.tolist() == [[4, 5]]
    second.fill_(9)
    assert local.flatten().tolist() == [0, 1, 2, 3, 9, 9]


def test_boxes_one_after_the_other_in_a_strided_line() -> None:
    line = torch.zeros(12)
    first, _ = Part((3, 4), (4, 1), (6,), PAIR, None).views(line[::2])
    first.fill_(1)
    assert line.nonzero().flatten().tolist() == [0, 2, 4, 6]


def test_a_local_tensor_that_does_not_fit() -> None:
    part = Part((3, 4), (4, 1), (6,), PAIR, None)
    with pytest.raises(LayoutError, match=r"local shape \(6,\), but the tensor given has shape \(5,\)"):
        part.views(torch.zeros(5))
    with pytest.raises(LayoutError, match=r"shape \(2, 3\) and strides \(1, 2\). Give `local.contiguous\(\)`"):
        part.views(torch.zeros(3, 2).t())
    with pytest.raises(LayoutError, match=r"local shape \(2, 2\), but the tensor given has shape \(4,\)"):
        Part.whole((2, 2)).views(torch.zeros(4))


def part(**changes: object) -> Part:
    fields: dict[str, object] = {
        "global_shape": (4, 4),
        "global_stride": (4, 1),
        "local_shape": (2, 4),
        "boxes": (Box((0, 0), (2, 2)), Box((2, 2), (2, 2))),
        "windows": (((0, 2), (0, 2)), ((0, 2), (2, 4))),
    }
    return Part(**(fields | changes))  # type: ignore[arg-type]


def test_the_fields_that_the_next_test_breaks_are_right() -> None:
    assert part().local_shape == (2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_shape": (4, -4)}, r"global_shape: expected .* not negative, but got \(4, -4\)"),
        ({"global_shape": [4, 4]}, r"global_shape: expected a tuple"),
        ({"global_shape": (4, 4.0)}, r"global_shape: expected a tuple of integers"),
        ({"global_shape": (4, True)}, r"global_shape: expected a tuple of integers"),
        ({"global_stride": (1,)}, r"global_stride: .* has 1 numbers"),
        ({"local_shape": (2, 5)}, r"hold 8 elements, but a local tensor of shape \(2, 5\) has 10"),
        ({"boxes": (Box((0, 0), (2, 2)), Box((3, 2), (2, 2)))}, r"offset=\(3, 2\).* is not inside"),
        ({"boxes": (Box((0, 0), (2, 2)), Box((1, 1), (2, 2)))}, r"\(\(0, 2\), \(0, 2\)\) and .* overlap"),
        ({"boxes": (Box((0,), (4,)), Box((2, 2), (2, 2)))}, r"needs 2 numbers each"),
        ({"windows": (((0, 2), (0, 2)),)}, r"2 boxes need as many windows, but got 1"),
        ({"windows": (((0, 2), (0, 2)), ((0, 2), (2, 3)))}, r"has not the shape of its box"),
        ({"windows": (((0, 2), (0, 2)), ((0, 2), (3, 5)))}, r"is not inside the local tensor"),
        ({"windows": (((0, 2), (0, 2)), ((0, 2), (1, 3)))}, r"windows: .* overlap"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        part(**changes)


@pytest.mark.parametrize(
    ("offset", "shape", "name"),
    [((0,), (-1,), "shape"), ((2, -1), (2, 2), "offset"), ((2, 1), (2, None), "shape"), ([0], (1,), "offset")],
)
def test_boxes_of_other_numbers_are_refused(offset: Any, shape: Any, name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name}: expected a tuple of integers that are not negative"):
        Box(offset, shape)


@pytest.mark.parametrize("shape", [(2**63,), (2**70, 0), (0, 2**62, 2**62), (2**40, 2**40)], ids=str)
def test_sizes_beyond_those_of_torch(shape: tuple[int, ...]) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        torch.empty(shape, device="meta")
    with pytest.raises(LayoutError, match=r"shape: .* larger than any tensor of torch"):
        Part.whole(shape)


@pytest.mark.parametrize("shape", [(2**62,), (2**63 - 1,), (2**40, 0, 2**20)], ids=str)
def test_the_largest_sizes_of_torch(shape: tuple[int, ...]) -> None:
    assert Part.whole(shape).global_shape == shape


@pytest.mark.parametrize("shape", [(-1,), (True,), (1.5,), "ab", 3, (None,)], ids=str)
def test_sizes_that_are_none(shape: object) -> None:
    with pytest.raises(LayoutError, match="shape: expected"):
        Part.whole(shape)  # type: ignore[arg-type]


def test_overlaps_are_found_where_no_dim_parts_the_boxes() -> None:
    wheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1))]
    assert len(part_of_boxes((3, 3), wheel).boxes) == 4
    with pytest.raises(LayoutError, match="overlap"):
        part_of_boxes((3, 3), [*wheel, Box((1, 1), (1, 2))])


def test_as_a_key() -> None:
    one, two = part(), part()
    assert one is not two
    assert {one: 1}[two] == 1
    for twin in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert twin == one
        assert hash(twin) == hash(one)
    assert part(global_stride=(1, 4)) != one
    assert "_hash" not in repr(one)


@pytest.mark.slow
def test_a_pickled_part_has_the_hash_of_other_processes() -> None:
    program = "from vescale_rng._layout import part_of_flat; print(hash(part_of_flat((3, 4), 2, 9)))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(other.stdout) == hash(part_of_flat((3, 4), 2, 9))
