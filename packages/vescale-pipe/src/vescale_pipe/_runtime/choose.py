"""Which schedule a plan means, for a model of so many stages."""

from __future__ import annotations

import logging

from .._plan import PipePlan
from .._schedule import Rule, Schedule, problems
from ..errors import PipeError, ScheduleError
from .order import misfit, one_device

__all__ = ["Schedules"]

log = logging.getLogger("vescale_pipe")


class Schedules:
    """Gives the schedules of a plan.

    Args:
        plan: what is asked for.
        num_ranks: ranks of the pipeline.
        alone: whether one process holds all stages and needs no schedule.

    Raises:
        ScheduleError: there is no schedule of that name.
    """

    def __init__(self, plan: PipePlan, num_ranks: int, alone: bool) -> None:
        self._plan = plan
        self._num_ranks = num_ranks
        self._alone = alone
        self._told = False
        if isinstance(plan.schedule, str):
            from .._schedules.registry import check_name

            check_name(plan.schedule)  # also where it is not used, so that a script fails before it is on ranks

    def num_stages(self) -> int:
        """Return how many stages the model is to be cut into if nobody says where."""
        plan = self._plan
        if plan.num_stages is not None:
            return plan.num_stages
        return 1 if self._alone else self(plan.num_microbatches, None).num_stages

    def __call__(self, microbatches: int, num_stages: int | None) -> Schedule:
        """Return the schedule of a step.

        Args:
            microbatches: of the step.
            num_stages: of the model; None where it is not cut yet.

        Raises:
            PipeError: the schedule of the plan is for other numbers.
            ScheduleError: no schedule of that name has so many stages.
        """
        plan = self._plan
        if self._alone:
            assert num_stages is not None
            return one_device(num_stages, microbatches)
        if isinstance(plan.schedule, Schedule):
            self._tell_of_order(plan.schedule)
            if plan.schedule.num_microbatches != microbatches:
                raise PipeError(
                    f"schedule {plan.schedule.name!r} is for {plan.schedule.num_microbatches} micro-batches, not "
                    f"{microbatches}; name a schedule to run with other numbers."
                )
            return plan.schedule
        from .._schedules import build_schedule

        chunks = plan.chunks if num_stages is None else self._chunks(plan.schedule, num_stages)
        return build_schedule(plan.schedule, self._num_ranks, microbatches, chunks=chunks)

    def _chunks(self, name: str, num_stages: int) -> int | None:
        """Return the stages a rank with which a schedule of a name has so many stages."""
        from .._schedules.registry import schedules_of, stages_per_rank

        each, rest = divmod(num_stages, self._num_ranks)
        fixed = stages_per_rank(name)
        wanted = fixed if fixed is not None else self._plan.chunks
        if wanted == each and not rest:
            return self._plan.chunks if fixed is not None else each
        if wanted is not None:
            text = misfit(name, self._num_ranks, wanted * self._num_ranks, num_stages)
            others = [] if rest or not each else schedules_of(each)
            if self._plan.chunks not in (None, fixed) and wanted == self._plan.chunks:
                text += f" (chunks={self._plan.chunks})"
            raise ScheduleError(f"{text} Of {each} stages a rank are: {', '.join(others)}." if others else text)
        if rest or not each:
            below, above = max(1, each) * self._num_ranks, (each + 1) * self._num_ranks
            counts = f"{below} or {above}" if above != below else f"{below}"
            raise ScheduleError(
                f"schedule {name!r} has as many stages on each of {self._num_ranks} ranks, and the model has "
                f"{num_stages}: cut it into {counts}, by at= or num_stages=."
            )
        return each

    def _tell_of_order(self, schedule: Schedule) -> None:
        """Warn, once, of a schedule of the user's in which gradients are not added in the order of micro-batches."""
        if self._told:
            return
        self._told = True
        found = [one for one in problems(schedule, canonical=True) if one.rule == Rule.CANONICAL]
        if found:
            log.warning(
                "schedule %r adds gradients in another order than a loop over micro-batches would, so their last bits "
                "may differ from it: rank %d, %s.",
                schedule.name,
                found[0].rank,
                found[0].action,
            )
