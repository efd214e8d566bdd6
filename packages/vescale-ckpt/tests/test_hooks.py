"""The typed functions around the hooks that vescale_ckpt asks."""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pluggy
import pytest
import torch

from vescale_ckpt import _hooks, _plugins

hookimpl = pluggy.HookimplMarker("vescale_ckpt")
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


def whole(tensor: torch.Tensor) -> SimpleNamespace:
    box = SimpleNamespace(offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))
    return SimpleNamespace(
        global_shape=tuple(tensor.shape),
        global_stride=tensor.stride(),
        boxes=[box],
        local=tensor,
        replicas=(0, 1),
        partial=False,
    )


def test_a_layout_comes_from_the_plugin_that_knows_the_tensor(provide: Provide) -> None:
    def vescale_layout(tensor: torch.Tensor) -> object:
        return whole(tensor) if tensor.ndim == 2 else None

    assert _hooks.plugin_layout(torch.ones(2, 3)) is None
    provide(vescale_layout)
    layout = _hooks.plugin_layout(torch.ones(2, 3))
    assert layout is not None
    assert layout.boxes[0].shape == (2, 3)
    assert _hooks.plugin_layout(torch.ones(2)) is None


def test_a_layout_that_lacks_something_is_refused(provide: Provide) -> None:
    def vescale_layout() -> object:
        return SimpleNamespace(global_shape=(2,), boxes=[], local=None)

    provide(vescale_layout)
    with pytest.raises(_plugins.PluginError, match=r"lacks global_stride, replicas, partial.*\n.*toy-0"):
        _hooks.plugin_layout(torch.ones(2))


def test_a_target_comes_from_the_plugin_that_knows_the_class(provide: Provide) -> None:
    def vescale_from_layout(like: torch.Tensor, boxes: list[Any]) -> object:
        return torch.empty(boxes[0].shape, dtype=like.dtype) if like.dtype == torch.float64 else "nothing"

    boxes: Any = [SimpleNamespace(offset=(0,), shape=(3,))]
    like = torch.ones(4, dtype=torch.float64)
    assert _hooks.plugin_from_layout(like, boxes) is None
    provide(vescale_from_layout)
    target = _hooks.plugin_from_layout(like, boxes)
    assert target is not None
    assert target.shape == (3,)
    with pytest.raises(_plugins.PluginError, match="lacks shape, dtype, device"):
        _hooks.plugin_from_layout(like.float(), boxes)


def test_every_plugin_may_register_storage(provide: Provide) -> None:
    def vescale_register_storage(registry: Registry) -> None:
        registry.register("mine", object())

    registry = Registry()
    _hooks.register_storage(registry)
    assert registry.names == []
    provide(vescale_register_storage)
    provide(vescale_register_storage)
    _hooks.register_storage(registry)
    assert registry.names == ["mine", "mine"]


def test_every_plugin_may_register_codecs(provide: Provide) -> None:
    def vescale_register_codecs(registry: Registry) -> None:
        registry.register("mine", object())

    registry = Registry()
    _hooks.register_codecs(registry)
    assert registry.names == []
    provide(vescale_register_codecs)
    provide(vescale_register_codecs)
    _hooks.register_codecs(registry)
    assert registry.names == ["mine", "mine"]


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


def test_the_fingerprint_is_that_of_the_plugins() -> None:
    assert _hooks.plugin_fingerprint() == _plugins.fingerprint()
