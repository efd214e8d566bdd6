"""Integer plans: which tensor stands where in which buffer, and which rank holds which part. Knows nothing of torch."""

from .blocks import Block, Blocks, Rows, Rule, Storage, Whole, granularity
from .bound import exact_shard, lower_bound
from .buckets import plan_buckets
from .buffer import BufferPlan, Piece, Slot, TensorSpec
from .even import even_shard, row_wise_numel
from .model_plan import GroupPlan, ModelPlan
from .models import MODELS, Unit, model_units, read_units
from .parts import plan_parts
from .ragged import plan_group, plan_ragged
from .search import Knobs, plan_model

__all__ = [
    "MODELS",
    "Block",
    "Blocks",
    "BufferPlan",
    "GroupPlan",
    "Knobs",
    "ModelPlan",
    "Piece",
    "Rows",
    "Rule",
    "Slot",
    "Storage",
    "TensorSpec",
    "Unit",
    "Whole",
    "even_shard",
    "exact_shard",
    "granularity",
    "lower_bound",
    "model_units",
    "plan_buckets",
    "plan_group",
    "plan_model",
    "plan_parts",
    "plan_ragged",
    "read_units",
    "row_wise_numel",
]
