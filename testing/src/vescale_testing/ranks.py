"""Run one function on N gloo ranks, in fresh processes or on a pool that lives as long as the session."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from _pytest.outcomes import Failed

from vescale_testing import _client, _report
from vescale_testing._group import RankGroup, Run
from vescale_testing._messages import Job

MAX_GROUPS = 64  # process groups in a pooled rank; each costs threads and sockets, so then the pool is renewed
_pools: dict[int, RankGroup] = {}


class RankFailure(Failed):
    """Some rank failed, died or hung; the text is the report. Like `pytest.fail`, it is no `Exception`."""

    __module__ = "builtins"  # as pytest's own outcomes: summary lines begin with the name alone

    def __init__(self, report: str) -> None:
        super().__init__(report, pytrace=False)


def run_ranks(
    function: Callable[..., Any] | str,
    world: int,
    *,
    timeout: float = 60.0,
    kwargs: Mapping[str, Any] | None = None,
    pool: bool = False,
) -> list[Any]:
    """Run a function on `world` ranks and return what they returned, in the order of ranks.

    The function runs in forked processes, joined in a gloo group. Its arguments named `rank` and `world` are
    filled in. Call it from the test process.

    Args:
        function: A function of a module's top level, or `"path/to/file.py::name"`.
        world: Number of ranks.
        timeout: Seconds until ranks that still run are stopped and their stacks reported.
        kwargs: Further arguments, the same for all ranks; pickled.
        pool: Use the session's pool of this size instead of new processes: about 100 times faster, but what a
            function leaves in its module stays there for the next.

    Returns:
        The results, unpickled.

    Raises:
        RankFailure: A rank raised, died, or did not end in time.
        ValueError: `function` is not something that another process can find.
        TypeError: `kwargs` cannot be pickled.

    A `pytest.skip` or `pytest.xfail` on a rank is raised here too.
    """
    path, module, qualname = _locate(function)
    return run_job(make_job(path, module, qualname, kwargs or {}), world, timeout=timeout, pool=pool)[1]


def make_job(path: str, module: str, qualname: str, kwargs: Mapping[str, Any], *, keep_value: bool = True) -> Job:
    """Describe a call so that another process can make it."""
    for name, value in kwargs.items():
        try:
            pickle.dumps(value)
        except Exception as error:  # noqa: BLE001  pickle raises whatever the object raises
            raise TypeError(
                f"the argument {name!r} of {qualname}, of type {type(value).__name__}, cannot be pickled to "
                f"the ranks: {error}. Make it inside the test body, or pass plain data"
            ) from None
    return Job(
        path=path,
        module=module,
        qualname=qualname,
        arguments=pickle.dumps(dict(kwargs)),
        environ=_client.rank_environ(),
        cwd=os.getcwd(),
        pooled=False,
        keep_value=keep_value,
    )


def run_job(job: Job, world: int, *, timeout: float, pool: bool) -> tuple[Run, list[Any]]:
    """Run a job, raise if it failed, skipped or xfailed, else return how it went and the results."""
    if world < 1 or timeout <= 0:
        raise ValueError(f"ranks: got world={world}, timeout={timeout}; world is at least 1, timeout is above 0")
    run = _run_pooled(replace(job, pooled=True), world, timeout) if pool else _run_fresh(job, world, timeout)
    kinds = {outcome.kind for outcome in run.outcomes.values()}
    genuine = [o for o in run.outcomes.values() if o.kind == "died" or (o.kind == "fail" and not o.follower)]
    if not genuine:
        # Peers of a rank that skipped may hang, or see it go.
        for kind, error in (("skip", pytest.skip.Exception), ("xfail", pytest.xfail.Exception)):
            if kind in kinds:
                raise error(next(o.text for o in run.outcomes.values() if o.kind == kind))
    if kinds != {"ok"} or len(run.outcomes) < world:
        raise RankFailure(_report.describe(run))
    values = [run.outcomes[rank].value for rank in range(world)]
    return run, [None if value is None else pickle.loads(value) for value in values]


def _run_fresh(job: Job, world: int, timeout: float) -> Run:
    group = RankGroup(_client.get_server(), world, job.path)
    try:
        run = group.run(job, timeout)
        if run.is_clean:
            group.close()
        return run
    finally:
        group.kill()


def _run_pooled(job: Job, world: int, timeout: float) -> Run:
    server = _client.get_server()
    group = _pools.pop(world, None)
    if group is not None and (group.server is not server or server.alive[group.number] != set(range(world))):
        group.kill()
        group = None
    if group is None:
        group = RankGroup(server, world, job.path)
    keep = False
    try:
        run = group.run(job, timeout)
        keep = run.is_clean and max(outcome.num_groups for outcome in run.outcomes.values()) <= MAX_GROUPS
        return run
    finally:
        if keep:
            _pools[world] = group
        else:
            group.kill()


def start() -> None:
    """Start the fork server now, so that it warms up while other tests run."""
    _client.get_server()


def shut_down() -> None:
    """End pools and fork server; a later run starts them anew."""
    try:
        for world in list(_pools):
            _pools.pop(world).close()
    finally:
        _client.close_server()


def _locate(function: Callable[..., Any] | str) -> tuple[str, str, str]:
    if isinstance(function, str):
        path, _, name = function.partition("::")
        if not name or not os.path.isfile(path):
            raise ValueError(
                f"run_ranks: got {function!r}; a text must be 'path/to/file.py::name' of a file that exists"
            )
        path = os.path.abspath(path)
        stem = os.path.splitext(os.path.basename(path))[0]
        return path, f"_ranks_{stem}", name.replace("::", ".")
    qualname = getattr(function, "__qualname__", "<locals>")
    module = inspect.getmodule(function)
    file = getattr(module, "__file__", None)
    if module is None or file is None or "<" in qualname:
        raise ValueError(
            f"run_ranks: got {function!r}, which a rank cannot look up; move it to the top level of its file"
        )
    # A script that runs as __main__ must not run again as such on a rank.
    known = module.__name__ != "__main__" and sys.modules.get(module.__name__) is module
    return (
        os.path.abspath(file),
        module.__name__ if known else f"_ranks_{os.path.basename(file)[:-3]}",
        qualname,
    )
