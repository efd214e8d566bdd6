"""Checkpoints that load into any layout: asynchronous, deduplicated, checked, and never half-written."""

from ._checkpointer import Checkpointer
from ._interop import (
    ExportReport,
    ImportReport,
    export_dcp,
    export_safetensors,
    export_torch,
    import_dcp,
    import_safetensors,
    import_torch,
)
from ._load import Checkpoint, LoadReport, TensorView, load, load_dict
from ._load import open_checkpoint as open
from ._ops import (
    DiffReport,
    Finding,
    GcReport,
    Keep,
    StepReport,
    TensorDiff,
    ValueDiff,
    VerifyReport,
    diff,
    gc,
    pin,
    unpin,
    verify,
)
from ._reshard import reshard
from ._save import Progress, SaveHandle, SaveInfo, StagingPool, async_save, save
from ._state import local
from .errors import (
    CheckpointError,
    CorruptionError,
    FormatError,
    LayoutError,
    MismatchError,
    MissingStepError,
    RanksError,
    StateError,
    StorageError,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "CorruptionError",
    "DiffReport",
    "ExportReport",
    "Finding",
    "FormatError",
    "GcReport",
    "ImportReport",
    "Keep",
    "LayoutError",
    "LoadReport",
    "MismatchError",
    "MissingStepError",
    "Progress",
    "RanksError",
    "SaveHandle",
    "SaveInfo",
    "StagingPool",
    "StateError",
    "StepReport",
    "StorageError",
    "TensorDiff",
    "TensorView",
    "ValueDiff",
    "VerifyReport",
    "__version__",
    "async_save",
    "diff",
    "export_dcp",
    "export_safetensors",
    "export_torch",
    "gc",
    "import_dcp",
    "import_safetensors",
    "import_torch",
    "load",
    "load_dict",
    "local",
    "open",
    "pin",
    "reshard",
    "save",
    "unpin",
    "verify",
]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-ckpt")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
