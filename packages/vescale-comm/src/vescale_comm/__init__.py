"""Gradient reduction, sharded optimizers and communication planning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .errors import CommError, MismatchError, NotFiniteError, PlanError, StaleParameterError, TransportError

if TYPE_CHECKING:
    from . import emulator
    from ._compress import Compressor, compressor_names, compressor_state_dict, load_compressor_state_dict
    from ._fsdp import ShardInfo, full_parameters, fully_shard, load_optimizer_state, optimizer_state
    from ._mesh import MeshReducer, calibrate, reduce_over
    from ._no_sync import no_sync
    from ._optimizer import DistributedOptimizer, clip_grad_norm_, get_total_norm
    from ._plan import (
        Block,
        BufferPlan,
        Knobs,
        ModelPlan,
        Rows,
        TensorSpec,
        Whole,
        model_units,
        plan_buckets,
        plan_group,
        plan_model,
        plan_ragged,
        read_units,
    )
    from ._replicate import DistributedDataParallel, forget_replica, replicate, replicated
    from ._report import AxisCost, CommReport, HostCosts, MeshCosts, Prediction, comm_report, predict
    from ._transport import Transport, Work, transport

__all__ = [
    "AxisCost",
    "Block",
    "BufferPlan",
    "CommError",
    "CommReport",
    "Compressor",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "HostCosts",
    "Knobs",
    "MeshCosts",
    "MeshReducer",
    "MismatchError",
    "ModelPlan",
    "NotFiniteError",
    "PlanError",
    "Prediction",
    "Rows",
    "ShardInfo",
    "StaleParameterError",
    "TensorSpec",
    "Transport",
    "TransportError",
    "Whole",
    "Work",
    "__version__",
    "calibrate",
    "clip_grad_norm_",
    "comm_report",
    "compressor_names",
    "compressor_state_dict",
    "emulator",
    "forget_replica",
    "full_parameters",
    "fully_shard",
    "get_total_norm",
    "load_compressor_state_dict",
    "load_optimizer_state",
    "model_units",
    "no_sync",
    "optimizer_state",
    "plan_buckets",
    "plan_group",
    "plan_model",
    "plan_ragged",
    "predict",
    "read_units",
    "reduce_over",
    "replicate",
    "replicated",
    "transport",
]

_HOMES = {
    "_compress": ("Compressor", "compressor_names", "compressor_state_dict", "load_compressor_state_dict"),
    "_fsdp": ("ShardInfo", "full_parameters", "fully_shard", "load_optimizer_state", "optimizer_state"),
    "_mesh": ("MeshReducer", "calibrate", "reduce_over"),
    "_no_sync": ("no_sync",),
    "_optimizer": ("DistributedOptimizer", "clip_grad_norm_", "get_total_norm"),
    "_plan": (
        *("Block", "BufferPlan", "Knobs", "ModelPlan", "Rows", "TensorSpec", "Whole", "model_units", "plan_buckets"),
        *("plan_group", "plan_model", "plan_ragged", "read_units"),
    ),
    "_replicate": ("DistributedDataParallel", "forget_replica", "replicate", "replicated"),
    "_report": ("AxisCost", "CommReport", "HostCosts", "MeshCosts", "Prediction", "comm_report", "predict"),
    "_transport": ("Transport", "Work", "transport"),
}
"""Who plans buffers does not wait for torch to be imported: each part is, when it is used."""
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-comm")
    if name == "emulator":
        return importlib.import_module(".emulator", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
