"""Ranks as threads of one process: blocking collectives only, no send and receive, no asynchronous work.

Built on torch's own `multi_threaded_pg`. Random generators and default settings are shared by all threads;
grad mode is each thread's own.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")
MAX_WORLD = 16
_GRACE = 2.0  # seconds that the other threads have once one has failed
_lock = threading.Lock()


def run_threads(world: int, function: Callable[[int], T], *, timeout: float = 60.0) -> list[T]:
    """Call `function(rank)` on `world` threads, each of them a rank of one process group.

    Args:
        world: Number of ranks, 1 to 16.
        function: Any callable, closures too. It may make meshes and subgroups; all ranks must then do so.
        timeout: Seconds until the call gives up on ranks that still run.

    Returns:
        The results in the order of ranks.

    Raises:
        TimeoutError: Some ranks did not end; the text has their stacks.
        RuntimeError: This process already has a default process group.
        ValueError: `world` is out of range.

    The first exception of a rank is raised here, with a note that names the rank; the others are released.
    """
    if not 1 <= world <= MAX_WORLD:
        raise ValueError(f"run_threads: got world={world}, threads serve for 1 to {MAX_WORLD} ranks; use fake_ranks")
    import torch.distributed as dist

    if dist.is_initialized():
        raise RuntimeError("run_threads: this process already has a default process group; destroy it first")
    with _lock:
        return _ThreadRun(world, function, timeout).run()


class _ThreadRun:
    def __init__(self, world: int, function: Callable[[int], Any], timeout: float) -> None:
        self.world = world
        self.function = function
        self.timeout = timeout
        self.results: dict[int, Any] = {}
        self.errors: list[tuple[int, BaseException]] = []
        self.changed = threading.Condition()
        self.is_over = False

    def run(self) -> list[Any]:
        threaded, native = _torch_threads()
        native._set_thread_isolation_mode(True)  # each thread has its own table of group names
        threaded.ProcessLocalGroup.reset()
        threaded._install_threaded_pg()
        hook = sys.excepthook  # every rank's group puts its own around it
        try:
            store = native.HashStore()
            threads = [
                threading.Thread(target=self.rank_main, args=(rank, store), name=f"rank {rank}", daemon=True)
                for rank in range(self.world)
            ]
            for thread in threads:
                thread.start()
            self.wait(threads)
        finally:
            self.is_over = True
            sys.excepthook = hook
            threaded._uninstall_threaded_pg()
            native._set_thread_isolation_mode(False)
        return [self.results[rank] for rank in range(self.world)]

    def rank_main(self, rank: int, store: Any) -> None:
        import torch.distributed as dist

        threaded, _ = _torch_threads()
        try:
            limit = timedelta(seconds=self.timeout)
            dist.init_process_group("threaded", rank=rank, world_size=self.world, store=store, timeout=limit)
            try:
                self.results[rank] = self.function(rank)
            except BaseException as error:  # noqa: BLE001  raised in the calling thread
                self.fail(rank, error)
                if not self.is_over:
                    threaded.ProcessLocalGroup.exception_handle(error)
            if not self.is_over:
                dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001  also an error of the group itself
            self.fail(rank, error)
        finally:
            with self.changed:
                self.changed.notify_all()

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            self.errors.append((rank, error))

    def wait(self, threads: list[threading.Thread]) -> None:
        self.join(threads, self.timeout)
        stuck = [thread for thread in threads if thread.is_alive()]
        if stuck and not self.errors:
            text = f"run_threads: after {self.timeout:g} s these ranks still ran:\n{_stacks(stuck)}"
            _torch_threads()[0].ProcessLocalGroup.exception_handle(None)  # releases those in a collective
            self.join(threads, _GRACE)
            raise TimeoutError(text)
        if self.errors:
            # A rank released from a collective ends by SystemExit: never the cause if there is another.
            rank, error = min(self.errors, key=lambda item: isinstance(item[1], SystemExit))
            notes = [*getattr(error, "__notes__", ()), f"in thread rank {rank} of {self.world}"]
            vars(error)["__notes__"] = notes  # add_note, which Python 3.10 lacks
            raise error

    def join(self, threads: list[threading.Thread], timeout: float) -> None:
        """Wait until all have ended, or until `timeout`, or a little longer than the first error."""
        deadline = time.monotonic() + timeout
        has_grace = False
        while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
            with self.changed:
                self.changed.wait(0.002)
                if self.errors and not has_grace:
                    has_grace = True
                    deadline = min(deadline, time.monotonic() + _GRACE)


def _torch_threads() -> tuple[Any, Any]:
    """Return torch's threaded group and its native module, both private and untyped."""
    import torch
    from torch.testing._internal.distributed import multi_threaded_pg

    return multi_threaded_pg, torch._C._distributed_c10d


def _stacks(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        lines = traceback.format_stack(frame)[-6:] if frame is not None else ["(ended meanwhile)\n"]
        parts.append(f"---- {thread.name} ----\n{''.join(lines)}")
    return "".join(parts)
