"""The schedules by name: ours, and those that plugins register."""

from __future__ import annotations

import difflib
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

from .._hooks import register_schedules
from .._plugins import OFF, wrong_answer
from .._schedule import Schedule, validate
from ..errors import ScheduleError
from .building_blocks import v_half, v_min
from .dualpipe_v import dualpipe_v
from .gpipe import gpipe, looped_bfs
from .interleaved import interleaved_1f1b
from .one_f_one_b import eager_1f1b, one_f_one_b
from .v_shape import zb_v
from .zero_bubble import interleaved_zb, zb_h1, zb_h2

__all__ = [
    "BUILT_IN",
    "Build",
    "Registry",
    "build_schedule",
    "builders",
    "check_name",
    "reset",
    "schedule_names",
    "schedules_of",
    "stages_per_rank",
    "takes",
]

Build = Callable[..., Schedule]
"""Called with the numbers of ranks and of micro-batches, and with `chunks`, `costs` and `memory` if it has such
arguments and they are given."""

BUILT_IN: dict[str, Build] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager_1f1b": eager_1f1b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}
"""The schedules of this package that need no costs."""
TWO_CHUNKS = ("zb_v", "v_half", "v_min", "dualpipe_v")
"""Those that go down the ranks and back once."""
OPTIONS = ("chunks", "costs", "memory")

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_lock = threading.RLock()
_loaded: Registry | None = None


