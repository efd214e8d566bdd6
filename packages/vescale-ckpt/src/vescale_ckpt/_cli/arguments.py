"""What arguments mean: places, PATH@STEP or PATH STEP, slices, and the options that all commands share."""

from __future__ import annotations

import argparse
import os
import re

from .._storage import Storage, open_storage
from .._storage.local import LocalStorage
from ..errors import CheckpointError, MissingStepError

__all__ = [
    "UsageError", "add_common", "add_path", "chosen", "one_step", "opened", "parse_slice", "parse_step", "split_path",
    "store_at",
]  # fmt: skip

PATH_HELP = "folder or URL, with @STEP for another than the latest"

_STEP = re.compile(r"latest|all|[0-9]{1,15}", re.ASCII)


class UsageError(Exception):
    """The command line makes no sense; exit status 2."""

    def __init__(self, message: str, parser: argparse.ArgumentParser | None = None) -> None:
        super().__init__(message)
        self.parser = parser
        """Whose usage is to be shown; None: that of the command that runs."""


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options of every command."""
    parser.set_defaults(parser=parser)
    parser.add_argument("--json", action="store_true", help='print JSON for programs; {"error": text} for an error')
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


def add_path(parser: argparse.ArgumentParser, path_help: str = PATH_HELP) -> None:
    """Add the arguments that name a step: PATH@STEP, or PATH STEP."""
    parser.add_argument("path", help=path_help)
    parser.add_argument("step", nargs="?", help="number of the step, in place of @STEP")


def chosen(path: str, step: str | None) -> str:
    """Return `PATH@STEP` for a path and a step that may stand beside it.

    Example:
        >>> chosen("run", "900"), chosen("run@900", None), chosen("run@900", "900")
        ('run@900', 'run@900', 'run@900')
    """
    if step is None:
        return path
    first, there = split_path(path)
    if there is not None and there != parse_step(step):
        raise UsageError(f"{path} {step}: two steps; give one.")
    return f"{first}@{parse_step(step)}"


def opened(path: str) -> Storage:
    """Open a place, which need not be there.

    Raises:
        CheckpointError: nobody knows such a URL, or its client is not installed.
    """
    try:
        return open_storage(path)
    except CheckpointError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise CheckpointError(str(error) if repr(path) in str(error) else f"{path!r}: {error}") from error


def store_at(path: str) -> Storage:
    """Open a place that holds something.

    Raises:
        MissingStepError: the folder is not there.
        CheckpointError: nobody knows such a URL, or its client is not installed.
    """
    storage = opened(path)
    if isinstance(storage, LocalStorage) and not os.path.isdir(storage.root):
        before, at, step = path.rpartition("@")
        hint = f" If {step!r} is to be a step of {before}: a step is a number, or 'latest'." if at and before else ""
        raise MissingStepError(f"{path}: no checkpoints here: the folder does not exist.{hint}")
    return storage


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
