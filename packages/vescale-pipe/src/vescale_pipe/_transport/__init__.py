"""How values and gradients get from one rank to another: real process groups, or all ranks in one process."""

from .interface import Receiving, Sending, Transport
from .local import LocalHub, LocalTransport
from .process_group import GroupTransport, open_transport

__all__ = ["GroupTransport", "LocalHub", "LocalTransport", "Receiving", "Sending", "Transport", "open_transport"]
