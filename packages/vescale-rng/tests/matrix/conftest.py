"""Gives the tests of this folder the big table, which is also a script."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("table.py")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vescale_rng_matrix_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_table = _load()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize over the operators of the table."""
    if "operator" in metafunc.fixturenames:
        metafunc.parametrize("operator", _table.OPERATORS)
    if "core_operator" in metafunc.fixturenames:
        metafunc.parametrize("core_operator", _table.CORE)


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """The module with the table."""
    return _table


@pytest.fixture(scope="session")
def script() -> Path:
    """The file with the table."""
    return SCRIPT
