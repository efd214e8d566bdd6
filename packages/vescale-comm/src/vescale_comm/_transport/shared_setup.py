"""How the ranks of one host find each other's boards, or agree that they cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import TransportError
from . import shared_futex as futex
from .agree import exchange
from .interface import Transport
from .shared_board import Board
from .shared_memory import Segment, attach, create, started

__all__ = ["meet"]


def meet(transport: Transport) -> Board:
    """Make a board, and map those of all others.

    Args:
        transport: that carries words between the ranks; all of them call this at the same place.

    Raises:
        TransportError: on all ranks, if it failed on any; names the first of them and why.
    """
    own, told = _own_board()
    words = [json.loads(word) for word in exchange(transport, json.dumps(told).encode())]
    _raise_first(words)
    hosts = [word["host"] for word in words]
    for rank, host in enumerate(hosts):
        if host != hosts[0]:
            raise TransportError(
                f"Ranks 0 and {rank} of the group are on different hosts, in different containers, or of different "
                f"users: {hosts[0]} and {host}. Use transport p2p or native."
            )
    boards: list[Segment] = []
    problem = ""
    try:
        assert own is not None  # or it would have told so
        for rank, word in enumerate(words):
            boards.append(own if rank == transport.rank else attach(word["pid"], word["fd"], own.nbytes, 0))
    except OSError as error:
        problem = f"cannot open the memory of rank {len(boards)}: {error}"
    # Only now may those who fail let their boards go.
    _raise_first([json.loads(word) for word in exchange(transport, json.dumps({"problem": problem}).encode())])
    return Board(boards, transport.rank, [word["pid"] for word in words], [word["start"] for word in words])


def _own_board() -> tuple[Segment | None, dict[str, object]]:
    if not futex.SUPPORTED or not hasattr(os, "memfd_create"):
        return None, {"problem": "shared memory between ranks needs 64-bit Linux on x86-64 or ARM"}
    try:
        board = create(Board.BYTES)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = os.stat("/proc/self/ns/pid").st_ino
    except (OSError, MemoryError) as error:
        return None, {"problem": f"cannot make shared memory: {error}"}
    pid = os.getpid()
    host = f"boot {boot}, process space {spaces}, user {os.getuid()}"
    return board, {"problem": "", "host": host, "pid": pid, "fd": board.fd, "start": started(pid)}


def _raise_first(words: list[dict[str, str]]) -> None:
    for rank, word in enumerate(words):
        if word["problem"]:
            raise TransportError(f"rank {rank}: {word['problem']}. Use transport p2p or native.")
