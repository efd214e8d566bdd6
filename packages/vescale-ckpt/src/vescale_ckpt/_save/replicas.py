"""Compares the replicas of all tensors, on request: a save keeps one of them, and a difference would be lost unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .. import _codec
from .._geometry import Rule
from .._state import TensorSpec, held_by
from ..errors import RanksError

if TYPE_CHECKING:
    from .._coordination import Coordinator
    from .plan import Content

__all__ = ["check_replicas"]

BLOCK = 1 << 20


def check_replicas(
    session: Coordinator, content: Content, specs: Sequence[TensorSpec], differing: str = "error"
) -> list[TensorSpec]:
    """Compare what holders of one box hold, and return who writes it. All ranks call this.

    Costs one pass over everything that a rank holds.

    Args:
        session: of the ranks that save.
        content: what this rank holds.
        specs: of the whole, the same on all ranks.
        differing: "first" has tensors that ranks hold whole, and that differ, written by the first of them alone.

    Raises:
        RanksError: holders have different values; names the tensor and two of them.
    """
    mine = {}
    for spec in specs:
        held = content.held.get(spec.name)
        if held is not None and len(spec.layout.holders(spec.shape, session.rank)) > 1:
            mine[spec.name] = _hash([view for _, view in held.parts])

    def compare(messages: list[bytes]) -> bytes:
        hashes = [json.loads(message) for message in messages]
        alone = {}
        for spec in specs:
            for rank in range(session.world):
                if spec.name not in hashes[rank]:
                    continue
                first = spec.layout.holders(spec.shape, rank)[0]
                if hashes[rank][spec.name] == hashes[first].get(spec.name):
                    continue
                whole = isinstance(spec.layout, Rule) and all(text == "R" for text in spec.layout.placements)
                if differing == "first" and whole:
                    alone[spec.name] = first
                    break
                choice = ' save with differing="first",' if whole else ""
                raise RanksError(
                    f"state: {spec.name} is replicated on ranks {first} and {rank}, but its values differ there. "
                    f"Make the ranks agree,{choice} or wrap it in `vescale_ckpt.local(...)` to keep one per rank."
                )
        return json.dumps(alone).encode()

    alone = json.loads(session.agree("replicas", json.dumps(mine).encode(), compare))
    return [held_by(spec, alone[spec.name]) if spec.name in alone else spec for spec in specs]


def _hash(views: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for view in views:
        dense = _codec.as_bytes(view.detach().resolve_conj().resolve_neg().cpu().contiguous())
        for at in range(0, dense.numel(), BLOCK):
            digest.update(_codec.memory(dense[at : at + BLOCK]))
    return digest.hexdigest()
