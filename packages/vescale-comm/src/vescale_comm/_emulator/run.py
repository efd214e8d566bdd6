"""Run one training function for many ranks in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CommError
from .choose import order_named
from .exchange import Exchange
from .group import EmulatedGroup
from .orders import Order
from .selftest import require_gloo_order
from .store import TurnStore
from .turns import DeadlockError, Turns
from .world import PLACE, RankState, installed, new_rank_world

__all__ = ["EmulatedRankError", "emulate"]

GRACE_SECONDS = 5.0
NO_TIMEOUT = timedelta(days=1)
_one_at_a_time = threading.Lock()


class EmulatedRankError(CommError):
    """A rank of an emulated world failed; the cause is its own error, with its traceback."""


def emulate(
    function: Callable[..., Any],
    world_size: int,
    backend: str | Order = "gloo",
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    init: bool = True,
    check: bool = True,
    self_test: bool = True,
    timeout: float = 600.0,
) -> list[Any]:
    """Call `function(rank, *args, **kwargs)` for every rank of a world, in threads of this process that take turns.

    torch.distributed works in it as on real processes: collectives, sends and receives, new groups, device meshes,
    functional collectives, DistributedDataParallel, DTensor, the transports of this package. Sums add in the order
    of the chosen backend, so that results are those of real processes bit for bit; every run gives the same bits.

    Inputs are read when a call is made and results are written when its work is waited for, never earlier; asking a
    work for a future waits. What a program never waits for it never gets.

    Each rank has its own random state (at first that of the caller), RANK and LOCAL_RANK. Everything else that
    belongs to a process, such as module globals, is shared. Threads that a rank starts cannot communicate.

    Args:
        function: what a rank runs.
        world_size: number of ranks.
        backend: "gloo" (bit for bit), "canonical" (rank order), "nccl_ring", "nccl_tree" (models), or an `Order`.
        args: further arguments.
        kwargs: further arguments by name.
        init: whether the default process group is there when `function` starts; without it `function` calls
            `init_process_group` itself, with any backend and `init_method`.
        check: whether buffers that were changed during a collective are found.
        self_test: whether the order of gloo is compared with the gloo of this torch, once per process.
        timeout: seconds that one rank may run without waiting for another one.

    Returns:
        What `function` returned, by rank.

    Raises:
        EmulatedRankError: a rank raised; its error is the cause.
        DeadlockError: ranks wait for each other; the text says for what and where.
        TimeoutError: one rank ran for longer than `timeout`.
        ValueError: `world_size` or `backend` make no sense.
        CommError: called by a rank of an emulation, or gloo adds in another order than expected.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def total(rank):
        ...     value = torch.tensor([1e8, -1e8, 1.0][rank])
        ...     dist.all_reduce(value)
        ...     return value.item()
        >>> emulate(total, 3, "canonical")
        [1.0, 1.0, 1.0]
    """
    if world_size < 1:
        raise ValueError(f"world_size: must be at least 1; got {world_size}.")
    if PLACE.run is not None:
        raise CommError(f"emulate: rank {PLACE.rank} of an emulated world cannot start another one.")
    order = order_named(backend)
    if self_test and order.name == "gloo":
        require_gloo_order()
    with _one_at_a_time:
        return _Run(function, world_size, order, tuple(args), dict(kwargs or {}), init, check).run(timeout)


class _Run:
    """One emulation."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        order: Order,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        init: bool,
        check: bool,
    ) -> None:
        self.size, self.order = size, order
        self._function, self._args, self._kwargs = function, args, kwargs
        self._init, self._check = init, check
        self._threads_per_rank = torch.get_num_threads()
        self._state = RankState(size)
        self.turns = Turns(size, self._state.switch)
        self.store = TurnStore(self._wait, self._poll)
        self._exchanges: dict[tuple[str, tuple[int, ...], int], Exchange] = {}
        self._made: dict[tuple[int, str, tuple[int, ...]], int] = {}
        self._results: list[Any] = [None] * size

    def run(self, timeout: float) -> list[Any]:
        """Start the ranks, wait for them, and return their results."""
        threads = [
            threading.Thread(target=self._main, args=(rank,), name=f"emulated rank {rank}", daemon=True)
            for rank in range(self.size)
        ]
        try:
            with installed(self.order.backend):
                for thread in threads:
                    thread.start()
                try:
                    self.turns.run(timeout)
                except BaseException as error:
                    self.turns.fail(None, error)
                    raise
                finally:
                    for thread in threads:
                        thread.join(GRACE_SECONDS if self.turns.failure is not None else None)
        finally:
            self._state.close()
        self._raise()
        return self._results

    def group(self, options: Any) -> EmulatedGroup:
        """Return the group that torch asks for on the thread of a rank."""
        ranks = tuple(options.global_ranks_in_group) or tuple(range(self.size))
        key = (PLACE.rank, str(options.group_id), ranks)
        generation = self._made[key] = self._made.get(key, 0) + 1
        exchange = self._exchanges.setdefault((key[1], ranks, generation), Exchange(key[1], ranks, self.turns.progress))
        return EmulatedGroup(exchange, options.group_rank, self.order, options.store, self._check)

    def _main(self, rank: int) -> None:
        error: BaseException | None = None
        try:
            self.turns.enter(rank)
            PLACE.run, PLACE.rank, PLACE.world = self, rank, new_rank_world()
            torch.set_num_threads(self._threads_per_rank)
            torch.autograd.set_multithreading_enabled(False)
            if self._init:
                dist.init_process_group(
                    self.order.backend, store=self.store, rank=rank, world_size=self.size, timeout=NO_TIMEOUT
                )
            self._results[rank] = self._function(rank, *self._args, **self._kwargs)
        except BaseException as caught:  # noqa: BLE001  raised by the thread that called emulate
            error = caught
        finally:
            try:
                if PLACE.world is not None and dist.is_initialized():
                    dist.destroy_process_group()
            except BaseException as caught:  # noqa: BLE001  as above
                error = error or caught
            PLACE.run, PLACE.rank, PLACE.world = None, -1, None
            self.turns.leave(rank, error)

    def _raise(self) -> None:
        if self.turns.failure is None:
            return
        rank, error = self.turns.failure
        if isinstance(error, DeadlockError):
            raise error
        raise EmulatedRankError(
            f"Rank {rank} of {self.size} emulated ranks failed: {type(error).__name__}: {error}"
        ) from error

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str], expires: bool = False) -> bool:
        return self.turns.wait(PLACE.rank, ready, what, expires)

    def _poll(self, what: Callable[[], str]) -> None:
        self.turns.poll(PLACE.rank, what)
