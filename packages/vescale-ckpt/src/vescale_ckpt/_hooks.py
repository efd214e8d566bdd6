"""The hooks of this package as typed functions: each calls one hook and checks the answer.

Nothing is kept here: a caller asks once, at construction or first use, and keeps what it got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plugins import check_answer, fingerprint, manager

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .hookspecs import Box, CodecRegistry, Layout, StorageRegistry, Timeline

LAYOUT_MEMBERS = ("global_shape", "global_stride", "boxes", "local", "replicas", "partial")


def plugin_layout(tensor: torch.Tensor) -> Layout | None:
    """Ask plugins how `tensor` is sharded; None if none of them knows its class."""
    answer: Layout | None = manager().hook.vescale_layout(tensor=tensor)
    if answer is not None:
        check_answer("vescale_layout", answer, *LAYOUT_MEMBERS)
    return answer


def plugin_from_layout(like: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor | None:
    """Ask plugins for a tensor like `like` that holds `boxes`; None if nobody knows its class."""
    answer: torch.Tensor | None = manager().hook.vescale_from_layout(like=like, boxes=boxes)
    if answer is not None:
        check_answer("vescale_from_layout", answer, "shape", "dtype", "device")
    return answer


def register_storage(registry: StorageRegistry) -> None:
    """Let plugins add places to keep checkpoints."""
    manager().hook.vescale_register_storage(registry=registry)


def register_codecs(registry: CodecRegistry) -> None:
    """Let plugins add ways to encode chunks."""
    manager().hook.vescale_register_codecs(registry=registry)


def timeline() -> Timeline | None:
    """Ask plugins for the recorder of spans; None if nothing is to be recorded."""
    answer: Timeline | None = manager().hook.vescale_timeline()
    if answer is not None:
        check_answer("vescale_timeline", answer, "begin", "end")
    return answer


def plugin_fingerprint() -> str:
    """Return a short hash of the plugins that serve this package; it must be the same on every rank."""
    return fingerprint()
