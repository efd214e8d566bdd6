"""What a pipeline is to be: schedule, micro-batches, stages, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ._schedule import Schedule
from .errors import PipeError

__all__ = ["PipePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipePlan:
    """How a model runs in a pipeline; the same on all ranks.

    Args:
        schedule: name of a schedule, or one of your own.
        num_microbatches: pieces that a batch is cut into; it need not divide the rows of the batch.
        chunks: stages per rank; None: what the schedule has by default.
        at: names of modules that stages begin with; None: stages of even cost.
        units: modules that are never cut, names or classes; None: blocks of the model's lists of modules.
        costs: of units, to balance stages by; "auto": floating point operations.
        loss: weight of a micro-batch's loss: "mean" (its share of the rows), "sum" (1), or a function of its target,
            such as the number of valid tokens, whose values are divided by their sum.
        tied: how gradients of parameters in several stages are added: "exact" (per micro-batch, bitwise as on one
            device) or "fast" (once a step, with fewer messages).
        added_losses: whether modules call `add_loss`.
        release: whether a rank frees the weights of stages of other ranks: in the given model they become meta.
        keep_outputs: whether the rank of the last stage returns outputs.
        receive_ahead: messages for which a rank makes room before it needs them.
        timeout: seconds that a rank waits for a message before it says that another one is stuck.
        mesh_dim: dimension of a mesh of several dimensions that ranks of the pipeline are along.

    Raises:
        PipeError: a value is not allowed; the message names the argument.

    Example:
        >>> PipePlan(schedule="interleaved_1f1b", num_microbatches=8, chunks=2).num_microbatches
        8
    """

    schedule: str | Schedule = "1f1b"
    """Name of a schedule, or one of your own."""
    num_microbatches: int
    """Pieces that a batch is cut into; it need not divide the rows of the batch."""
    chunks: int | None = None
    """Stages per rank; None: what the schedule has by default."""
    at: Sequence[str] | None = None
    """Names of modules that stages begin with; None: stages of even cost."""
    units: Sequence[str | type] | None = None
    """Modules that are never cut: names or classes; None: blocks of the model's lists of modules."""
    costs: Any = "auto"
    """Of units, to balance stages by."""
    loss: str | Callable[[Any], Any] = "mean"
    """Weight of a micro-batch's loss: "mean" (its share of the rows), "sum" (1), or a function of its target, such as
    the number of valid tokens, whose values are divided by their sum."""
    tied: str = "exact"
    """How gradients of parameters in several stages are added: "exact" (per micro-batch, bitwise as on one device) or
    "fast" (once a step, one message instead of one per micro-batch)."""
    added_losses: bool = False
    """Whether modules call `add_loss`."""
    release: bool = False
    """Whether a rank frees the weights of stages of other ranks: in the model that it was given they become meta."""
    keep_outputs: bool = True
    """Whether the rank of the last stage returns outputs."""
    receive_ahead: int = 2
    """Messages for which a rank makes room before it needs them."""
    timeout: float = 600.0
    """Seconds that a rank waits for a message before it says that another one is stuck."""
    mesh_dim: str = "pp"
    """Dimension of a mesh of several dimensions that ranks of the pipeline are along."""

    def __post_init__(self) -> None:
        count = self.num_microbatches
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise PipeError(f"num_microbatches={count!r}: it must be a whole number from 1.")
        if isinstance(self.at, str):
            raise PipeError(f"at={self.at!r}: it must be a list of names, such as [{self.at!r}].")
        if self.tied not in ("exact", "fast"):
            raise PipeError(f"tied={self.tied!r}: it must be 'exact' or 'fast'.")
        if self.receive_ahead < 1:
            raise PipeError(f"receive_ahead={self.receive_ahead!r}: it must be at least 1.")
        if not self.timeout > 0:
            raise PipeError(f"timeout={self.timeout!r}: it must be a number of seconds above 0.")
        if isinstance(self.schedule, Schedule) and self.schedule.num_microbatches != count:
            raise PipeError(
                f"num_microbatches={count}, but schedule {self.schedule.name!r} is for "
                f"{self.schedule.num_microbatches} micro-batches."
            )
