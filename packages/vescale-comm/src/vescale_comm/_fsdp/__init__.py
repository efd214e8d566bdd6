"""Fully sharded data parallelism on ragged shards."""

from .info import ShardInfo
from .optimizer_states import load_optimizer_state, optimizer_state
from .shard import full_parameters, fully_shard, no_sync

__all__ = ["ShardInfo", "full_parameters", "fully_shard", "load_optimizer_state", "no_sync", "optimizer_state"]
