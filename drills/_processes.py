"""Processes that are forked from a server which has imported all that is heavy, so that starting one is cheap."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["start"]


def start(world: int, target: Callable[..., Any], job: Any, preload: str) -> list[multiprocessing.process.BaseProcess]:
    """Start a process for each rank.

    Args:
        world: number of ranks.
        target: called with `job` and the rank.
        job: what to do.
        preload: module of this folder that imports what all need.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preload])
    here = str(Path(__file__).parent)  # of which older Pythons do not tell the server
    if here not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    processes = [context.Process(target=target, args=(job, rank), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    return list(processes)
