"""What a test may change in its process, as far as torch lets us ask: compared around tests on a pool."""

from __future__ import annotations

import os
import random
import sys
from typing import Any


def reseed() -> None:
    """Seed every generator that tests use, so that each test starts alike on all ranks."""
    import torch

    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def snapshot() -> dict[str, Any]:
    """Return the process-wide settings that a test could leave changed."""
    import torch
    import torch.distributed as dist

    return {
        "grad mode enabled": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic warn-only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "number of threads": torch.get_num_threads(),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
        "default process group": dist.group.WORLD if dist.is_initialized() else None,
        "working directory": os.getcwd(),
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Describe what changed, one line each."""
    return [f"{name}: {before[name]} before, {after[name]} after" for name in before if before[name] != after[name]]


def num_groups() -> int:
    """Count the process groups alive in this process."""
    import torch.distributed as dist

    return len(dist.distributed_c10d._world.pg_map)
