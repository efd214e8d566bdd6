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
        num_stages: stages that the model is cut into; None: as many as the schedule has, or as `at` says.
        at: names of modules that stages begin with; None: stages of even cost.
        units: modules that are never cut, names or classes; None: blocks of the model's lists of modules.
        costs: of units, to balance stages by; "auto": floating point operations.
        whole: arguments that go whole to each micro-batch although they have as many rows as the batch: names,
            positions, names with a path into containers ("batch.table"), "target".
        loss: weight of a micro-batch's loss: "mean" (its share of the rows), "sum" (1), or a function of its target,
            such as the number of valid tokens, whose values are divided by their sum.
        tied: how gradients of parameters in several stages are added: "exact" (per micro-batch, bitwise as on one
            device) or "fast" (once a step, with fewer messages).
        added_losses: whether modules call `add_loss`.
        seed: of what forwards draw, dropout for one: the same on any ranks with any schedule, and that of a loop over
            micro-batches with `torch.manual_seed(microbatch_seed(seed, step, m))`; None: each rank draws from its own
            generator as it goes.
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
    num_stages: int | None = None
    """Stages that the model is cut into; None: as many as the schedule has, or as `at` says."""
    at: Sequence[str] | None = None
    """Names of modules that stages begin with; None: stages of even cost."""
    units: Sequence[str | type] | None = None
    """Modules that are never cut: names or classes; None: blocks of the model's lists of modules."""
    costs: Any = "auto"
    """Of units, to balance stages by."""
    whole: Sequence[str | int] = ()
    """Arguments that go whole to each micro-batch although they have as many rows as the batch: names, positions,
    names with a path into containers ("batch.table"), "target"."""
    loss: str | Callable[[Any], Any] = "mean"
    """Weight of a micro-batch's loss: "mean" (its share of the rows), "sum" (1), or a function of its target, such as
    the number of valid tokens, whose values are divided by their sum."""
    tied: str = "exact"
    """How gradients of parameters in several stages are added: "exact" (per micro-batch, bitwise as on one device) or
    "fast" (once a step, one message instead of one per micro-batch)."""
    added_losses: bool = False
    """Whether modules call `add_loss`."""
    seed: int | None = None
    """Of what forwards draw, dropout for one: the same on any ranks with any schedule, and that of a loop over
    micro-batches with `torch.manual_seed(microbatch_seed(seed, step, m))`; None: each rank draws from its own generator
    as it goes."""
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
        for name in ("num_microbatches", "num_stages", "chunks", "receive_ahead"):
            number = getattr(self, name)
            if number is None and name in ("num_stages", "chunks"):
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise PipeError(f"{name}={number!r}: it must be a whole number from 1.")
        if not isinstance(self.schedule, str | Schedule):
            raise PipeError(
                f"schedule={self.schedule!r:.100}: it must be the name of a schedule (schedule_names() lists them) or "
                "a Schedule (build_schedule, optimize and from_csv give one)."
            )
        self._check_names("at", str)
        self._check_names("whole", str | int)
        if self.at is not None and self.num_stages not in (None, len(self.at) + 1):
            raise PipeError(
                f"num_stages={self.num_stages}, but at= names {len(self.at)} places, which makes {len(self.at) + 1} "
                "stages; leave one of the two out."
            )
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise PipeError(f"seed={self.seed!r}: it must be a whole number, or None.")
        if self.tied not in ("exact", "fast"):
            raise PipeError(f"tied={self.tied!r}: it must be 'exact' or 'fast'.")
        if not self.timeout > 0:
            raise PipeError(f"timeout={self.timeout!r}: it must be a number of seconds above 0.")
        if isinstance(self.schedule, Schedule) and self.schedule.num_microbatches != count:
            raise PipeError(
                f"num_microbatches={count}, but schedule {self.schedule.name!r} is for "
                f"{self.schedule.num_microbatches} micro-batches."
            )

    def _check_names(self, name: str, kinds: Any) -> None:
        value = getattr(self, name)
        if value is None:
            return
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not all(isinstance(one, kinds) and one != "" for one in value):
            some = [value] if isinstance(value, kinds) else ["layers.4", "layers.8"]
            raise PipeError(f"{name}={value!r:.200}: it must be a list of names, such as {some}.")
