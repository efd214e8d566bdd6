"""The typed functions around the hooks that vescale_rng asks."""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace

import pluggy
import pytest
import torch

from vescale_rng import _hooks, _plugins

hookimpl = pluggy.HookimplMarker("vescale_rng")
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


def test_the_fingerprint_is_that_of_the_plugins() -> None:
    assert _hooks.plugin_fingerprint() == _plugins.fingerprint()
