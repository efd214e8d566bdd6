"""Makes the transport of a group: the one that is asked for, or the best that all ranks can have."""

from __future__ import annotations

import json
import logging
import weakref
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import MismatchError, TransportError
from .agree import exchange
from .calibrate import measure
from .fake import FakeTransport
from .interface import Transport
from .native import NativeTransport, RankOrderTransport
from .peer import PeerTransport
from .shared import SharedTransport
from .shared_engine import group_timeout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["KINDS", "transport"]

KINDS = ("auto", "native", "p2p", "shared", "fake", "emulated")
ORDERS = ("canonical", "native")
NO_TAGS = ("nccl", "xccl", "hccl", "ucc", "mpi")
"""Backends whose sends have no tags or may not be in any order: sums in rank order go by all-to-all there."""
TYPICAL = 8 << 20
"""Bytes of a bucket, for which the cheapest transport is taken."""

logger = logging.getLogger(__name__)


def transport(
    group: ProcessGroup | None = None,
    kind: str | Transport = "auto",
    *,
    order: str | None = None,
    device: torch.device | str | None = None,
) -> Transport:
    """Make a transport; every rank of the group calls this at the same place, with the same arguments.

    Args:
        group: of torch.distributed; None for all ranks.
        kind: "native" for the backend's own collectives, "p2p" for sends and receives, "shared" for memory that
            ranks of one host share, "fake" to send nothing, "emulated" to work out on every rank what the
            backend would (slow, for checks); "auto" takes shared memory where all ranks can have it, or else what
            measures best. A transport is returned as it is.
        order: "canonical" to add in rank order, so that bits depend on no bucket, strategy or transport; "native" to
            add as the backend likes; None: canonical, but native on NCCL.
        device: of the buffers; None: what the backend of the group serves.

    Raises:
        ValueError: no such kind or order, or not together.
        MismatchError: ranks asked for different ones.
        TransportError: it cannot be made on some rank; raised on all of them.
    """
    if not isinstance(kind, str):
        return kind
    if kind not in KINDS:
        raise ValueError(f"transport: needs one of {', '.join(KINDS)}; got {kind!r}.")
    if order is not None and order not in ORDERS:
        raise ValueError(f"order: needs one of {', '.join(ORDERS)} or None; got {order!r}.")
    if order == "native" and kind in ("p2p", "shared"):
        raise ValueError(f"order: transport {kind} adds in rank order; 'native' goes with transport native or auto.")
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("group: torch.distributed is not initialised; call init_process_group, or give a group.")
    backends = _backends(group)
    device = _device(device, backends)
    backend = backends.get(device.type, "")
    if kind == "fake" or (kind == "auto" and backend == "fake"):
        return FakeTransport(group.size(), group.rank())
    canonical = order == "canonical" or (order is None and backend != "nccl")
    by_tags = device.type == "cpu" and backend not in NO_TAGS
    carrier = PeerTransport(group) if by_tags else RankOrderTransport(group)
    try:
        _check_agreement(carrier, f"transport {kind!r}, order {order!r}, device {device.type!r}", device)
    finally:
        carrier.close()
    emulated = _is_emulated(group)
    if kind in ("p2p", "shared") and not by_tags:
        raise ValueError(f"transport: {kind} is for ranks on CPU that send with tags; got {device.type}:{backend}.")
    if kind == "emulated":
        return _emulated(group, canonical, backend)
    if not canonical:
        return NativeTransport(group)
    if kind == "native" or not by_tags:
        return _rank_order(group, device)
    if kind == "p2p" or emulated or group.size() == 1:
        # Ranks of an emulation take turns in one process, so they cannot wait in shared memory; the bits are the same.
        return PeerTransport(group)
    return SharedTransport(group) if kind == "shared" else _best(group, device)


def _best(group: ProcessGroup, device: torch.device) -> Transport:
    """Return shared memory where ranks can have it, or else the faster one of what goes over the network."""
    try:
        return SharedTransport(group)
    except TransportError as error:
        logger.info("no shared memory between the ranks of the group: %s", error)
    name = _chosen.get(group)
    candidates: dict[str, Transport] = {"p2p": PeerTransport(group), "native": _rank_order(group, device)}
    if name is None:
        costs = {name: measure(candidate, device) for name, candidate in candidates.items()}
        name = min(costs, key=lambda one: sum(cost.seconds(TYPICAL) for cost in costs[one].values()))
        _chosen[group] = name
        logger.info("transport %s measures best: %s", name, costs)
    best = candidates.pop(name)
    for other in candidates.values():
        other.close()
    return best


def _rank_order(group: ProcessGroup, device: torch.device) -> Transport:
    second = None
    if device.type == "cpu" and group.size() > 1:
        ranks = dist.get_process_group_ranks(group)
        second = dist.new_group(ranks, timeout=group_timeout(group), use_local_synchronization=True)
    return RankOrderTransport(group, second)


_chosen: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
"""What was measured to be best, by group: a result of all its ranks."""


def _check_agreement(carrier: Transport, wish: str, device: torch.device) -> None:
    if carrier.size == 1:
        return
    words = [json.loads(word) for word in exchange(carrier, json.dumps(wish).encode(), device)]
    for rank, word in enumerate(words):
        if word != wish:
            raise MismatchError(f"Rank {carrier.rank} asked for {wish}, but rank {rank} for {word}. Ask for the same.")


def _emulated(group: ProcessGroup, canonical: bool, backend: str) -> Transport:
    from .._emulator.choose import ORDERS
    from .._emulator.transport import EmulatedTransport

    order = "canonical" if canonical else {"nccl": "nccl_ring"}.get(backend, backend)
    if order not in ORDERS:
        raise ValueError(f"order: the order of backend {backend!r} is not known; take order='canonical'.")
    return EmulatedTransport(group, order)


def _is_emulated(group: ProcessGroup) -> bool:
    from .._emulator.group import is_emulated

    return is_emulated(group)


def _backends(group: ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type."""
    pairs = (item.partition(":") for item in str(dist.get_backend_config(group)).split(","))
    return {device: backend for device, _, backend in pairs}


def _device(wished: torch.device | str | None, backends: dict[str, str]) -> torch.device:
    if wished is not None:
        device = torch.device(wished)
        if device.type not in backends:
            raise ValueError(
                f"device: the group has no backend for {device.type!r}; it has some for {', '.join(backends)}."
            )
    else:
        device = torch.device("cpu" if "cpu" in backends else next(iter(backends)))
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device
