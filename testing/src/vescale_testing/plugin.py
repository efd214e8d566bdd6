"""The pytest plugin: `@pytest.mark.ranks(4)` and `@pytest.mark.fake_ranks(1024)`.

Load it from the top-level conftest.py with `pytest_plugins = ["vescale_testing.plugin"]`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vescale_testing import ranks
from vescale_testing._client import ServerDied

_MADE_BY_RANKS = ("rank", "world", "monkeypatch")
_configs: list[pytest.Config] = []


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    _configs.append(config)
    config.addinivalue_line(
        "markers",
        "ranks(n, timeout=60, pool=False): run the test's body on n gloo ranks; fixtures `rank` and `world`; "
        "pool: on processes that live on",
    )
    config.addinivalue_line(
        "markers",
        "fake_ranks(n, ranks=None): run the test in a fake process group of n, once per listed rank; "
        "fixtures `rank` and `world`; by default the first two, the middle and the last",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every process when the outermost session ends."""
    if config in _configs:
        _configs.remove(config)
    if not _configs:
        ranks.shut_down()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Warm the fork server up while the first tests run, and spare collections of garbage what is here to stay."""
    gc.collect()
    gc.freeze()
    if not session.config.option.collectonly and any(item.get_closest_marker("ranks") for item in session.items):
        ranks.start()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat a fake_ranks test over its ranks."""
    marker = metafunc.definition.get_closest_marker("fake_ranks")
    if marker is not None and "rank" in metafunc.fixturenames:
        world = marker.args[0]
        chosen = marker.kwargs.get("ranks") or sorted({0, min(1, world - 1), world // 2, world - 1})
        metafunc.parametrize("rank", chosen, ids=[f"rank{number}" for number in chosen])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let `@given` tests on ranks take fixtures: ranks get plain values, the same for every example."""
    function = getattr(item, "function", None)
    settings = getattr(function, "_hypothesis_internal_use_settings", None)
    if settings is None or item.get_closest_marker("ranks") is None:
        return
    from hypothesis import HealthCheck

    suppressed = {*settings.suppress_health_check, HealthCheck.function_scoped_fixture}
    vars(function)["_hypothesis_internal_use_settings"] = type(settings)(
        settings, suppress_health_check=list(suppressed)
    )


@pytest.fixture
def rank() -> int:
    """Return this rank's number; inside a `ranks` test the ranks fill it in."""
    return 0


@pytest.fixture
def world(request: pytest.FixtureRequest) -> int:
    """Return the number of ranks."""
    for name in ("ranks", "fake_ranks"):
        marker = request.node.get_closest_marker(name)
        if marker is not None:
            return int(marker.args[0])
    return 1


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Run the body of a marked test on its ranks."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is not None:
        _call_on_ranks(pyfuncitem, **_options(marker))
        return True
    marker = pyfuncitem.get_closest_marker("fake_ranks")
    if marker is not None:
        from vescale_testing.fake import fake_ranks

        kwargs: dict[str, Any] = {n: pyfuncitem.funcargs[n] for n in pyfuncitem._fixtureinfo.argnames}
        with fake_ranks(marker.args[0], rank=kwargs.get("rank", 0)):
            pyfuncitem.obj(**kwargs)
        return True
    return None


def _options(marker: pytest.Mark) -> dict[str, Any]:
    unknown = set(marker.kwargs) - {"timeout", "pool"}
    if len(marker.args) != 1 or not isinstance(marker.args[0], int) or unknown:
        pytest.fail(
            f"@pytest.mark.ranks takes one number of ranks and the keywords timeout and pool, got args "
            f"{marker.args} and keywords {sorted(marker.kwargs)}",
            pytrace=False,
        )
    return {"world": marker.args[0], "timeout": 60.0, "pool": False, **marker.kwargs}


def _call_on_ranks(item: pytest.Function, *, world: int, timeout: float, pool: bool) -> None:
    __tracebackhide__ = True
    names = [name for name in item._fixtureinfo.argnames if name not in _MADE_BY_RANKS]
    function = item.originalname or item.name
    qualname = f"{item.cls.__qualname__}.{function}" if item.cls is not None else function
    try:
        kwargs = {name: item.funcargs[name] for name in names}
        job = ranks.make_job(str(item.path), item.module.__name__, qualname, kwargs, keep_value=False)
        run, _ = ranks.run_job(job, world, timeout=timeout, pool=pool)
    except pytest.skip.Exception as skipped:
        raise pytest.skip.Exception(skipped.msg, _use_item_location=True) from None
    except (ServerDied, TypeError, ValueError) as error:
        pytest.fail(str(error), pytrace=False)
    for line in _output_lines(run.outputs):
        sys.stdout.write(line)


def _output_lines(outputs: dict[int, str]) -> Iterator[str]:
    for number, output in sorted(outputs.items()):
        for line in output.splitlines():
            yield f"[rank {number}] {line}\n"
