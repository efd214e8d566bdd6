"""PATH@STEP and slices."""

from __future__ import annotations

from pathlib import Path

import pytest

from vescale_ckpt import CheckpointError, MissingStepError
from vescale_ckpt._cli.arguments import (
    UsageError,
    chosen,
    one_step,
    opened,
    parse_slice,
    parse_step,
    split_path,
    store_at,
)
from vescale_ckpt.protocols import Storage


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run", ("run", None)),
        ("run@5", ("run", 5)),
        ("run@latest", ("run", "latest")),
        ("run@all", ("run", "all")),
        ("run@old", ("run@old", None)),
        ("a@1@2", ("a@1", 2)),
        ("@5", ("@5", None)),
        ("s3://key:secret@host/x", ("s3://key:secret@host/x", None)),
        ("run@-1", ("run@-1", None)),
    ],
)
def test_paths(text: str, parts: tuple[str, object]) -> None:
    assert split_path(text) == parts


def test_one_step() -> None:
    assert one_step("run") == ("run", "latest")
    with pytest.raises(UsageError, match="one step"):
        one_step("run@all")


@pytest.mark.parametrize("text", ["", "-1", "1.5", "last", "\u0661", "9" * 16])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="expected a number"):
        parse_step(text)


def test_slices() -> None:
    assert parse_slice(" 1 : 2 ,:, -3,::2") == (slice(1, 2), slice(None), -3, slice(None, None, 2))
    for text in ("", "x", "1,", "1:2:3:4", "__import__('os')"):
        with pytest.raises(UsageError, match="slice"):
            parse_slice(text)


def test_a_step_stands_after_the_path_or_beside_it() -> None:
    assert chosen("run", None) == "run"
    assert chosen("run", "latest") == chosen("run@latest", "latest") == "run@latest"
    assert chosen("a@1@2", "2") == "a@1@2"
    with pytest.raises(UsageError, match=r"run@1 2: two steps; give one"):
        chosen("run@1", "2")
    with pytest.raises(UsageError, match="expected a number"):
        chosen("run", "two")


def test_places_that_nobody_can_open_are_named_once(tmp_path: Path) -> None:
    for place in ("s4://x/y", "a\0b"):
        with pytest.raises(CheckpointError) as caught:
            opened(place)
        assert str(caught.value).count(repr(place)) == 1
    assert isinstance(opened(str(tmp_path / "new")), Storage)
    with pytest.raises(MissingStepError, match=r"new: no checkpoints here: the folder does not exist\.$"):
        store_at(str(tmp_path / "new"))
    with pytest.raises(MissingStepError, match=r"If 'old' is to be a step of .*run: a step is a number"):
        store_at(str(tmp_path / "run@old"))
