"""Activation checkpointing of DTensors, whose recomputation must see what the first run saw.

The check compares saved tensors of both runs; it must see local parts both times. (A result that needs no gradient,
such as the indices of `topk`, is kept by the recomputation as the very object that is labelled afterwards.)
The arguments of a checkpointed function come back as plain local parts where saved-tensor hooks are on: those of a
checkpoint around it, or `save_on_cpu`. They are labelled again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from .function import labelled, specs_of

_Disabled = torch._C.DisableTorchFunctionSubclass


def install() -> None:
    """Make the default check of `torch.utils.checkpoint` look at local parts; may be called again."""
    checks = checkpoint._allowed_determinism_checks_to_fns
    original = checks["default"]
    if hasattr(original, "_vescale_wrapped"):
        return

    def local_metadata(x: Tensor) -> Any:
        with _Disabled():
            return original(x)

    local_metadata._vescale_wrapped = original  # type: ignore[attr-defined]
    checks["default"] = local_metadata
    if hasattr(checkpoint._CheckpointFrame, "get_inputs"):  # before torch 2.13 an autograd.Function keeps them
        _keep_labels(checkpoint._CheckpointFrame)


def _keep_labels(frame: Any) -> None:
    save, get = frame.save_inputs, frame.get_inputs

    def save_inputs(self: Any, *args: Any) -> None:
        self._vescale_specs = specs_of(args)
        save(self, *args)

    def get_inputs(self: Any) -> list[Any]:
        with torch.enable_grad():  # backward has switched it off, and the alias would lose its graph
            return list(map(labelled, get(self), self._vescale_specs))

    frame.save_inputs, frame.get_inputs = save_inputs, get_inputs
