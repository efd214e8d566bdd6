"""Transports: collectives behind one small interface, in place on flat buffers."""

from .calibrate import Cost, measure, measure_beside
from .choose import transport
from .fake import FakeTransport
from .interface import Transport, Work
from .native import NativeTransport, RankOrderTransport
from .peer import PeerTransport
from .shared import SharedTransport
from .sums import add_in_order

__all__ = [
    "Cost",
    "FakeTransport",
    "NativeTransport",
    "PeerTransport",
    "RankOrderTransport",
    "SharedTransport",
    "Transport",
    "Work",
    "add_in_order",
    "measure",
    "measure_beside",
    "transport",
]
