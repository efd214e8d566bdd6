"""Replication: every rank holds the whole module, and gradients are averaged over the ranks."""

from .ddp import DistributedDataParallel
from .replica import Replica, ReplicaOptions, forget_replica, replicate, replicated

__all__ = ["DistributedDataParallel", "Replica", "ReplicaOptions", "forget_replica", "replicate", "replicated"]
