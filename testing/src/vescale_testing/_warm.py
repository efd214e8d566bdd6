"""What the fork server does once so that no rank has to: imports, and the first DTensor operation.

Nothing here may start a thread, or the forked ranks would hang. A preload that fails does not stop the
server: its traceback is handed to every rank, whose tests then fail with it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import threading
import traceback
import warnings
from collections.abc import Callable


def warm_up() -> tuple[str, ...]:
    """Import and run everything; return the tracebacks of what failed."""
    problems = []
    steps: tuple[Callable[[], None], ...] = (_torch, _pytest, _hypothesis, _vescale, _single_thread)
    for step in steps:
        try:
            step()
        except Exception:  # noqa: BLE001  whatever it is, the ranks report it
            problems.append(f"while preparing the ranks ({step.__name__.strip('_')}):\n{traceback.format_exc()}")
    gc.collect()
    gc.freeze()  # the ranks' collector leaves these objects alone, so their pages stay shared
    return tuple(problems)


def _torch() -> None:
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        try:
            mesh = init_device_mesh("cpu", (2,))
            weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            product = weight @ weight
            assert isinstance(product, DTensor)
            product.redistribute(mesh, [Replicate()])
        finally:
            dist.destroy_process_group()


def _pytest() -> None:
    importlib.import_module("_pytest.assertion.rewrite")
    importlib.import_module("vescale_testing._rank")


def _hypothesis() -> None:
    """Make `@given` draw the same examples on every rank, or their collectives would not match."""
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "vescale-ranks",
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # judged by each rank's clock, alone
    )
    settings.load_profile("vescale-ranks")


def _vescale() -> None:
    """Import what a rank would import at its first use of a package: all of it, and the plugins of the others."""
    for name in ("dtensor", "rng", "comm", "pipe", "ckpt"):
        if importlib.util.find_spec(f"vescale_{name}") is None:
            continue
        module = importlib.import_module(f"vescale_{name}")
        for public in getattr(module, "__all__", ()):
            getattr(module, public)
        importlib.import_module(f"vescale_{name}._plugin")


def _single_thread() -> None:
    names = [thread.name for thread in threading.enumerate()]
    if len(names) > 1:
        raise RuntimeError(
            f"a preload left threads running, which a fork would break: {names} in process {os.getpid()}"
        )
