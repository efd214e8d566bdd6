"""What torch.distributed keeps per process, kept per rank: groups, default group, random numbers, environment.

While an emulation runs, torch's record of process groups is one per thread, every new group is an emulated one,
whatever backend the program asks for, and a rendezvous needs no network.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.distributed_c10d as torch_c10d

__all__ = ["BACKEND", "PLACE", "RankState", "installed", "new_rank_world"]

BACKEND = "vescale_emulated"
c10d: Any = torch_c10d
cuda: Any = torch.cuda
FIELDS = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")


class _Place(threading.local):
    """Which rank a thread is; empty outside of an emulation."""

    run: Any = None
    rank: int = -1
    world: Any = None


PLACE = _Place()


class _RankWorld(c10d._World):  # type: ignore[misc]
    """torch's record of the groups of one rank, in this object instead of module globals."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, Any] = {name: {} for name in FIELDS}
        self.own["group_count"] = 0


def _field(name: str) -> property:
    return property(lambda self: self.own[name], lambda self, value: self.own.__setitem__(name, value))


for _name in (*FIELDS, "group_count"):
    setattr(_RankWorld, _name, _field(_name))


class _Worlds:
    """Stands in for torch's record and passes on to that of the rank whose thread asks."""

    def __init__(self, outside: Any) -> None:
        object.__setattr__(self, "outside", outside)

    def __getattr__(self, name: str) -> Any:
        return getattr(PLACE.world or object.__getattribute__(self, "outside"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(PLACE.world or object.__getattribute__(self, "outside"), name, value)


class RankState:
    """What ranks on real processes do not share: the states of random generators, RANK and LOCAL_RANK."""

    def __init__(self, size: int) -> None:
        """Start every rank with the states of the caller.

        Args:
            size: number of ranks.
        """
        self._outside = _random_states()
        self._states = [self._outside] * size
        self._environment = {
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        }
        os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="localhost", MASTER_PORT="0")

    def switch(self, leaving: int | None, coming: int | None) -> None:
        """Put the state of the rank that leaves away and that of the one that comes in place."""
        if leaving is not None:
            self._states[leaving] = _random_states()
        if coming is not None:
            _set_random_states(self._states[coming])
            os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(coming)

    def close(self) -> None:
        """Give the caller its own state back."""
        _set_random_states(self._outside)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.random.get_rng_state(),
        cuda.get_rng_state_all() if cuda.is_initialized() else None,
        random.getstate(),
        numpy.random.get_state() if numpy is not None else None,
    )


def _set_random_states(states: tuple[Any, ...]) -> None:
    numpy = sys.modules.get("numpy")
    torch.random.set_rng_state(states[0])
    if states[1] is not None:
        cuda.set_rng_state_all(states[1])
    random.setstate(states[2])
    if states[3] is not None and numpy is not None:
        numpy.random.set_state(states[3])


@contextmanager
def installed(backend: str) -> Iterator[None]:
    """Make torch.distributed serve the threads of an emulation; other threads see what they saw before.

    Args:
        backend: what get_backend() says in the emulated world.
    """
    if BACKEND.upper() not in c10d.Backend._plugins:
        # Registered for the whole life of the process; it works in threads of an emulation only.
        c10d.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    kept = (c10d._world, c10d._new_process_group_helper, c10d.rendezvous, sys.excepthook)
    c10d._world = _Worlds(kept[0])
    c10d._new_process_group_helper = _emulated_groups(kept[1], backend)
    c10d.rendezvous = _emulated_rendezvous(kept[2])
    c10d_native: Any = torch._C._distributed_c10d
    c10d_native._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d_native._set_thread_isolation_mode(False)
        c10d._world, c10d._new_process_group_helper, c10d.rendezvous, sys.excepthook = kept


def new_rank_world() -> Any:
    """Return an empty record of groups for one rank."""
    return _RankWorld()


def _create(options: Any, backend_options: Any) -> Any:
    if PLACE.run is None:
        raise RuntimeError(f"{BACKEND}: this backend is made by vescale_comm.emulator.emulate, not by hand.")
    return PLACE.run.group(options)


def _emulated_groups(real: Callable[..., Any], reported: str) -> Callable[..., Any]:
    """Wrap torch's maker of groups: in an emulation, a group of any backend is an emulated one."""

    def make(size: int, rank: int, ranks: list[int], backend: Any, store: Any, *rest: Any, **options: Any) -> Any:
        if PLACE.run is None:
            return real(size, rank, ranks, backend, store, *rest, **options)
        # Options and devices belong to the real backend.
        options.update({name: None for name in ("backend_options", "pg_options", "device_id") if name in options})
        group, prefix = real(size, rank, ranks, c10d.Backend(BACKEND), store, *rest, **options)
        if isinstance(group, c10d.ProcessGroup):
            c10d._world.pg_map[group] = (c10d.Backend(reported), prefix)
            c10d._world.pg_backend_config[group] = f"cpu:{reported},cuda:{reported}"
        return group, prefix

    return make


def _emulated_rendezvous(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's rendezvous: ranks of an emulation have met already."""

    def meet(url: Any, rank: int = -1, world_size: int = -1, **options: Any) -> Any:
        if PLACE.run is None:
            return real(url, rank, world_size, **options)
        return iter([(PLACE.run.store, PLACE.rank, PLACE.run.size)])

    return meet
