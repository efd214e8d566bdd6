"""Typed access to the keys of a JSON object: every value that leaves it has its type and range checked."""

from __future__ import annotations

import base64
import collections
import re
from array import array
from collections.abc import Sequence
from typing import Any

from ..errors import FormatError
from .jsonio import refuse, short
from .limits import DIMS, FORMAT, UINT63

__all__ = ["Fields", "NewerFormatError", "by", "check_format", "columns", "encode", "integers", "shape_of"]

_BY = re.compile(r"vescale-ckpt (\d[0-9A-Za-z.+-]{0,40})", re.ASCII)


class NewerFormatError(FormatError):
    """The file is of a later version of the format."""


def by() -> str:
    """Return what files name as the program that wrote them."""
    from importlib.metadata import version

    return f"vescale-ckpt {version('vescale-ckpt')}"


def check_format(value: Any, at: str) -> None:
    """Raise FormatError unless `value` is an object of a format that this version reads."""
    if not isinstance(value, dict):
        refuse(at, value, "must be an object")
    number = value.get("format")
    if type(number) is not int or number < 1:
        refuse(f"{at}: format", number, f"must be a number from 1 to {FORMAT}")
    text = value.get("by", "")
    if not isinstance(text, str) or len(text) > 100:
        refuse(f"{at}: by", text, "must be a string of at most 100 characters")
    if number > FORMAT:
        match = _BY.fullmatch(text)
        wanted = f"vescale-ckpt>={match[1]}" if match else "vescale-ckpt"
        raise NewerFormatError(
            f"{at}: format {short(number)} is newer than {by()}, which reads formats up to {FORMAT}: "
            f"pip install --upgrade '{wanted}'."
        )


class Fields:
    """The values of one JSON object.

    Example:
        >>> Fields({"step": 3}, "COMMIT", "step").integer("step", 0, 10)
        3
        >>> Fields({"step": True}, "COMMIT", "step").integer("step", 0, 10)
        Traceback (most recent call last):
        vescale_ckpt.errors.FormatError: COMMIT: step: must be an integer from 0 to 10, but is True.
    """

    __slots__ = ("_at", "_values")

    def __init__(self, value: Any, at: str, keys: str) -> None:
        """Take an object that must have exactly `keys`, given as words."""
        if not isinstance(value, dict):
            refuse(at, value, "must be an object")
        wanted = set(keys.split())
        for key in value:
            if key not in wanted:
                raise FormatError(f"{at}: unknown key {short(key)}; the format has {', '.join(sorted(wanted))}.")
        for key in keys.split():
            if key not in value:
                raise FormatError(f"{at}: the key {key!r} is missing.")
        self._at = at
        self._values: dict[str, Any] = value

    def at(self, key: str) -> str:
        """Return the place of a key, for messages."""
        return f"{self._at}: {key}"

    def value(self, key: str) -> Any:
        """Return any JSON value."""
        return self._values[key]

    def integer(self, key: str, low: int = 0, high: int = UINT63) -> int:
        """Return an integer from `low` to `high`."""
        value = self._values[key]
        if type(value) is not int or not low <= value <= high:
            refuse(self.at(key), value, f"must be an integer from {low} to {high}")
        return value

    def number(self, key: str) -> float:
        """Return a number that is not negative."""
        value = self._values[key]
        if type(value) not in (int, float) or not 0 <= value <= 1e300:
            refuse(self.at(key), value, "must be a number of at least 0")
        return float(value)

    def text(self, key: str, form: re.Pattern[str], rule: str) -> str:
        """Return a string of a form."""
        value = self._values[key]
        if not isinstance(value, str) or not form.fullmatch(value):
            refuse(self.at(key), value, f"must be {rule}")
        return value

    def inner(self, key: str, keys: str) -> Fields:
        """Return an object with exactly `keys`."""
        return Fields(self._values[key], self.at(key), keys)

    def items(self, key: str, length: int | None = None) -> list[Any]:
        """Return a list, of `length` if that is given."""
        value = self._values[key]
        if not isinstance(value, list):
            refuse(self.at(key), value, "must be a list")
        if length is not None and len(value) != length:
            refuse(self.at(key), value, f"must be a list of {length}")
        return value

    def ints(self, key: str, low: int = 0, high: int = UINT63, length: int | None = None) -> list[int]:
        """Return a list of integers from `low` to `high`."""
        return integers(self.items(key, length), self.at(key), low, high)

    def strings(self, key: str, longest: int) -> list[str]:
        """Return a list of strings that are all different."""
        values = self.items(key)
        for number, value in enumerate(values):
            if not isinstance(value, str) or len(value) > longest:
                refuse(f"{self.at(key)}[{number}]", value, f"must be a string of at most {longest} characters")
        if len(set(values)) != len(values):
            twice = collections.Counter(values).most_common(1)[0][0]
            raise FormatError(f"{self.at(key)}: {short(twice)} stands twice.")
        return values

    def blob(self, key: str, length: int | None = None) -> bytes:
        """Return bytes that are written as base64, `length` of them if that is given."""
        value = self._values[key]
        try:
            data = base64.b64decode(value, validate=True) if isinstance(value, str) else None
        except ValueError:
            data = None
        if data is None:
            refuse(self.at(key), value, "must be a string in base64")
        if length is not None and len(data) != length:
            refuse(self.at(key), len(data), f"must have {length} bytes")
        return data


def integers(values: Any, at: str, low: int, high: int, length: int | None = None) -> list[int]:
    """Return `values` if it is a list of integers from `low` to `high`, of `length` if that is given."""
    if not isinstance(values, list):
        refuse(at, values, "must be a list of integers")
    if length is not None and len(values) != length:
        refuse(at, values, f"must be a list of {length}")
    # Without a step of Python per value while all is well.
    if values and (set(map(type, values)) != {int} or min(values) < low or max(values) > high):
        for number, value in enumerate(values):
            if type(value) is not int or not low <= value <= high:
                refuse(f"{at}[{number}]", value, f"must be an integer from {low} to {high}")
    return values


def shape_of(values: Any, at: str, most: int) -> tuple[tuple[int, ...], int]:
    """Return a shape and its number of elements, at most `most`."""
    shape = tuple(integers(values, at, 0, UINT63))
    if len(shape) > DIMS:
        refuse(at, values, f"must have at most {DIMS} dims")
    numel = 1
    for size in sorted(shape):  # zeros first, so that a product never overflows on the way to 0
        numel *= size
        if numel > most:
            refuse(at, str(list(shape)), f"must have at most {most} elements")
    return shape, numel


def encode(data: bytes | bytearray | memoryview | array[int]) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode("ascii")


def columns(rows: Sequence[Any], *names: str) -> dict[str, list[Any]]:
    """Return attributes of rows as one list each.

    Example:
        >>> columns([1 + 2j, 3j], "real", "imag")
        {'real': [1.0, 0.0], 'imag': [2.0, 3.0]}
    """
    return {name: [getattr(row, name) for row in rows] for name in names}
