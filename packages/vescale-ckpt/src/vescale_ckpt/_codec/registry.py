"""The codecs by name: ours, and those that plugins register."""

from __future__ import annotations

import re
import threading

from .._hooks import register_codecs
from ..errors import FormatError
from .checked import Checked, check_members
from .interface import Codec, require_little_endian
from .planes import Planes
from .zstd import Zstd

__all__ = ["Registry", "codec", "codec_names", "reset"]

_NAME = re.compile(r"[a-z][a-z0-9_.-]{0,15}")  # shared chunks have 16 bytes for the name of theirs
_RESERVED = ("raw", "auto")

_lock = threading.Lock()
_loaded: Registry | None = None


class Registry:
    """Takes codecs under names; see `hookspecs.CodecRegistry`."""

    def __init__(self) -> None:
        self.codecs: dict[str, Codec] = {"zstd": Zstd(), "planes": Planes()}

    def register(self, name: str, codec: Codec) -> None:
        """Add a codec.

        Args:
            name: 1 to 16 of a-z, 0-9, "_", ".", "-", a letter first; not taken, not "raw" or "auto".
            codec: has the members of `Codec`; what it returns is checked from then on.

        Raises:
            ValueError: the name is not allowed or taken.
            TypeError: `codec` lacks a member, or one takes other arguments.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
            raise ValueError(
                f'name = {name!r}: a codec is named by 1 to 16 of a-z, 0-9, "_", ".", "-", a letter first, '
                f"and not {' or '.join(_RESERVED)}"
            )
        if name in self.codecs:
            other = self.codecs[name]
            taken = type(other.codec if isinstance(other, Checked) else other)
            raise ValueError(
                f"name = {name!r}: taken by {taken.__module__}.{taken.__qualname__}; choose another, "
                "or switch one of the two plugins off (VESCALE_PLUGINS_OFF)"
            )
        check_members(name, codec)
        self.codecs[name] = Checked(name, codec)


def codec(name: str) -> Codec:
    """Return the codec of that name.

    Args:
        name: "zstd", "planes", or what a plugin registered. "raw" is the absence of a codec.

    Raises:
        FormatError: no codec is called so here, or this machine is big-endian.

    Example:
        >>> type(codec("planes")).__name__
        'Planes'
    """
    found = _registry().codecs.get(name)
    if found is None:
        raise FormatError(
            f"codec = {name!r}: not known here (there are {', '.join(codec_names())}), so what it encoded cannot be "
            "decoded: install the plugin that brings it, or switch it on (python -m vescale_ckpt plugins lists those "
            "that are there)"
        )
    return found


def codec_names() -> tuple[str, ...]:
    """Return the names of all codecs, sorted."""
    return tuple(sorted(_registry().codecs))


def reset() -> None:
    """Forget what plugins registered; they are asked again at the next use."""
    global _loaded
    with _lock:
        _loaded = None


def _registry() -> Registry:
    global _loaded
    if _loaded is not None:
        return _loaded
    with _lock:
        if _loaded is None:
            require_little_endian()
            registry = Registry()
            register_codecs(registry)
            _loaded = registry
        return _loaded
