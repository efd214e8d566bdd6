"""Cutting a model into stages without a change to it, or putting stages together by hand."""

from .graph import Crossing, Port, Stage, StageGraph, Unit
from .manual import manual
from .split import split

__all__ = ["Crossing", "Port", "Stage", "StageGraph", "Unit", "manual", "split"]
