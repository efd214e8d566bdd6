"""Other formats: safetensors, torch.save files, folders of torch.distributed.checkpoint. No pickle is ever run."""

from .anything import detect, export, import_
from .common import ExportReport, ImportReport
from .dcp import export_dcp
from .dcp_source import import_dcp
from .safetensors import export_safetensors
from .safetensors_source import import_safetensors
from .torch_file import export_torch, import_torch

__all__ = [
    "ExportReport",
    "ImportReport",
    "detect",
    "export",
    "export_dcp",
    "export_safetensors",
    "export_torch",
    "import_",
    "import_dcp",
    "import_safetensors",
    "import_torch",
]
