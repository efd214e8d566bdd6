"""The typed functions around the hooks that vescale_pipe asks."""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch

from vescale_pipe import _hooks, _plugins

hookimpl = pluggy.HookimplMarker("vescale_pipe")
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


def test_every_plugin_may_register_schedules(provide: Provide) -> None:
    def vescale_register_schedules(registry: Registry) -> None:
        registry.register("mine", object())

    registry = Registry()
    _hooks.register_schedules(registry)
    assert registry.names == []
    provide(vescale_register_schedules)
    provide(vescale_register_schedules)
    _hooks.register_schedules(registry)
    assert registry.names == ["mine", "mine"]


def test_a_stage_is_wrapped_by_all_plugins_the_first_one_innermost(provide: Provide) -> None:
    mesh: Any = object()
    stage = torch.nn.Linear(2, 2)

    def vescale_wrap_stage(module: torch.nn.Module) -> Callable[[torch.nn.Module], torch.nn.Module]:
        assert module is stage
        return torch.nn.Sequential

    assert _hooks.wrap_stage(stage, mesh) is stage
    provide(vescale_wrap_stage)
    provide(vescale_wrap_stage)
    wrapped = _hooks.wrap_stage(stage, mesh)
    assert isinstance(wrapped, torch.nn.Sequential)
    assert isinstance(wrapped[0], torch.nn.Sequential)
    assert wrapped[0][0] is stage


@pytest.mark.parametrize("answer", [7, lambda module: 7])
def test_a_wrapper_must_return_a_module(provide: Provide, answer: object) -> None:
    mesh: Any = object()

    def vescale_wrap_stage() -> object:
        return answer

    provide(vescale_wrap_stage)
    with pytest.raises(_plugins.PluginError, match="vescale_wrap_stage was answered"):
        _hooks.wrap_stage(torch.nn.Linear(2, 2), mesh)


def test_the_fingerprint_is_that_of_the_plugins() -> None:
    assert _hooks.plugin_fingerprint() == _plugins.fingerprint()
