"""The hooks of this package as typed functions: each calls one hook and checks the answer.

Nothing is kept here: a caller asks once, at construction or first use, and keeps what it got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plugins import check_answer, fingerprint, manager

if TYPE_CHECKING:
    import torch

    from .hookspecs import Layout

LAYOUT_MEMBERS = ("global_shape", "global_stride", "boxes", "local", "replicas", "partial")


def plugin_layout(tensor: torch.Tensor) -> Layout | None:
    """Ask plugins how `tensor` is sharded; None if none of them knows its class."""
    answer: Layout | None = manager().hook.vescale_layout(tensor=tensor)
    if answer is not None:
        check_answer("vescale_layout", answer, *LAYOUT_MEMBERS)
    return answer


def plugin_fingerprint() -> str:
    """Return a short hash of the plugins that serve this package; it must be the same on every rank."""
    return fingerprint()