class Registry:
    """Takes schedules under names; see `hookspecs.ScheduleRegistry`."""

    def __init__(self) -> None:
        from .optimize import optimized

        self.builds: dict[str, Build] = {**BUILT_IN, "optimized": optimized}

    def register(self, name: str, build: Build) -> None:
        """Add a schedule under a name that is not taken yet.

        Args:
            name: what the user writes to choose it: a-z, 0-9, "_", ".", "-".
            build: called with the numbers of ranks and micro-batches, returns a `Schedule` for them. It may have
                arguments `chunks` (stages a rank), `costs` (a `Costs`) and `memory`; they get what the user gives.

        Raises:
            ScheduleError: the name is not allowed or taken, or `build` cannot be called.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ScheduleError(f'schedule name {name!r}: use small letters, digits, "_", "." and "-".')
        if not callable(build):
            raise ScheduleError(f"schedule {name!r}: a function that builds it is needed, {build!r:.200} given.")
        if name in self.builds:
            other = self.builds[name]
            raise ScheduleError(
                f"schedule {name!r} is there already, by {other.__module__}.{getattr(other, '__qualname__', other)}. "
                f"Choose another name, or switch the plugin of one of them off with {OFF}=name."
            )
        self.builds[name] = build


def build_schedule(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    *,
    chunks: int | None = None,
    costs: Any = None,
    memory: float | None = None,
) -> Schedule:
    """Return the schedule of a name for some ranks and micro-batches.

    Args:
        name: one of `schedule_names()`.
        num_ranks: ranks of the pipeline, from 1.
        num_microbatches: micro-batches of a step, from 1; any number works, but what a schedule says of its bubble
            may need a least one.
        chunks: stages a rank; None: what the schedule has by default.
        costs: what actions cost, for schedules that depend on it, such as "optimized".
        memory: bytes a rank may keep, for schedules that depend on it.

    Returns:
        The schedule. Those of plugins have been checked to be valid; ours are by construction.

    Raises:
        ScheduleError: no schedule has that name, a number is not positive, or the schedule does not take an option.
        PluginError: the schedule is one of a plugin, which returned something else.

    Example:
        >>> [str(action) for action in build_schedule("1f1b", 2, 2).actions(0)]
        ['0F0', '0F1', '0B0', '0B1']
    """
    builds = _registry().builds
    check_name(name)
    for what, number in (("num_ranks", num_ranks), ("num_microbatches", num_microbatches), ("chunks", chunks)):
        if number is None and what == "chunks":
            continue
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ScheduleError(f"schedule {name!r}: {what} = {number!r}; it must be a whole number from 1.")
    build = builds[name]
    options = {"chunks": chunks, "costs": costs, "memory": memory}
    given = {option: value for option, value in options.items() if value is not None}
    known = takes(build)
    if chunks == 1 and "chunks" not in known:
        del given["chunks"]
    if chunks not in (None, 2) and name in TWO_CHUNKS:
        raise ScheduleError(f"schedule {name!r} has 2 stages a rank, down the ranks and back; chunks = {chunks} given.")
    for option in given.keys() - known:
        others = ", ".join(other for other in sorted(builds) if option in takes(builds[other]))
        why = f"it has 1 stage a rank; those with more: {others}" if option == "chunks" else f"those that do: {others}"
        raise ScheduleError(f"schedule {name!r} takes no {option} ({options[option]!r:.100} given): {why}.")
    schedule = build(num_ranks, num_microbatches, **given)
    if name not in BUILT_IN:
        _check(name, schedule, num_ranks, num_microbatches)
    return schedule


def check_name(name: object) -> None:
    """Refuse what is no name of a schedule.

    Args:
        name: that was given.

    Raises:
        ScheduleError: there is no such schedule; the message lists those that there are.
    """
    builds = _registry().builds
    if not isinstance(name, str):
        raise ScheduleError(
            f"build_schedule: the name of a schedule comes first, {name!r:.100} given: "
            "build_schedule(name, num_ranks, num_microbatches)."
        )
    if name not in builds:
        near = difflib.get_close_matches(name.lower(), builds, n=2)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ScheduleError(
            f"schedule {name!r} is not known.{meant} There are: {', '.join(sorted(builds))}. A plugin may add others "
            "(python -m vescale_pipe plugins lists what is installed), and a Schedule may be given in place of a name."
        )


def stages_per_rank(name: str) -> int | None:
    """Return how many stages a rank has in a schedule, None where it can be chosen.

    Args:
        name: of the schedule.

    Example:
        >>> stages_per_rank("1f1b"), stages_per_rank("zb_v"), stages_per_rank("interleaved_1f1b")
        (1, 2, None)
    """
    if name in TWO_CHUNKS:
        return 2
    return None if "chunks" in takes(_registry().builds[name]) else 1


def schedules_of(chunks: int) -> list[str]:
    """Return the names of the schedules that can have so many stages a rank, sorted."""
    return [name for name in schedule_names() if stages_per_rank(name) in (None, chunks)]


def schedule_names() -> tuple[str, ...]:
    """Return the names of all schedules, sorted.

    Example:
        >>> "zb_v" in schedule_names()
        True
    """
    return tuple(sorted(_registry().builds))


def builders() -> dict[str, Build]:
    """Return all builders by name."""
    return _registry().builds


def takes(build: Build) -> set[str]:
    """Return which of the options a builder has an argument for."""
    parameters = inspect.signature(build).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(OPTIONS)
    return {parameter.name for parameter in parameters if parameter.name in OPTIONS}


def reset() -> None:
    """Forget what plugins registered: they are asked again at the next use (for tests)."""
    global _loaded
    with _lock:
        _loaded = None


def _check(name: str, schedule: object, num_ranks: int, num_microbatches: int) -> None:
    """Refuse what a builder of a plugin returned if it is not the schedule that it was asked for."""
    if not isinstance(schedule, Schedule):
        raise wrong_answer("vescale_register_schedules", schedule, f"the builder of {name!r} must return a Schedule")
    if (schedule.num_ranks, schedule.num_microbatches) != (num_ranks, num_microbatches):
        raise wrong_answer(
            "vescale_register_schedules",
            schedule.name,
            f"the builder of {name!r} was asked for {num_ranks} ranks and {num_microbatches} micro-batches, and "
            f"returned a schedule for {schedule.num_ranks} and {schedule.num_microbatches}",
        )
    validate(schedule)


def _registry() -> Registry:
    """Return the registry; plugins are asked once."""
    global _loaded
    with _lock:
        if _loaded is None:
            registry = Registry()
            register_schedules(registry)
            _loaded = registry
        return _loaded
