"""What the pieces of all writers leave out, write twice or should not have: told for every tensor and shard."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import Index, Manifest, PieceRecord, TensorRecord, WriterRecord, check_cover
from vescale_ckpt._geometry import Assignment, Box, Explicit, Geometry, Layout, Mesh, Piece, Rule


def manifest_of(world: int, layouts: list[Layout], *tensors: TensorRecord) -> Manifest:
    writers = (WriterRecord("0" * 64, 1, 0, 0),) * world
    return Manifest("0" * 8, 1, 0.0, world, tuple(layouts), tensors, None, None, writers)


def indexes_of(manifest: Manifest) -> list[Index]:
    """Return the indexes that the assignment gives, without chunks, which do not matter here."""
    geometry = [Geometry(t.shape, t.itemsize, manifest.layouts[t.layout]) for t in manifest.tensors]
    assignment = Assignment(geometry)
    return [
        Index(rank, pieces=[PieceRecord(number, piece, 0, 1) for number, piece in assignment.pieces(rank)])
        for rank in range(manifest.world)
    ]


LAYOUTS = [
    ("R", "R"),
    ("R", "S(0)"),
    ("S(1)", "R"),
    ("S(0)", "S(1)"),
    ("S(1)", "S(1)"),
    ("SS(0,2)", "S(0)"),
    ("IS(1,3)", "R"),
    ("R", "RS(1,1,2,3,0)"),
    ("S(1)", "RS(1,5,1,0,0)"),
]


@pytest.mark.parametrize("placements", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(24, 12), (6, 3), (600, 120), (0, 3)], ids=str)
def test_what_is_assigned_covers(placements: tuple[str, str], shape: tuple[int, int]) -> None:
    layout = Rule(Mesh((2, 4), range(8)), placements)
    manifest = manifest_of(8, [layout], TensorRecord("w", "float32", shape, 0), TensorRecord("v", "uint8", shape, 0))
    assert check_cover(manifest, indexes_of(manifest)) == []


@given(st.integers(0, 10**6), st.sampled_from(LAYOUTS))
def test_every_change_of_a_piece_is_found(seed: int, placements: tuple[str, str]) -> None:
    rng = random.Random(seed)
    layout = Rule(Mesh((2, 4), range(8)), placements)
    manifest = manifest_of(8, [layout], TensorRecord("w", "float32", (600, 120), 0))
    indexes = indexes_of(manifest)
    index = rng.choice([index for index in indexes if index.pieces])
    at = rng.randrange(len(index.pieces))
    old = index.pieces[at]
    change = rng.choice(["drop", "twice", "shorter", "other writer"])
    if change == "drop":
        del index.pieces[at]
    elif change == "twice":
        index.pieces.append(old)
    elif change == "shorter":
        index.pieces[at] = PieceRecord(0, Piece(old.piece.box, old.piece.start + 1, old.piece.stop), 0, 1)
    else:
        others = [i for i in indexes if i.writer not in layout.holders((600, 120), index.writer)]
        if not others:
            return
        rng.choice(others).pieces.append(index.pieces.pop(at))
    problems = check_cover(manifest, indexes)
    assert problems
    # An oracle that counts how often each element is written.
    count = torch.zeros(600, 120)
    for index in indexes:
        for record in index.pieces:
            for box in record.piece.boxes():
                count[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))] += 1
    assert bool((count == 1).all()) == (change == "other writer")
    assert any("missing" in text for text in problems) == (change != "twice")


def test_problems_name_tensor_elements_and_writers() -> None:
    layout = Rule(Mesh((2,), range(2)), ("S(0)",))
    manifest = manifest_of(2, [layout], TensorRecord("w", "float32", (4, 5), 0))

    def problems(*pieces: tuple[int, Piece]) -> list[str]:
        return check_cover(
            manifest,
            [Index(rank, pieces=[PieceRecord(0, p, 0, 1) for r, p in pieces if r == rank]) for rank in range(2)],
        )

    whole = Box((0, 0), (4, 5))
    assert problems((0, Piece(whole, 0, 10)), (1, Piece(Box((2, 0), (2, 5)), 0, 10))) == []
    assert problems((0, Piece(whole, 0, 10)), (1, Piece(whole, 12, 20))) == [
        "tensor 'w': elements 10:12 of the box at (0, 0) of shape (4, 5) missing; held by writers [1]."
    ]
    assert problems((0, Piece(whole, 0, 11)), (1, Piece(whole, 10, 20))) == [
        "tensor 'w': elements 10:11 of the box at (0, 0) of shape (4, 5) written by writers that do not hold them [0]."
    ]
    assert problems((0, Piece(whole, 0, 6)), (0, Piece(whole, 4, 10)), (1, Piece(whole, 10, 20))) == [
        "tensor 'w': elements 4:6 of the box at (0, 0) of shape (4, 5) written twice, by writers 0 and 0."
    ]


def test_small_tensors_are_whole_in_one_index() -> None:
    layout = Rule(Mesh((2,), range(2)), ("R",))
    manifest = manifest_of(2, [layout], TensorRecord("n", "int64", (), 0))
    data = bytes(8)
    assert check_cover(manifest, [Index(0, inline={0: data}), Index(1)]) == []
    assert check_cover(manifest, [Index(0, inline={0: data}), Index(1, inline={0: data})]) == [
        "tensor 'n': stored whole in an index and once more (writers [0, 1])."
    ]
    (missing,) = check_cover(manifest, [Index(0), Index(1)])
    assert "elements 0:1 of the box at () of shape () missing; held by writers [0, 1]" in missing


def test_writers_without_an_index_or_with_two() -> None:
    manifest = manifest_of(3, [Rule(Mesh((3,), range(3)), ("R",))])
    assert check_cover(manifest, [Index(1), Index(1)]) == [
        "writer 1: two indexes.",
        "2 of 3 writers have no index, first [0, 2].",
    ]


def test_local_tensors_are_whole() -> None:
    manifest = manifest_of(1, [Rule(Mesh((1,), range(1)), ("R",))])
    local = [TensorRecord("rng", "uint8", (5000,), -1), TensorRecord("none", "uint8", (0,), -1)]
    whole = [PieceRecord(0, Piece(Box((0,), (5000,)), 0, 5000), 0, 1)]
    assert check_cover(manifest, [Index(0, pieces=whole, local_tensors=local)]) == []
    (problem,) = check_cover(manifest, [Index(0, local_tensors=local)])
    assert "tensor 'rng': elements 0:5000" in problem


def grid(*cuts: tuple[int, ...]) -> list[Box]:
    """Return the boxes between cuts of two dims."""
    rows, columns = ([*zip((0, *c), c, strict=False)] for c in cuts)
    return [Box((a, c), (b - a, d - c)) for a, b in rows for c, d in columns]


def test_listed_boxes_that_leave_a_hole_are_found() -> None:
    boxes = grid((2, 5, 9), (3, 7))

    def problems(boxes: list[Box]) -> list[str]:
        layout = Explicit(tuple((rank, (box,)) for rank, box in enumerate(boxes)))
        manifest = manifest_of(len(boxes), [layout], TensorRecord("w", "float32", (9, 7), 0))
        return check_cover(manifest, indexes_of(manifest))

    assert problems(boxes) == []
    random.Random(0).shuffle(boxes)
    assert problems(boxes) == []
    for missing in boxes:
        (problem,) = problems([box for box in boxes if box != missing])
        assert problem == f"tensor 'w': no rank holds the element at {missing.offset} of shape (9, 7)."


@given(st.lists(st.tuples(*[st.integers(0, 5), st.integers(1, 6)] * 2), max_size=8))
def test_holes_are_those_of_a_mask(rows: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((a, c), (min(b, 6 - a), min(d, 6 - c))) for a, b, c, d in rows]
    mask = torch.zeros(6, 6)
    for box in boxes:
        mask[box.slices(Box.whole((6, 6)))] = 1
    layout = Explicit(tuple((rank, (box,)) for rank, box in enumerate(boxes)))
    manifest = manifest_of(max(1, len(boxes)), [layout], TensorRecord("w", "float32", (6, 6), 0))
    found = [text for text in check_cover(manifest, indexes_of(manifest)) if "no rank holds" in text]
    assert bool(found) == bool((mask == 0).any())
    if found:
        at = tuple(map(int, found[0].split("at (")[1].split(")")[0].split(",")))
        assert mask[at] == 0
