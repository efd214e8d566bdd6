"""Modules that pytest can search for doctests only where their import is installed."""

from __future__ import annotations

import importlib.util

collect_ignore = []
if importlib.util.find_spec("triton") is None:
    collect_ignore += [
        "src/vescale_rng/_portable/triton_kernel.py",
        "tests/portable/triton_check.py",
        "tests/portable/triton_compile.py",
    ]
