"""Compressors by name."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pluggy
import pytest
import torch

from vescale_comm import _plugins, plan_group
from vescale_comm._compress import Compressor, compressor_factory, compressor_named, compressor_names
from vescale_comm._compress.plain import Uncompressed
from vescale_comm._compress.registry import Registry, registry

hookimpl = pluggy.HookimplMarker("vescale_comm")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """What a plugin registers; names are looked up anew."""
    monkeypatch.setenv(_plugins.OFF, "all")
    _plugins.reset()
    registry.cache_clear()
    wanted: list[tuple[str, Any]] = []

    def vescale_register_compressors(registry: Registry) -> None:
        for name, factory in wanted:
            registry.register(name, factory)

    module = ModuleType("toy")
    module.vescale_register_compressors = hookimpl(vescale_register_compressors)  # type: ignore[attr-defined]
    _plugins.manager().register(module, name="toy")
    yield wanted
    _plugins.reset()
    registry.cache_clear()


def test_plugins_add_names(plugin: list[tuple[str, Any]]) -> None:
    plugin.append(("mine", Uncompressed))
    assert compressor_names() == ["bf16", "fp16", "int8", "mine", "none", "powersgd", "topk"]
    assert compressor_named("mine") is Uncompressed
    with pytest.raises(ValueError, match="there is no 'int4'; there are bf16, fp16, int8, mine"):
        compressor_named("int4")


@pytest.mark.parametrize("name", ["int8", "mine"])
def test_a_name_is_taken_once(plugin: list[tuple[str, Any]], name: str) -> None:
    plugin += [("mine", Uncompressed), (name, Uncompressed)]
    with pytest.raises(ValueError, match=f"the compressor '{name}' is registered as .* already"):
        compressor_named("none")


def test_what_is_no_compressor_is_refused(plugin: list[tuple[str, Any]]) -> None:
    plugin.append(("mine", 3))
    with pytest.raises(TypeError, match="needs a name and a function; got 'mine' and 3"):
        compressor_names()


def test_a_factory_is_made_of_what_the_user_wrote() -> None:
    assert compressor_factory(None, {}) is None
    plan = plan_group([], 2)
    make = compressor_factory("topk", {"ratio": 0.5})
    assert make is not None
    made: Compressor = make(plan, torch.float32, torch.device("cpu"))
    assert made.wire_bytes == 0
    assert compressor_factory(lambda plan, dtype, device, **options: Uncompressed(plan, dtype, device), {"any": 1})
    for given, options, text in [
        (None, {"rank": 1}, "were given without a compressor"),
        (3, {}, "needs a name or a function of plan, dtype and device; got 3"),
        ("topk", {"ration": 0.5}, r"'topk' has no option ration; it has ratio, feedback"),
        ("none", {"rank": 1}, r"'none' has no option rank; it has none"),
    ]:
        with pytest.raises(TypeError, match=text):
            compressor_factory(given, options)
    make = compressor_factory(lambda plan, dtype, device: object(), {})
    assert make is not None
    with pytest.raises(TypeError, match="lacks reduce, state_dict, load_state_dict, wire_bytes"):
        make(plan, torch.float32, torch.device("cpu"))
