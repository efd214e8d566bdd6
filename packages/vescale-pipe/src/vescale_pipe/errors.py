"""What can go wrong: one class per kind of mistake, all of them `PipeError`."""

from __future__ import annotations

__all__ = ["PipeError", "RankError", "ScheduleError", "SplitError", "TransportError"]


class PipeError(RuntimeError):
    """Anything that vescale_pipe raises about pipelines; the subclasses say what."""


class ScheduleError(PipeError, ValueError):
    """A schedule breaks a rule; the message names the rank, the action and the rule."""


class SplitError(PipeError, ValueError):
    """A model cannot be cut where it was to be cut; the message names the place and the value that crosses."""


class TransportError(PipeError):
    """A message between stages was lost, late, or not what its receiver expected."""


class RankError(PipeError):
    """Another rank failed; the first line says which, where and why, the rest is its traceback.

    Args:
        message: of the error.
        rank: that failed, as the pipeline counts.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        """That failed, as the pipeline counts."""
