"""Layouts as JSON: rules and listed boxes come back equal, and grids of ranks cost nothing."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format.layouts import box_count, layouts_from_json, layouts_to_json
from vescale_ckpt._geometry import Box, Explicit, Layout, Mesh, Rule
from vescale_ckpt.errors import FormatError

WORLD = 64


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.integers(1, 4), max_size=3).filter(lambda s: math.prod(s) <= WORLD))
    count = math.prod(shape)
    ranks = draw(st.permutations(range(count)) | st.just(range(count)))
    return Mesh(tuple(shape), tuple(ranks))


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    mesh = draw(meshes())
    texts = st.sampled_from(["R", "S(0)", "S(1)", "SS(0,2)", "IS(1,3)"])
    return Rule(mesh, tuple(draw(texts) for _ in mesh.shape))


@st.composite
def listed(draw: st.DrawFn) -> Explicit:
    ndim = draw(st.integers(0, 3))
    sizes = st.tuples(*[st.integers(0, 2**40)] * ndim)
    boxes = st.lists(st.builds(Box, sizes, sizes), max_size=3 if ndim else 1).map(tuple)
    ranks = draw(st.lists(st.integers(0, WORLD - 1), unique=True, max_size=4))
    return Explicit(tuple((rank, draw(boxes)) for rank in ranks))


@given(st.lists(rules() | listed(), max_size=5))
def test_layouts_round_trip(layouts: list[Layout]) -> None:
    written = json.loads(json.dumps(layouts_to_json(layouts)))
    assert layouts_from_json(*written, WORLD, "x") == tuple(layouts)


def test_grids_are_written_as_strides_whatever_the_order_of_their_axes() -> None:
    transposed = Mesh((4, 2), torch.arange(8).reshape(2, 4).T.flatten().tolist())
    part = Mesh((2, 2), torch.arange(64).reshape(4, 4, 4)[1, ::2, 1::2].flatten().tolist())
    back = Mesh((3,), (5, 3, 1))
    odd = Mesh((3,), (0, 1, 5))
    written, _ = layouts_to_json([Rule(mesh, ("R",) * len(mesh.shape)) for mesh in (transposed, part, back, odd)])
    assert written == [
        {"shape": [4, 2], "start": 0, "strides": [1, 4]},
        {"shape": [2, 2], "start": 17, "strides": [8, 2]},
        {"shape": [3], "start": 5, "strides": [-2]},
        {"shape": [3], "ranks": [0, 1, 5]},
    ]


def test_equal_meshes_are_written_once() -> None:
    mesh = Mesh((2,), range(2))
    written, layouts = layouts_to_json([Rule(mesh, ("R",)), Rule(Mesh((2,), (0, 1)), ("S(0)",))])
    assert len(written) == 1
    assert [layout["mesh"] for layout in layouts] == [0, 0]


def test_a_large_grid_stays_a_range() -> None:
    (layout,) = layouts_from_json(
        [{"shape": [100, 1000, 1000], "start": 0, "strides": [1000000, 1000, 1]}],
        [{"mesh": 0, "placements": ["R", "R", "S(0)"]}],
        10**8,
        "x",
    )
    assert isinstance(layout, Rule)
    assert layout.mesh.ranks == range(10**8)


MESH = {"shape": [2, 2], "start": 0, "strides": [2, 1]}
BOXES = {"ndim": 1, "ranks": [0, 1], "counts": [1, 1], "boxes": [0, 4, 4, 4]}
REFUSED = {
    "mesh is a list": ([[]], [], r"x: meshes\[0\]: must be an object"),
    "mesh too large": ([{**MESH, "shape": [9, 8]}], [], r"meshes\[0\]: shape: must hold at most 64"),
    "mesh of many axes": ([{**MESH, "shape": [1] * 65, "strides": [0] * 65}], [], "in 64 axes"),
    "empty axis": ([{**MESH, "shape": [0, 2]}], [], r"shape\[0\]: must be an integer from 1"),
    "rank too large": ([{**MESH, "strides": [62, 2]}], [], "strides: must lead to ranks from 0 to 63"),
    "rank below 0": ([{**MESH, "strides": [-1, 0]}], [], "strides: must lead to ranks from 0"),
    "rank twice": ([{**MESH, "strides": [1, 1]}], [], "a rank stands twice"),
    "all ranks the same": ([{**MESH, "strides": [0, 0]}], [], "a rank stands twice"),
    "stride is huge": ([{**MESH, "strides": [2**70, 1]}], [], r"strides\[0\]: must be an integer"),
    "ranks missing": ([{"shape": [3], "ranks": [0, 1]}], [], "ranks: must be a list of 3"),
    "listed rank twice": ([{"shape": [3], "ranks": [0, 1, 0]}], [], "a rank stands twice"),
    "listed rank too large": ([{"shape": [1], "ranks": [64]}], [], r"ranks\[0\]: must be an integer from 0 to 63"),
    "bool as rank": ([{"shape": [1], "ranks": [False]}], [], r"ranks\[0\]: must be an integer"),
    "both forms": ([{**MESH, "ranks": [0, 1, 2, 3]}], [], "unknown key"),
    "mesh number": ([MESH], [{"mesh": 1, "placements": []}], r"layouts\[0\]: mesh: must be an integer from 0 to 0"),
    "no mesh": ([], [{"mesh": 0, "placements": []}], r"layouts\[0\]: mesh"),
    "too few placements": ([MESH], [{"mesh": 0, "placements": ["R"]}], "placements: must be a list of 2"),
    "unknown placement": ([MESH], [{"mesh": 0, "placements": ["R", "Q(0)"]}], "none of R, S"),
    "code as placement": ([MESH], [{"mesh": 0, "placements": ["R", "__import__('os')"]}], "none of R, S"),
    "number as placement": ([MESH], [{"mesh": 0, "placements": ["R", 0]}], r"placements\[1\]: must be a string"),
    "dims": ([], [{**BOXES, "ndim": 65}], "ndim: must be an integer from 0 to 64"),
    "too few numbers": ([], [{**BOXES, "boxes": [0, 4]}], "boxes: must be a list of 4"),
    "count is huge": ([], [{**BOXES, "counts": [10**12, 1]}], r"counts\[0\]: must be an integer"),
    "count of no dims": ([], [{"ndim": 0, "ranks": [0], "counts": [10**12], "boxes": []}], r"counts\[0\]"),
    "owner twice": ([], [{**BOXES, "ranks": [1, 1]}], "ranks: must name each rank once"),
    "owner too large": ([], [{**BOXES, "ranks": [0, 64]}], r"ranks\[1\]: must be an integer from 0 to 63"),
    "box ends too late": ([], [{**BOXES, "boxes": [0, 4, 2**63 - 1, 4]}], "boxes: must end below"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_layouts_are_refused(name: str) -> None:
    meshes, layouts, message = REFUSED[name]
    with pytest.raises(FormatError, match=message):
        layouts_from_json(meshes, layouts, WORLD, "x")


def test_listed_ranks_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    from vescale_ckpt._format import layouts

    monkeypatch.setattr(layouts, "LISTED_RANKS", 4)
    odd = {"shape": [2, 2, 2], "start": 0, "strides": [1, 2, 4]}
    assert layouts_from_json([odd] * 8, [], 8, "x") == ()  # 64 for each writer
    with pytest.raises(FormatError, match="list more than"):
        layouts_from_json([odd] * 65, [], 8, "x")


@given(rules(), st.tuples(st.integers(0, 30), st.integers(0, 10).map(lambda n: 3 * n)))
def test_the_bound_of_boxes_holds(rule: Rule, shape: tuple[int, int]) -> None:
    bound = box_count(rule, shape)
    for rank in rule.mesh.ranks:
        try:
            boxes = rule.boxes(shape, rank)
        except ValueError:  # a dim that is not so many equal blocks
            continue
        assert len(boxes) <= bound


def test_the_bound_of_boxes_holds_for_torn_ragged_rows() -> None:
    rule = Rule(Mesh((2, 2), range(4)), ("SS(2,3)", "RS(2,1,2)"))
    shape = (3, 4, 12)
    assert max(len(rule.boxes(shape, rank)) for rank in range(4)) <= box_count(rule, shape)
