"""What is done to a store beside saving and loading: verify, diff, retention, pins, and what `ls` and `show` tell."""

from __future__ import annotations

from .describe import Leaf, StepInfo, StepView, StoreView, describe, layout_text, steps
from .diff import DiffReport, TensorDiff, ValueDiff, diff
from .gc import GcReport, gc
from .pins import pin, unpin
from .retention import Keep, Saved
from .verify import Finding, StepReport, VerifyReport, verify

__all__ = [
    "DiffReport",
    "Finding",
    "GcReport",
    "Keep",
    "Leaf",
    "Saved",
    "StepInfo",
    "StepReport",
    "StepView",
    "StoreView",
    "TensorDiff",
    "ValueDiff",
    "VerifyReport",
    "describe",
    "diff",
    "gc",
    "layout_text",
    "pin",
    "steps",
    "unpin",
    "verify",
]
