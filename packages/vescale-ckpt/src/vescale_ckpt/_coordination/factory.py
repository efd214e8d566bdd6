"""Finds the ranks that save and load together."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ..errors import RanksError
from .interface import Members
from .single import Alone
from .store import StoreMembers

__all__ = ["coordinator"]


def coordinator(
    process_group: dist.ProcessGroup | None = None,
    *,
    store: Any = None,
    rank: int | None = None,
    world: int | None = None,
    timeout: float = 1800.0,
) -> Members:
    """Return the members of a process group, or this process alone where torch.distributed is not initialized.

    A process that a launcher (torchrun) has started as one of several ranks, as `WORLD_SIZE` says, is not alone: such
    ranks would all write the same step.

    Args:
        process_group: the group; None: all ranks.
        store: a `torch.distributed.Store` that members share, to talk over instead of the group's own. Without a
            group `rank` and `world` say who they are. Groups that share one need a `PrefixStore` each.
        rank: number of this member, with `store`.
        world: number of members, with `store`.
        timeout: seconds to wait for other members, in each call.

    Raises:
        RanksError: this process is not in the group, the group has no store to talk over, or the process is one of
            several ranks and has not called `init_process_group`.
        ValueError: `rank`, `world` or `timeout` is out of range.

    Example:
        >>> coordinator().world
        1
    """
    if not timeout > 0:
        raise ValueError(f"timeout: expected a number of seconds above 0, but got {timeout!r}.")
    if store is not None and (rank is not None or world is not None):
        if process_group is not None:
            raise ValueError("process_group: it knows rank and world, so give them only where there is no group.")
        if rank is None or world is None or not 0 <= rank < world:
            raise ValueError(f"store: needs rank and world, with rank below world, but got rank={rank}, world={world}.")
        return _members(store, rank, tuple(range(world)), timeout)
    if rank is not None or world is not None:
        raise ValueError(f"store: rank={rank} and world={world} are given without a store to talk over.")
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None or store is not None:
            raise RanksError(
                "process_group: torch.distributed is not initialized, or was destroyed. Save and load before "
                "destroy_process_group(), or give store, rank and world."
            )
        _check_launch()
        return Alone()
    # Looked up once: a background thread of a thread-based group would see another world.
    groups = dist.distributed_c10d._world.pg_map
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise RanksError(
            f"process_group: got {group!r}, which new_group() returns to ranks that are not in the group; rank "
            f"{dist.get_rank()} cannot take part. Save and load on the group's own ranks only."
        )
    if group not in groups:
        raise RanksError("process_group: it was destroyed. Save and load before destroy_process_group().")
    ranks = tuple(dist.get_process_group_ranks(group))
    member = ranks.index(dist.get_rank())
    if len(ranks) == 1:
        return Alone(ranks[0])
    if store is None:
        store = groups[group][1]
        if store is None or dist.get_backend(group) == "fake":
            raise RanksError(
                f"process_group: its backend is {dist.get_backend(group)!r}, which has no store that its {len(ranks)} "
                f"ranks share, so they cannot agree on anything. Give `store`, or a group of this rank alone."
            )
    return _members(store, member, ranks, timeout, lambda: group not in groups)


def _check_launch() -> None:
    """Raise RanksError in one of several ranks that never joined the others."""
    told = os.environ.get("WORLD_SIZE", "")
    if not (dist.is_available() and told.isascii() and told.isdigit() and int(told) > 1):
        return
    rank = os.environ.get("RANK", "?")
    raise RanksError(
        f"process_group: the environment says WORLD_SIZE={told}, RANK={rank}, but torch.distributed is not "
        f"initialized, so the {told} ranks do not know of each other, and each would save or load for itself. Call "
        f"torch.distributed.init_process_group() first, and save and load before destroy_process_group(). If this "
        f"process is to work alone, pass process_group=new_group([rank]), or start it with WORLD_SIZE=1."
    )


def _members(store: Any, rank: int, ranks: tuple[int, ...], timeout: float, gone: Any = None) -> Members:
    if len(ranks) == 1:
        return Alone(ranks[0])
    if type(store).__name__ == "FakeStore":
        raise RanksError(
            "store: a FakeStore keeps nothing, so ranks cannot agree on anything over it. Use a HashStore for members "
            "in one process, or a TCPStore."
        )
    return StoreMembers(store, rank=rank, ranks=ranks, timeout=timeout, gone=gone)
