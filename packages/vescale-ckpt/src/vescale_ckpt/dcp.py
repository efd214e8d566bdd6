"""Adapters for torch.distributed.checkpoint: its `save`, `async_save` and `load` with this package's format.

One line changes: `dcp.save(state, storage_writer=VescaleWriter("run/", step=1000))`, and
`dcp.load(state, storage_reader=VescaleReader("run/"))`.
"""

from __future__ import annotations

from ._interop.dcp_reader import VescaleReader
from ._interop.dcp_writer import VescaleWriter

__all__ = ["VescaleReader", "VescaleWriter"]
