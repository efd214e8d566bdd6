"""The codec of a plugin, with what it takes and returns checked: a fault of it is named, and never becomes a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._plugins import PluginError
from ..errors import CheckpointError, CorruptionError
from ..protocols import Codec

__all__ = ["Checked", "check_members"]

MEMBERS = {"encode": ("data", "itemsize"), "decode": ("stored", "out", "itemsize")}


def check_members(name: str, codec: Any) -> None:
    """Refuse what cannot be called as a codec is.

    Raises:
        TypeError: a member is absent, or does not take the arguments that it is called with.
    """
    for member, arguments in MEMBERS.items():
        function = getattr(codec, member, None)
        if not callable(function):
            raise TypeError(
                f"codec = {codec!r:.200}, registered as {name!r}: lacks {member} (see vescale_ckpt/protocols.py)"
            )
        if not _takes(function, len(arguments)):
            hint = "; register an object of it, not the class" if isinstance(codec, type) else ""
            raise TypeError(
                f"codec = {codec!r:.200}, registered as {name!r}: {member} is called with {len(arguments)} positional "
                f"arguments ({', '.join(arguments)}), but takes {inspect.signature(function)}{hint} "
                "(see vescale_ckpt/protocols.py)"
            )


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C tell nothing
        return True
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


class Checked:
    """A plugin's codec under the name that it was registered with."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.codec = codec
        """The plugin's."""
        self._said = f"codec {name!r} ({type(codec).__module__}.{type(codec).__qualname__})"

    def encode(self, data: torch.Tensor, itemsize: int) -> list[memoryview] | None:
        """Encode one chunk; see `Codec.encode`.

        Raises:
            PluginError: the codec returned something else than bytes, or nothing at all.
        """
        parts = self.codec.encode(data, itemsize)
        if parts is None:
            return None
        if isinstance(parts, bytes | bytearray | memoryview | str) or not isinstance(parts, Sequence):
            raise self._wrong(f"returned a {type(parts).__name__}")
        views = []
        for part in parts:
            if not isinstance(part, bytes | bytearray | memoryview):
                raise self._wrong(f"returned a {type(parts).__name__} with a {type(part).__name__} in it")
            view = memoryview(part)
            if not view.c_contiguous:
                raise self._wrong("returned a memoryview that is not C-contiguous")
            views.append(view.cast("B") if view.nbytes else memoryview(b""))
        size = sum(view.nbytes for view in views)
        if size == 0:
            raise self._wrong(f"returned 0 bytes for {data.numel()}")
        return views if size <= data.numel() else None

    def decode(self, stored: memoryview, out: torch.Tensor, itemsize: int) -> None:
        """Decode one chunk; see `Codec.decode`.

        Raises:
            CorruptionError: the codec raised something.
            PluginError: it returned something instead of filling `out`.
        """
        try:
            answer: object = self.codec.decode(stored, out, itemsize)  # type: ignore[func-returns-value]
        except (CheckpointError, MemoryError):
            raise
        except Exception as error:
            raise CorruptionError(
                f"{self._said} cannot decode {stored.nbytes} bytes to {out.numel()}: {type(error).__name__}: {error}; "
                "the file is damaged, or was written by another version of the codec"
            ) from error
        if answer is not None:
            raise PluginError(
                f"{self._said}: decode returned a {type(answer).__name__}, but it must fill `out` and return None "
                "(see vescale_ckpt/protocols.py)"
            )

    def _wrong(self, what: str) -> PluginError:
        return PluginError(
            f"{self._said}: encode {what}, but it must return None or a list of memoryviews "
            "(see vescale_ckpt/protocols.py)"
        )
