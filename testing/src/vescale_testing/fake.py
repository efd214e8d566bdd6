"""A process group without peers: one process plays one rank of a world of any size, for plans and specs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` for the length of the block.

    Collectives return at once and leave wrong data. The group is destroyed afterwards, also after an error.

    Args:
        world_size: Number of ranks to play.
        rank: The one that this process is.

    Raises:
        RuntimeError: This process already has a default process group.
        ValueError: `rank` is not in `range(world_size)`.

    Example:
        >>> import torch.distributed as dist
        >>> with fake_ranks(1024, rank=7):
        ...     dist.get_rank(), dist.get_world_size()
        (7, 1024)
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not 0 <= rank < world_size:
        raise ValueError(f"fake_ranks: rank {rank} is outside a world of {world_size}; use 0 to {world_size - 1}")
    if dist.is_initialized():
        raise RuntimeError(
            f"fake_ranks: this process already is rank {dist.get_rank()} of {dist.get_world_size()} in group "
            f"{dist.get_backend()}; destroy that group first, and do not nest fake_ranks"
        )
    hook = sys.excepthook  # torch puts its own around it, each time
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        sys.excepthook = hook
        if dist.is_initialized():
            dist.destroy_process_group()
