"""Load a test file inside a rank: by its path, with pytest's rewritten asserts, without any cache on disk.

Under `--import-mode=importlib` a test file cannot be imported by name, so its functions cannot be pickled.
Ranks get path and name instead, and register the module under the name that the test process uses: objects of
classes defined in the test file then travel both ways.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_codes: dict[tuple[str, int, int], CodeType] = {}


def compile_file(path: str) -> CodeType:
    """Compile a file with rewritten asserts; remembered in memory until the file changes."""
    from _pytest.assertion.rewrite import rewrite_asserts

    stat = Path(path).stat()
    key = (path, stat.st_mtime_ns, stat.st_size)
    if key not in _codes:
        source = Path(path).read_bytes()
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        _codes[key] = compile(tree, path, "exec", dont_inherit=True)
    return _codes[key]


class _Loader(importlib.abc.Loader):
    def __init__(self, path: str) -> None:
        self.path = path

    def exec_module(self, module: ModuleType) -> None:
        exec(compile_file(self.path), module.__dict__)


def load_module(name: str, path: str) -> ModuleType:
    """Return the module of a file, running the file if this process has not done so yet."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == path:
        return known
    _import_parents(name)
    if Path(path).name == "__init__.py":
        return importlib.import_module(name)
    spec = importlib.machinery.ModuleSpec(name, _Loader(path), origin=path)
    spec.has_location = True
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        exec(compile_file(path), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_parents(name: str) -> None:
    """Make `a` and `a.b` importable for `a.b.c`: pickle looks names up from the top."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent in sys.modules:
            continue
        try:
            importlib.import_module(parent)
        except ImportError:
            stand_in = ModuleType(parent)
            stand_in.__path__ = []
            sys.modules[parent] = stand_in


def find_function(module: ModuleType, qualname: str) -> Any:
    """Look up `function` or `Class.method`; a method comes bound to a new object of its class."""
    *classes, name = qualname.split(".")
    owner: Any = module
    for part in classes:
        owner = getattr(owner, part)
    return getattr(owner() if classes else owner, name)
