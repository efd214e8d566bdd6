"""Real text that every machine has: the source of Python's standard library, read byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
"""A token is a byte."""


def standard_library_text(max_bytes: int = 1 << 20) -> Tensor:
    """Return the first `max_bytes` bytes of the top-level modules of this Python, in order of name, as int64 tokens.

    Raises:
        FileNotFoundError: this Python has no source files, as when it runs from a zip.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no .py files of the standard library in {folder}; use a Python with sources")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8).long()


def batches(text: Tensor, *, batch_size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, tokens one further), each [batch_size, length], from random places of `text`.

    Every rank that passes the same arguments gets the same batches.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    while True:
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=generator)
        window = text[starts + offsets]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()
