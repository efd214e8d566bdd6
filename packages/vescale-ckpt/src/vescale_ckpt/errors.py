"""The errors of this package; each is also one of the built-in classes that callers may already catch."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "CorruptionError",
    "FormatError",
    "LayoutError",
    "MismatchError",
    "MissingStepError",
    "RanksError",
    "StateError",
    "StorageError",
]


class CheckpointError(RuntimeError):
    """What every error of this package is."""


class StateError(CheckpointError, TypeError):
    """A value of the state cannot be saved: its class has no form without pickle, or it holds no data."""


class LayoutError(CheckpointError, ValueError):
    """How a tensor is sharded cannot be told, or does not fit its shape."""


class FormatError(CheckpointError, ValueError):
    """A file of a checkpoint does not say what the format allows: damaged, hostile, or of a newer version."""


class CorruptionError(CheckpointError):
    """Bytes on storage are not those that were saved."""

    def __init__(self, message: str, tensors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tensors = tuple(tensors)
        """Names of the tensors that are damaged, as far as they are known."""


class MissingStepError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint where one was asked for."""


class MismatchError(CheckpointError, ValueError):
    """The state to load into and the checkpoint do not belong together: keys, shapes or dtypes differ."""


class StorageError(CheckpointError, OSError):
    """The storage failed: disk full, no permission, I/O error."""


class RanksError(CheckpointError):
    """Another rank failed, did not answer in time, or has a state that does not go with this rank's."""
