"""Loading: which chunks hold what is wanted, reading them, and putting a state together."""

from .checkpoint import Checkpoint, open_checkpoint
from .fresh import load_dict
from .into import LoadReport, load
from .reader import Damage, ReadStats
from .target import Request
from .view import TensorView

__all__ = [
    "Checkpoint",
    "Damage",
    "LoadReport",
    "ReadStats",
    "Request",
    "TensorView",
    "load",
    "load_dict",
    "open_checkpoint",
]
