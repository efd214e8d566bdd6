"""PATH@STEP and slices."""

from __future__ import annotations

import pytest

from vescale_ckpt._cli.arguments import UsageError, one_step, parse_slice, parse_step, split_path


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
