"""Export and import by the name of a format, and telling the format of what is to be imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..errors import FormatError
from .common import ExportReport, ImportReport, local_path
from .dcp import export_dcp
from .dcp_source import import_dcp
from .safetensors import export_safetensors
from .safetensors_source import import_safetensors
from .torch_file import export_torch, import_torch

__all__ = ["detect", "export", "import_"]

FORMATS = ("safetensors", "hf", "torch", "dcp")


def export(path: Any, out: str | os.PathLike[str], format: str, **options: Any) -> ExportReport:
    """Export a step as "safetensors", "hf", "torch" or "dcp"; options as for the function of that format."""
    if format in ("safetensors", "hf"):
        return export_safetensors(path, out, format=format, **options)
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {FORMATS}, but got {format!r}.")
    return (export_torch if format == "torch" else export_dcp)(path, out, **options)


def import_(src: str | os.PathLike[str], path: Any, format: str | None = None, **options: Any) -> ImportReport:
    """Import what is at `src`; options as for the function of its format. None: the format is looked for."""
    format = detect(src) if format is None else format
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {FORMATS}, but got {format!r}.")
    if format == "torch":
        return import_torch(src, path, **options)
    return (import_dcp if format == "dcp" else import_safetensors)(src, path, **options)


def detect(src: str | os.PathLike[str]) -> str:
    """Return the format of a file or folder: "safetensors", "torch" or "dcp".

    Raises:
        FormatError: none of them.
    """
    source: Path = local_path(src, "src")
    if source.is_dir():
        if (source / ".metadata").is_file():
            return "dcp"
        if any(source.glob("*.safetensors")):
            return "safetensors"
        raise FormatError(f"src: {source} has neither .metadata nor *.safetensors in it.")
    if source.suffix == ".safetensors" or source.name.endswith(".safetensors.index.json"):
        return "safetensors"
    if not source.is_file():
        raise FormatError(f"src: {source} is not there.")
    with open(source, "rb") as file:
        first = file.read(10)
    if first[:4] == b"PK\x03\x04":
        return "torch"
    if len(first) == 10 and int.from_bytes(first[:8], "little") <= source.stat().st_size - 8 and first[8:9] == b"{":
        return "safetensors"
    raise FormatError(f"src: {source} is neither a file of torch.save nor one of safetensors.")
