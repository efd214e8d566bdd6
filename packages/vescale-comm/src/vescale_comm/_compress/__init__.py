"""Gradient compression per bucket: fewer bytes on the wire, and what was left out is sent later (error feedback)."""

from .factory import compressor_factory
from .interface import Compressor
from .owners import compressor_state_dict, load_compressor_state_dict
from .registry import compressor_named, compressor_names

__all__ = [
    "Compressor",
    "compressor_factory",
    "compressor_named",
    "compressor_names",
    "compressor_state_dict",
    "load_compressor_state_dict",
]
