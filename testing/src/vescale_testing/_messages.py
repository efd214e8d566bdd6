"""What the test process, the fork server and the ranks say to each other.

Everything travels as plain pickle, never through `Connection.send`: torch would hook into that and move
tensors into shared memory, which a killed rank could leave behind.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

Kind = Literal["ok", "skip", "xfail", "fail", "died"]


@dataclass(frozen=True, slots=True)
class Job:
    """One function to run on every rank of a group."""

    path: str  # the file that defines the function
    module: str  # the name under which the test process knows that file
    qualname: str
    arguments: bytes  # pickled keyword arguments; loaded after the module, whose classes they may use
    environ: dict[str, str]
    cwd: str
    pooled: bool  # the rank lives on: check that the function leaves no state behind
    keep_value: bool  # send the function's result back


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank ended a job."""

    kind: Kind
    when: float  # time.monotonic(), one clock for all processes of a machine
    text: str = ""  # traceback, or reason of the skip
    summary: str = ""  # the traceback's last line
    follower: bool = False  # only says that some peer has gone
    value: bytes | None = None  # pickled result
    num_groups: int = 0  # process groups alive in the rank


@dataclass(frozen=True, slots=True)
class Hello:
    """First message to a fresh server."""

    path: list[str]  # sys.path of the test process
    folder: str  # for the files of all ranks; the server removes it when it ends


@dataclass(frozen=True, slots=True)
class Ready:
    """The server is warm."""

    problems: tuple[str, ...]  # one text per preload that failed


@dataclass(frozen=True, slots=True)
class Fork:
    """Start `world` ranks; followed by one file descriptor per rank."""

    group: int
    world: int
    folder: str
    path: str  # compiled once in the server, so that no rank has to


@dataclass(frozen=True, slots=True)
class Signal:
    """Send `number` to these ranks, as far as they live."""

    group: int
    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A rank has ended and is reaped, as are the processes it had started."""

    group: int
    rank: int
    status: int  # exit code, or minus the signal
    when: float


def send(conn: Connection[Any, Any], message: object) -> None:
    """Send one message."""
    conn.send_bytes(pickle.dumps(message))


def receive(conn: Connection[Any, Any]) -> Any:
    """Wait for one message; raise EOFError or OSError once the other side has gone."""
    return pickle.loads(conn.recv_bytes())
