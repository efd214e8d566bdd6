"""What a caller may choose about a save, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import _codec

__all__ = ["SaveOptions"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "dedup": ("position", "content", None),
    "layout": ("packed", "plain"),
    "differing": ("error", "first"),
}


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a state is to be written."""

    compress: str | None = None
    """None, "auto" (where a sample says that it saves bytes), or the name of a codec."""
    dedup: str | None = "position"
    """"position" (same place as in the step before), "content" (same bytes anywhere in the store), or None."""
    layout: str = "packed"
    """"packed", or "plain": ordinary safetensors files, never deduplicated, and only with `compress=None`."""
    chunk_bytes: int = 1 << 20
    """Bytes of a chunk, before encoding."""
    file_bytes: int = 4 << 30
    """A writer starts another data file beyond this size."""
    overwrite: bool = False
    """Whether a step that is there may be saved again."""
    verify_replicas: bool = False
    """Whether the ranks compare all the replicas before one of them is written."""
    threads: int = 2
    """Threads that encode and write."""
    differing: str = "error"
    """What is done where replicas and values differ between ranks: "error", or "first" to save the lowest rank's."""
    timeout: float = 1800.0
    """Seconds to wait for other ranks."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {choices}, but got {getattr(self, name)!r}.")
        if self.compress not in (None, "auto") and self.compress not in (names := _codec.codec_names()):
            raise ValueError(
                f'compress: expected None, "auto" or a codec, {", ".join(names)}, but got {self.compress!r}.'
            )
        if self.layout == "plain" and (self.dedup == "content" or self.compress is not None):
            raise ValueError(
                f'layout="plain" keeps safetensors files, which hold neither compressed nor shared chunks, but got '
                f'compress={self.compress!r}, dedup={self.dedup!r}. Leave both out, or use layout="packed".'
            )
        bounds = {"chunk_bytes": (4096, 64 << 20), "file_bytes": (1 << 20, 1 << 50), "threads": (1, 256)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name}: expected an integer from {low} to {high}, but got {value!r}.")
        if self.chunk_bytes % 4096:
            raise ValueError(f"chunk_bytes: expected a multiple of 4096, but got {self.chunk_bytes}.")
        if not self.timeout > 0:
            raise ValueError(f"timeout: expected seconds above 0, but got {self.timeout!r}.")

    @property
    def dedup_mode(self) -> str | None:
        """Return how chunks are shared."""
        return None if self.layout == "plain" else self.dedup
