"""The errors of this package. All of them are `CommError`s; what is a wrong argument is a `ValueError` as well."""

from __future__ import annotations

__all__ = ["CommError", "MismatchError", "NotFiniteError", "PlanError", "StaleParameterError", "TransportError"]


class CommError(RuntimeError):
    """Something about communication went wrong; base of the errors of this package."""


class PlanError(CommError, ValueError):
    """A buffer cannot be planned as asked."""


class MismatchError(CommError):
    """Ranks disagree on what they are about to communicate: parameters, order, shapes, dtypes or plans."""


class NotFiniteError(CommError):
    """A gradient is infinite or not a number, and was to be looked for."""


class TransportError(CommError):
    """A collective could not be carried out: a rank died, a time-out passed, or shared memory ran out."""


class StaleParameterError(CommError):
    """A parameter would be read before its newest values have arrived."""
