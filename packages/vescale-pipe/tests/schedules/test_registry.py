"""Schedules by name: ours, those of plugins, and what is refused."""

from collections.abc import Callable, Iterator
from types import ModuleType

import pluggy
import pytest

from vescale_pipe import _plugins
from vescale_pipe._schedule import Action, Kind, Schedule
from vescale_pipe._schedules import build_schedule, schedule_names
from vescale_pipe._schedules.registry import Registry, reset
from vescale_pipe.errors import ScheduleError

hookimpl = pluggy.HookimplMarker("vescale_pipe")


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let the only plugin register builders under names."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()
    reset()

    def register(**builders: object) -> None:
        @hookimpl
        def vescale_register_schedules(registry: Registry) -> None:
            for name, build in builders.items():
                registry.register(name, build)

        plugin = ModuleType("toy")
        plugin.vescale_register_schedules = vescale_register_schedules
        _plugins.manager().register(plugin, name="toy")

    yield register
    _plugins.reset()
    reset()


def serial(num_ranks: int, num_microbatches: int) -> Schedule:
    rows = [
        [Action(kind, rank, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.B)]
        for rank in range(num_ranks)
    ]
    return Schedule.of("serial", range(num_ranks), num_microbatches, rows)


def test_all_that_the_readme_promises_is_there():
    ours = "gpipe 1f1b eager_1f1b interleaved_1f1b looped_bfs zb_h1 zb_h2 interleaved_zb zb_v v_half v_min dualpipe_v"
    assert set(ours.split()) | {"optimized"} <= set(schedule_names())
    assert schedule_names() == tuple(sorted(schedule_names()))


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ScheduleError, match=r"'2f2b' is not known. There are: 1f1b, .*zb_v"):
        build_schedule("2f2b", 2, 2)
    with pytest.raises(ScheduleError, match=r"'Interleaved-1F1B' is not known. Did you mean 'interleaved_1f1b'"):
        build_schedule("Interleaved-1F1B", 2, 2)
    with pytest.raises(
        ScheduleError, match=r"the name of a schedule comes first, 2 given: build_schedule\(name, num_ra"
    ):
        build_schedule(2, 4, "1f1b")


@pytest.mark.parametrize(
    ("ranks", "count", "chunks", "text"),
    [
        (0, 4, None, "num_ranks = 0; it must be a whole number from 1"),
        (2, 0, None, "num_microbatches = 0; it"),
        (2, -3, None, "num_microbatches = -3; it"),
        (2, 2.0, None, "num_microbatches = 2.0; it"),
        (True, 2, None, "num_ranks = True; it"),
        (None, 2, None, "num_ranks = None; it"),
        (2, 2, 0, "chunks = 0; it"),
    ],
)
def test_numbers_must_be_whole_and_positive(ranks, count, chunks, text):
    with pytest.raises(ScheduleError, match=text):
        build_schedule("looped_bfs", ranks, count, chunks=chunks)


def test_chunks_of_a_schedule_that_has_one_stage_a_rank():
    assert build_schedule("1f1b", 2, 3, chunks=1) == build_schedule("1f1b", 2, 3)
    with pytest.raises(ScheduleError, match=r"'1f1b' takes no chunks \(2 given\): it has 1 stage a rank.*looped_bfs"):
        build_schedule("1f1b", 2, 3, chunks=2)


@pytest.mark.parametrize("name", ["zb_v", "v_half", "v_min", "dualpipe_v"])
def test_v_shapes_have_two_chunks(name):
    assert build_schedule(name, 2, 3, chunks=2) == build_schedule(name, 2, 3)
    for chunks in (1, 3):
        with pytest.raises(ScheduleError, match=f"2 stages a rank, down the ranks and back; chunks = {chunks} given"):
            build_schedule(name, 2, 3, chunks=chunks)


def test_options_that_a_schedule_has_no_use_for_are_refused():
    with pytest.raises(ScheduleError, match=r"'gpipe' takes no memory \(3 given\): those that do: optimized"):
        build_schedule("gpipe", 2, 3, memory=3)


def test_a_plugin_adds_a_schedule(provide):
    provide(serial=serial)
    assert "serial" in schedule_names()
    assert build_schedule("serial", 2, 3) == serial(2, 3)


def test_a_builder_gets_the_options_it_has_arguments_for(provide):
    got = []

    def one(num_ranks: int, num_microbatches: int, chunks: int = 5) -> Schedule:
        got.append(chunks)
        return serial(num_ranks, num_microbatches)

    def every(num_ranks: int, num_microbatches: int, **options: object) -> Schedule:
        got.append(options)
        return serial(num_ranks, num_microbatches)

    provide(one=one, every=every)
    build_schedule("one", 1, 1)
    build_schedule("one", 1, 1, chunks=1)
    build_schedule("every", 1, 1, memory=7)
    assert got == [5, 1, {"memory": 7}]


def test_plugins_are_asked_once(provide):
    provide(serial=serial)
    schedule_names()
    _plugins.reset()
    assert "serial" in schedule_names()


@pytest.mark.parametrize("name", ["", "Has space", "UPPER", 3])
def test_names_are_small_words(name):
    with pytest.raises(ScheduleError, match="use small letters"):
        Registry().register(name, serial)


def test_a_taken_name_says_who_has_it():
    registry = Registry()
    with pytest.raises(ScheduleError, match=r"'1f1b' is there already, by vescale_pipe\..*one_f_one_b.*switch"):
        registry.register("1f1b", serial)
    registry.register("mine", serial)
    with pytest.raises(ScheduleError, match=r"'mine' is there already, by .*serial"):
        registry.register("mine", serial)


def test_a_builder_must_be_callable():
    with pytest.raises(ScheduleError, match="a function that builds it is needed, 7 given"):
        Registry().register("mine", 7)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda num_ranks, num_microbatches: [["0F0"]], "must return a Schedule"),
        (lambda num_ranks, num_microbatches: serial(num_ranks, 1), "asked for 2 ranks and 3 micro-batches"),
    ],
)
def test_what_a_plugin_returns_is_looked_at(provide, build, text):
    provide(mine=build)
    with pytest.raises(_plugins.PluginError, match=text):
        build_schedule("mine", 2, 3)


def test_an_invalid_schedule_of_a_plugin_is_refused(provide):
    def backwards_first(num_ranks: int, num_microbatches: int) -> Schedule:
        return Schedule.of("bad", [0], 1, [[Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)]])

    provide(bad=backwards_first)
    with pytest.raises(ScheduleError, match="0B0"):
        build_schedule("bad", 1, 1)
