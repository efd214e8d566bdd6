"""Errors of vescale_rng; each is also the built-in kind of error that a caller would expect."""

from __future__ import annotations

__all__ = ["AgreementError", "LayoutError", "RandomError", "UnsupportedRandomOperatorError"]


class RandomError(RuntimeError):
    """Base of the errors of this package."""


class UnsupportedRandomOperatorError(RandomError, NotImplementedError):
    """A random operator, or a form of one, cannot be drawn as one device would; nothing was drawn."""


class LayoutError(RandomError, ValueError):
    """A description of which elements a rank holds is wrong, incomplete or has no meaning for random numbers."""


class AgreementError(RandomError):
    """Ranks that must be in step are not: their generators are in different states."""
