"""The error for a value of a class that cannot be saved: what it is, and what to do with it."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, Final

from ..errors import StateError
from .names import Path, spell

__all__ = ["refusal"]

_HINTS: Final = (
    ("Generator", "save generator.get_state()"),
    ("deque", "convert it with list(...)"),
    ("bytearray", "convert it with bytes(...)"),
    ("memoryview", "convert it with bytes(...)"),
    ("range", "convert it with list(...)"),
    ("datetime", "save its isoformat()"),
    ("timedelta", "save its total_seconds()"),
)


def refusal(value: Any, path: Path) -> StateError:
    """Return the error that says why a value cannot be saved, and what to do."""
    kind = type(value)
    hint = next((text for name, text in _HINTS if kind.__name__ == name), None)
    if hint is None and isinstance(value, tuple):
        hint = "a named tuple is saved as tuple(...) only"
    if hint is None and isinstance(value, Enum):
        hint = "take its .value or .name"
    if hint is None and isinstance(value, PurePath):
        hint = "convert it with str(...)"
    if hint is None and is_dataclass(value) and not isinstance(value, type):
        hint = "convert it with dataclasses.asdict(...)"
    if hint is None and isinstance(value, (dict, list, set)):
        base = next(base for base in (dict, list, set) if isinstance(value, base))
        hint = f"a subclass is not saved; convert it with {base.__name__}(...)"
    if hint is None and isinstance(value, (int, float, str)):
        plain = next(base for base in (int, float, str) if isinstance(value, base))
        hint = f"a subclass is not saved; convert it with {plain.__name__}(...)"
    if hint is None:
        hint = "give it state_dict and load_state_dict, or save the numbers, strings and tensors that make it up"
    return StateError(
        f"state: {spell(path)} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved: nothing is ever "
        f"pickled. To save it, {hint}."
    )
