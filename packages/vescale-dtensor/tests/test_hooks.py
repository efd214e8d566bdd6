"""The typed functions around the hooks that vescale_dtensor asks."""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pluggy
import pytest

from vescale_dtensor import _hooks, _plugins

hookimpl = pluggy.HookimplMarker("vescale_dtensor")
Provide = Callable[..., None]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provide]:
    """Register functions as the only plugin."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()

    def register(*functions: Callable[..., object]) -> None:
        plugin = ModuleType("toy")
        vars(plugin).update({function.__name__: hookimpl(function) for function in functions})
        _plugins.manager().register(plugin, name=f"toy-{len(_plugins.describe())}")

    yield register
    _plugins.reset()


class Registry:
    """Keeps what was registered."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def register(self, name: str, value: object) -> None:
        self.names.append(name)


def test_random_provider_is_handed_out_if_it_is_complete(provide: Provide) -> None:
    complete = SimpleNamespace(scope=print, fill=print)
    answers: list[object] = [complete, SimpleNamespace(), None]

    def vescale_random() -> object:
        return answers.pop(0)

    assert _hooks.random_provider() is None
    provide(vescale_random)
    assert _hooks.random_provider() is complete
    with pytest.raises(_plugins.PluginError, match=r"vescale_random was answered .* lacks scope, fill"):
        _hooks.random_provider()
    assert _hooks.random_provider() is None


def test_collectives_is_handed_out_if_it_is_complete(provide: Provide) -> None:
    complete = SimpleNamespace(all_reduce=print, all_gather=print, reduce_scatter=print, all_to_all=print)
    answers: list[object] = [complete, SimpleNamespace(), None]

    def vescale_collectives() -> object:
        return answers.pop(0)

    assert _hooks.collectives() is None
    provide(vescale_collectives)
    assert _hooks.collectives() is complete
    with pytest.raises(
        _plugins.PluginError,
        match=r"vescale_collectives was answered .* lacks all_reduce, all_gather, reduce_scatter, all_to_all",
    ):
        _hooks.collectives()
    assert _hooks.collectives() is None


def test_timeline_is_handed_out_if_it_is_complete(provide: Provide) -> None:
    complete = SimpleNamespace(begin=print, end=print)
    answers: list[object] = [complete, SimpleNamespace(), None]

    def vescale_timeline() -> object:
        return answers.pop(0)

    assert _hooks.timeline() is None
    provide(vescale_timeline)
    assert _hooks.timeline() is complete
    with pytest.raises(_plugins.PluginError, match=r"vescale_timeline was answered .* lacks begin, end"):
        _hooks.timeline()
    assert _hooks.timeline() is None


def test_every_plugin_may_register_ops(provide: Provide) -> None:
    def vescale_register_ops(registry: Registry) -> None:
        registry.register("mine", object())

    registry = Registry()
    _hooks.register_ops(registry)
    assert registry.names == []
    provide(vescale_register_ops)
    provide(vescale_register_ops)
    _hooks.register_ops(registry)
    assert registry.names == ["mine", "mine"]


def test_every_plugin_may_register_plans(provide: Provide) -> None:
    def vescale_register_plans(registry: Registry) -> None:
        registry.register("mine", object())

    registry = Registry()
    _hooks.register_plans(registry)
    assert registry.names == []
    provide(vescale_register_plans)
    provide(vescale_register_plans)
    _hooks.register_plans(registry)
    assert registry.names == ["mine", "mine"]


def test_the_fingerprint_is_that_of_the_plugins() -> None:
    assert _hooks.plugin_fingerprint() == _plugins.fingerprint()
