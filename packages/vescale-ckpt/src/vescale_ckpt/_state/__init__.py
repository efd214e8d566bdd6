"""States: what is saved of them, what is found in a file, and how the one becomes the other."""

from .agree import difference, digest, small_values
from .boxes import covers, join_boxes, own_boxes, renumber_local
from .dtypes import DTYPES, dtype_name, dtype_of, dtype_of_safetensors, itemsize, safetensors_name
from .items import LEAVES, Item, leaf_names, leaves_of
from .local import Local, local
from .matching import match
from .merge import held_by, merge
from .nodes import ABSENT, Leaf, check, is_absent, leaves, local_names, parse
from .overlap import shares_elements
from .stateful import missing_like
from .template import Match, Target, Template, template
from .tensors import Held, TensorSpec, describe, plain
from .tree import Packed, build, pack, unpack

__all__ = [
    "ABSENT",
    "DTYPES",
    "LEAVES",
    "Held",
    "Item",
    "Leaf",
    "Local",
    "Match",
    "Packed",
    "Target",
    "Template",
    "TensorSpec",
    "build",
    "check",
    "covers",
    "describe",
    "difference",
    "digest",
    "dtype_name",
    "dtype_of",
    "dtype_of_safetensors",
    "held_by",
    "is_absent",
    "itemsize",
    "join_boxes",
    "leaf_names",
    "leaves",
    "leaves_of",
    "local",
    "local_names",
    "match",
    "merge",
    "missing_like",
    "own_boxes",
    "pack",
    "parse",
    "plain",
    "renumber_local",
    "safetensors_name",
    "shares_elements",
    "small_values",
    "template",
    "unpack",
]
