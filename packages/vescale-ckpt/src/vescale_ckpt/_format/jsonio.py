"""JSON that is read strictly and within bounds: size, depth, count of values, no key twice, no NaN.

The size of what is built is known before it is built, so a hostile file can neither fill the memory nor the stack.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from ..errors import FormatError
from .limits import DEPTH, DIGITS, VALUES

__all__ = ["dumps", "loads", "refuse", "short"]

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_LONG_NUMBER = re.compile(rb"(?<![0-9])[0-9]{%d}" % (DIGITS + 1))  # looked for where a number begins only
_BRACKETS = bytes.maketrans(b"[]{}", b"()()")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def short(value: object) -> str:
    """Return a value as text for a message, cut off where it is long."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    text = ascii(value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 120 else text[:100] + "..."


def refuse(at: str, value: object, rule: str) -> NoReturn:
    """Raise FormatError: at this place stands this value, where the format has this rule.

    Example:
        >>> refuse("manifest.json: step", -1, "must be at least 0")
        Traceback (most recent call last):
        vescale_ckpt.errors.FormatError: manifest.json: step: must be at least 0, but is -1.
    """
    raise FormatError(f"{at}: {rule}, but is {short(value)}.")


def dumps(value: Any, at: str) -> bytes:
    """Return a value as compact UTF-8 JSON.

    Args:
        value: None, bool, int, finite float, str, list, and dict with str keys.
        at: name for messages.

    Raises:
        FormatError: the value is not JSON, or more than a reader accepts.

    Example:
        >>> dumps({"a": [1, None]}, "x")
        b'{"a":[1,null]}'
    """
    try:
        data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{at}: cannot be written as JSON: {_reason(error)}.") from None
    _check_bounds(data, at)
    return data


def loads(data: bytes, at: str, limit: int) -> Any:
    """Return the value that `data` stands for.

    Args:
        data: UTF-8 JSON.
        at: name of the file, for messages.
        limit: most bytes that are accepted.

    Raises:
        FormatError: `data` is longer, deeper or has more values than allowed, is not strict JSON, has a key twice in
            one object, or a number that is not finite.

    Example:
        >>> loads(b'{"a": 1, "a": 2}', "manifest.json", 100)
        Traceback (most recent call last):
        vescale_ckpt.errors.FormatError: manifest.json: the key 'a' stands twice in one object.
    """
    if len(data) > limit:
        raise FormatError(f"{at}: {len(data)} bytes; at most {limit} are accepted.")
    _check_bounds(data, at)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise FormatError(f"{at}: the key {short(twice)} stands twice in one object.")
        return found

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise FormatError(f"{at}: the number {short(text)} is too large for a float.")
        return number

    def constant(text: str) -> NoReturn:
        raise FormatError(f"{at}: {text} is not JSON.")

    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=unique, parse_float=finite, parse_constant=constant)
        if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair: a str that cannot be printed or encoded
            json.dumps(value, ensure_ascii=False).encode()
    except FormatError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{at}: not valid JSON: {_reason(error)}.") from None
    return value


def _check_bounds(data: bytes, at: str) -> None:
    # What is left without strings shows structure and numbers only.
    bare = _STRING.sub(b"", data)
    brackets = bare.translate(_BRACKETS, _OTHERS)
    values = bare.count(b",") + bare.count(b":") + len(brackets) // 2
    if values > VALUES:
        raise FormatError(f"{at}: about {values} values; at most {VALUES} are accepted.")
    if _LONG_NUMBER.search(bare):
        raise FormatError(f"{at}: a number of more than {DIGITS} digits.")
    for _ in range(DEPTH):
        if not brackets:
            return
        shorter = brackets.replace(b"()", b"")  # takes off the innermost level
        if len(shorter) == len(brackets):
            raise FormatError(f"{at}: not valid JSON: brackets that do not match.")
        brackets = shorter
    if brackets:
        raise FormatError(f"{at}: nested deeper than {DEPTH} levels.")


def _reason(error: BaseException) -> str:
    return str(error)[:200].rstrip(".") or type(error).__name__
