"""Run the code of many ranks in one process, bit for bit as real processes would, and find where two runs differ.

`emulate` runs a training function for every rank of a world. `record` and `compare` name the first collective, tensor
and rank in which two runs, real or emulated, differ. `all_reduce` and its siblings are what backends compute, as
functions of the tensors of all ranks; `orders` has the backends by name.

    def step(rank):
        with record(keep=True) as recording:
            model = DistributedDataParallel(make_model())
            model(batch(rank)).sum().backward()
            recording.note_module(model, "step 0")
        return recording

    print(compare(emulate(step, 64, "gloo"), emulate(step, 64, "canonical")))

That prints None: gradients add in the order of ranks, whatever the backend does. With `order="native"` and
`transport="native"` the line names the first all_reduce that differs.

On real processes `record` works the same, and `recording.gather()` brings the recordings of all ranks together.
"""

from __future__ import annotations

from ._emulator.choose import ORDERS as orders
from ._emulator.compare import Difference, compare
from ._emulator.gloo import GlooOrder
from ._emulator.group import is_emulated
from ._emulator.nccl import NcclRing, NcclTree
from ._emulator.orders import CanonicalOrder, Node, Order, Segment, chain
from ._emulator.recorder import Event, Recording, record
from ._emulator.run import EmulatedRankError, emulate
from ._emulator.selftest import OrderCheck, check_order
from ._emulator.sums import (
    all_reduce,
    all_reduce_coalesced,
    identify,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)
from ._emulator.transport import EmulatedTransport
from ._emulator.turns import DeadlockError

__all__ = [
    "CanonicalOrder",
    "DeadlockError",
    "Difference",
    "EmulatedRankError",
    "EmulatedTransport",
    "Event",
    "GlooOrder",
    "NcclRing",
    "NcclTree",
    "Node",
    "Order",
    "OrderCheck",
    "Recording",
    "Segment",
    "all_reduce",
    "all_reduce_coalesced",
    "chain",
    "check_order",
    "compare",
    "emulate",
    "identify",
    "is_emulated",
    "orders",
    "record",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
]
