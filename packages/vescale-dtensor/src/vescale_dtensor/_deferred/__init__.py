"""Deferred construction: a model is written down instead of made, and each rank then makes its shards only.

`tape` says what is kept, `record` writes it, `draws` keeps random numbers where one device has them, `whole` and
`parts` make values of it: the whole of a tensor, or the block of it that this rank holds.
"""

from .materialize import deferred_local, fingerprint, finish, materialize, whole_on
from .record import deferred_init
from .tape import is_deferred
from .tensor import gradient, require_outside

__all__ = [
    "deferred_init",
    "deferred_local",
    "fingerprint",
    "finish",
    "gradient",
    "is_deferred",
    "materialize",
    "require_outside",
    "whole_on",
]
