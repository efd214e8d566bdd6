"""Loads a step and compares all of it, bit for bit, with what it must hold."""

from __future__ import annotations

from pathlib import Path

from _values import difference, state_of

import vescale_ckpt as ck

__all__ = ["wrong"]


def wrong(store: Path, seed: int, step: int, which: int | str) -> str:
    """Return in what a step, with every rank's own values, differs from what it must be; nothing where it does not.

    Args:
        store: the store.
        seed: of the values.
        step: whose values must be there.
        which: what to load, such as "latest".

    Raises:
        CheckpointError: it does not load.
    """
    with ck.open(store, which) as checkpoint:
        world = checkpoint.manifest.world
        if checkpoint.step != step:
            return f"it is step {checkpoint.step}, but must be {step}"
    for rank in range(world):
        wanted = state_of(seed, step, lambda _, whole: whole, lambda own: own, rank)
        if rank:
            wanted = {"own": wanted["own"]}
        found = ck.load_dict(store, step=which, keys="own*" if rank else None, rank=rank)
        if text := difference(found, wanted, f"rank {rank}"):
            return text
    return ""
