"""Gradients: from parameters to flat buckets, and their reduction over ranks while backward runs."""

from .agree import check_same, gather_bytes
from .bucket import Bucket
from .lane import Lane
from .local import is_plain, local_of
from .member import Member
from .reducer import GradientReducer

__all__ = ["Bucket", "GradientReducer", "Lane", "Member", "check_same", "gather_bytes", "is_plain", "local_of"]
