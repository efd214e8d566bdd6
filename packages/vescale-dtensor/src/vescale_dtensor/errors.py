"""Errors and warnings of this package.

The errors that can be raised inside an operator derive from `RuntimeError`, because Python's
operator protocol swallows a `TypeError`.
"""

from __future__ import annotations

__all__ = [
    "DTensorError",
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "MeshMismatchError",
    "PlainTensorError",
    "PlanError",
    "RuleError",
    "StaticWarning",
    "UnsupportedOperationError",
]


class DTensorError(RuntimeError):
    """Base of the errors that using a DTensor can raise."""


class ImplicitCommunicationError(DTensorError):
    """An operation would move sharded data that nobody asked to move, under the policy ``"error"``."""


class MeshMismatchError(DTensorError):
    """One operation got DTensors of different meshes."""


class PlainTensorError(DTensorError):
    """An operation got a plain tensor beside a DTensor, and nothing says that all ranks hold the same one."""


class UnsupportedOperationError(DTensorError, NotImplementedError):
    """An operation cannot be done on a DTensor, or would silently see only the local part."""


class RuleError(DTensorError):
    """A sharding rule is wrong: `verify_rule` found that it does not give what one device gives."""


class PlanError(ValueError):
    """A parallel plan does not fit the module or the mesh."""


class ImplicitCommunicationWarning(UserWarning):
    """An operation moved sharded data that nobody asked to move, under the policy ``"warn"``."""


class StaticWarning(UserWarning):
    """A call of something static stays dynamic, because it cannot be repeated blindly."""
