"""Portable mode: random numbers that are the same on every device, machine, world size and sharding."""

from __future__ import annotations

from .generator import PortableGenerator
from .mode import portable
from .source import PortableSource

__all__ = ["PortableGenerator", "PortableSource", "portable"]
