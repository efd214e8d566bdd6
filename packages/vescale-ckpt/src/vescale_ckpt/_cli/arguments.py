"""What arguments mean: PATH@STEP, slices, and the options that all commands share."""

from __future__ import annotations

import argparse
import re

__all__ = ["UsageError", "add_common", "parse_slice", "parse_step", "split_path"]

_STEP = re.compile(r"latest|all|[0-9]{1,15}", re.ASCII)


class UsageError(Exception):
    """The command line makes no sense; exit status 2."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command."""
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("--debug", action="store_true", help="show where in the program an error was raised")


def parse_step(text: str) -> int | str:
    """Return a step as a number, "latest" or "all".

    Example:
        >>> parse_step("0100"), parse_step("latest")
        (100, 'latest')
    """
    if not _STEP.fullmatch(text):
        raise UsageError(f"step {text!r}: expected a number or 'latest'.")
    return text if text in ("latest", "all") else int(text)


def split_path(text: str) -> tuple[str, int | str | None]:
    """Return path and step of `PATH` or `PATH@STEP`; None where there is no step.

    Example:
        >>> split_path("s3://me@bucket/run@300"), split_path("s3://me@bucket/run")
        (('s3://me@bucket/run', 300), ('s3://me@bucket/run', None))
    """
    path, at, step = text.rpartition("@")
    if at and path and _STEP.fullmatch(step):
        return path, parse_step(step)
    return text, None


def one_step(text: str) -> tuple[str, int | str]:
    """Return path and step of `PATH[@STEP]`, where "all" makes no sense; the latest where none is given."""
    path, step = split_path(text)
    if step == "all":
        raise UsageError(f"{text}: this command looks at one step; give its number, or 'latest'.")
    return path, "latest" if step is None else step


def parse_slice(text: str) -> tuple[int | slice, ...]:
    """Return an index like `0:4,:,3` as what a tensor takes.

    Example:
        >>> parse_slice("0:4,:,3")
        (slice(0, 4, None), slice(None, None, None), 3)
    """
    found: list[int | slice] = []
    for part in text.split(","):
        numbers = part.strip().split(":")
        try:
            values = [int(number) if number.strip() else None for number in numbers]
        except ValueError:
            values = []
        if not 1 <= len(values) <= 3 or (len(values) == 1 and values[0] is None):
            raise UsageError(f"slice {text!r}: {part.strip()!r} is neither a number nor start:stop[:step].")
        if len(values) == 1:
            assert values[0] is not None
            found.append(values[0])
        else:
            found.append(slice(*values))
    return tuple(found)
