"""torch's own DTensor, made to draw what one device would draw, by handlers that are put in and taken out again."""

from __future__ import annotations

from .install import install, installed, single_device, uninstall

__all__ = ["install", "installed", "single_device", "uninstall"]
