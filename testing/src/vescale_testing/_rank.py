"""The life of one rank: set up, join the group, run jobs until told to end or until one fails."""

from __future__ import annotations

import faulthandler
import inspect
import os
import pickle
import re
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from vescale_testing import _loading, _state
from vescale_testing._messages import Job, Outcome, receive, send

GLOO_TIMEOUT = timedelta(seconds=30)  # below the tests' own, so that torch explains a deadlock first
_HERE = str(Path(__file__).parent) + os.sep
_PEER_GONE = re.compile(
    r"closed by peer|reset by peer|Broken pipe|Read error|writev|Timed out waiting|Application timeout|"
    r"Connection refused|Socket closed|Connect timeout"
)


def main(rank: int, world: int, folder: str, conn: Connection[Any, Any], problems: tuple[str, ...]) -> NoReturn:
    """Run as this rank; never return."""
    _redirect(rank, folder)
    error = "\n".join(problems) or _join_group(rank, world, folder)
    _report(conn, Outcome("fail" if error else "ok", time.monotonic(), error, error.rpartition("\n")[2]))
    while True:
        try:
            job: Job = receive(conn)
        except (EOFError, OSError):
            _end(0)
        outcome = _run(job, rank, world)
        _report(conn, outcome)
        if outcome.kind != "ok" and not job.pooled:
            _end(1)  # at once: peers that wait for this rank are told by gloo


def _report(conn: Connection[Any, Any], outcome: Outcome) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        send(conn, outcome)
    except OSError:
        _end(0)  # nobody wants to know
    if outcome.kind == "fail":
        _end(1)


def _end(code: int) -> NoReturn:
    os._exit(code)  # no wait for gloo's threads, no atexit work of a half-broken group


def _redirect(rank: int, folder: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    log = os.open(f"{folder}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # New objects: those of the server may hold text that was buffered before the fork.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stacks = os.fdopen(os.open(f"{folder}/{rank}.stacks", os.O_WRONLY | os.O_CREAT, 0o600), "w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


def _join_group(rank: int, world: int, folder: str) -> str:
    try:
        import torch
        import torch.distributed as dist

        store = torch._C._distributed_c10d.FileStore(f"{folder}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=GLOO_TIMEOUT)
    except Exception as error:  # noqa: BLE001  whatever it is, it is reported
        return format_error(error)
    return ""


def _run(job: Job, rank: int, world: int) -> Outcome:
    value = None
    try:
        if os.environ != job.environ:
            os.environ.clear()
            os.environ.update(job.environ)
        os.chdir(job.cwd)
        _state.reseed()
        function = _loading.find_function(_loading.load_module(job.module, job.path), job.qualname)
        before = _state.snapshot() if job.pooled else {}
        result = _call(function, _arguments(job), rank, world)
        if job.keep_value:
            value = _pickle_result(result, rank)
        left = _state.differences(before, _state.snapshot()) if job.pooled else []
        if left:
            raise RuntimeError(
                f"the test left rank {rank} of its pool changed, which the next test would meet: "
                f"{'; '.join(left)}. Undo it at the end of the test, or drop pool=True"
            )
    except pytest.skip.Exception as error:
        return Outcome("skip", time.monotonic(), str(error))
    except pytest.xfail.Exception as error:
        return Outcome("xfail", time.monotonic(), str(error))
    except BaseException as error:  # noqa: BLE001  SystemExit too: a rank must not end in silence
        when = time.monotonic()
        last = "".join(traceback.format_exception_only(type(error), error)).strip()
        follower = isinstance(error, RuntimeError) and _PEER_GONE.search(last) is not None
        return Outcome("fail", when, format_error(error), last.partition("\n")[0], follower)
    return Outcome("ok", time.monotonic(), value=value, num_groups=_state.num_groups() if job.pooled else 0)


def _call(function: Any, kwargs: dict[str, Any], rank: int, world: int) -> Any:
    parameters = inspect.signature(function).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, number in (("rank", rank), ("world", world)):
        if open_ended or name in parameters:
            kwargs.setdefault(name, number)
    if "monkeypatch" not in parameters:
        return function(**kwargs)
    with pytest.MonkeyPatch.context() as kwargs["monkeypatch"]:
        return function(**kwargs)


def _arguments(job: Job) -> dict[str, Any]:
    try:
        kwargs: dict[str, Any] = pickle.loads(job.arguments)
    except Exception as error:
        raise TypeError(
            f"the fixtures of {job.qualname} cannot be unpickled in a rank: {error}. Classes must come from "
            "an installed package or from the test file itself"
        ) from error
    return kwargs


def _pickle_result(result: object, rank: int) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank {rank}, of type {type(result).__name__}, cannot be pickled: {error}. Return "
            "plain data: numbers, strings, local tensors, or tuples, lists and dicts of them"
        ) from error


def format_error(error: BaseException) -> str:
    """Format a traceback without the frames of this package."""
    formatted = traceback.TracebackException.from_exception(error)
    _hide_harness(formatted, set())
    return "".join(formatted.format()).rstrip()


def _hide_harness(formatted: traceback.TracebackException, seen: set[int]) -> None:
    if id(formatted) in seen:
        return
    seen.add(id(formatted))
    formatted.stack[:] = [frame for frame in formatted.stack if not frame.filename.startswith(_HERE)]
    inner = [formatted.__cause__, formatted.__context__, *(getattr(formatted, "exceptions", None) or ())]
    for other in inner:
        if other is not None:
            _hide_harness(other, seen)
