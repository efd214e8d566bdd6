"""Which schedule a plan means, and what is said where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.choose import Schedules
from vescale_pipe._schedules import build_schedule
from vescale_pipe.errors import PipeError, ScheduleError, SplitError

EXAMPLE = ((torch.zeros(4, 2),), {})


def chosen(ranks: int, stages: int | None, **plan: Any) -> Any:
    return Schedules(PipePlan(num_microbatches=4, **plan), ranks, alone=False)(4, stages)


def test_chunks_follow_from_the_stages_of_the_model() -> None:
    assert chosen(2, 6, schedule="interleaved_1f1b").num_stages == 6
    assert chosen(2, 2, schedule="interleaved_1f1b").num_stages == 2
    assert chosen(2, 4, schedule="zb_v").num_stages == 4
    assert chosen(2, 4, schedule="interleaved_1f1b", chunks=2).num_stages == 4
    assert chosen(2, None, schedule="interleaved_1f1b", chunks=3).num_stages == 6
    assert chosen(3, 3, schedule="1f1b", chunks=1).num_stages == 3


@pytest.mark.parametrize(
    ("schedule", "chunks", "stages", "texts"),
    [
        ("1f1b", None, 4, ["'1f1b' has 2 stages, 1 on each of 2 ranks, and the model 4", "at= with 1 name", "zb_v"]),
        ("zb_v", None, 2, ["'zb_v' has 4 stages, 2 on each of 2 ranks, and the model 2", "num_stages=4", "zb_h1"]),
        ("1f1b", None, 3, ["has 2 stages", "the model 3: cut the model into 2"]),
        ("interleaved_1f1b", None, 5, ["the model has 5: cut it into 4 or 6"]),
        ("interleaved_1f1b", 3, 4, ["has 6 stages, 3 on each of 2 ranks, and the model 4", "(chunks=3)"]),
    ],
)
def test_numbers_that_do_not_fit_are_both_told(
    schedule: str, chunks: int | None, stages: int, texts: list[str]
) -> None:
    with pytest.raises(ScheduleError) as caught:
        chosen(2, stages, schedule=schedule, chunks=chunks)
    for text in texts:
        assert text in str(caught.value)


def test_places_that_are_too_few_or_many_for_the_schedule() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    plan = PipePlan(num_microbatches=4, at=["1", "2", "3"])
    with pytest.raises(ScheduleError, match="'1f1b' has 2 stages, 1 on each of 2 ranks, and the model 4: cut"):
        PipeEngine(model, None, plan, nn.functional.mse_loss, example=EXAMPLE, act_out=2)


def test_a_number_of_stages_is_enough() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(6)))
    plan = PipePlan(num_microbatches=4, num_stages=6, schedule="interleaved_1f1b")
    engine = PipeEngine(model, None, plan, nn.functional.mse_loss, example=EXAMPLE, act_out=2)
    assert engine.stages == (0, 1, 2, 3, 4, 5)
    alone = PipeEngine(model, None, plan, nn.functional.mse_loss, example=EXAMPLE)
    assert alone.stages == (0, 1, 2, 3, 4, 5)
    with pytest.raises(PipeError, match=r"num_stages=3, but at= names 1 places, which makes 2 stages"):
        PipePlan(num_microbatches=4, num_stages=3, at=["1"])
    with pytest.raises(ScheduleError, match="'1f1b' has 2 stages, 1 on each of 2 ranks, and the model 3"):
        PipeEngine(
            model, None, PipePlan(num_microbatches=4, num_stages=3), nn.functional.mse_loss, example=EXAMPLE, act_out=2
        )


def test_a_wrong_name_is_told_at_once_also_in_one_process() -> None:
    with pytest.raises(ScheduleError, match=r"schedule '1F1B' is not known. Did you mean '1f1b'"):
        PipeEngine(nn.Linear(2, 2), None, PipePlan(num_microbatches=1, schedule="1F1B"))
    with pytest.raises(PipeError, match=r"schedule=3: it must be the name of a schedule \(schedule_names\(\) lists"):
        PipePlan(num_microbatches=1, schedule=3)  # type: ignore[arg-type]


def test_a_schedule_of_the_user_is_for_its_own_numbers() -> None:
    own = build_schedule("1f1b", 2, 4)
    engine = PipeEngine(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
        None,
        PipePlan(num_microbatches=4, schedule=own),
        nn.functional.mse_loss,
        example=EXAMPLE,
        act_out=2,
    )
    with pytest.raises(PipeError, match="'1f1b' is for 4 micro-batches, not 2; name a schedule"):
        engine.eval_step(torch.zeros(4, 2), num_microbatches=2)


def test_a_model_that_cannot_be_cut_so_often_is_told_with_who_asked() -> None:
    def engine(model: Any, **plan: Any) -> PipeEngine:
        return PipeEngine(model, None, PipePlan(num_microbatches=1, **plan), example=EXAMPLE, act_out=3)

    with pytest.raises(
        SplitError, match=r"num_stages=3: Linear holds no other modules.*'1f1b' on 3 ranks has 3 stages"
    ):
        engine(nn.Linear(2, 2))
    with pytest.raises(SplitError, match=r"Sequential has only 2 modules to divide \(0, 1\).*'gpipe' on 3 ranks"):
        engine(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), schedule="gpipe")
    with pytest.raises(SplitError, match=r"at='layers.1': Linear holds no other modules, so it cannot be cut"):
        engine(nn.Linear(2, 2), at=["layers.1", "layers.2"])
    with pytest.raises(PipeError, match=r"model: a function given; it must be a model \(nn.Module\), a list of stages"):
        engine(lambda x: x)
    with pytest.raises(
        SplitError, match=r"Linear.forward cannot be called with the example: too many pos.*takes them.$"
    ):
        PipeEngine(nn.Linear(2, 2), None, PipePlan(num_microbatches=1), example=((EXAMPLE[0][0], 1), {}))


def test_arguments_that_are_something_else_are_told() -> None:
    model, plan = nn.Linear(2, 2), PipePlan(num_microbatches=1)
    with pytest.raises(PipeError, match=r"plan: a dict given; it must be a PipePlan, such as PipePlan\(schedule="):
        PipeEngine(model, None, {"num_microbatches": 1})  # type: ignore[arg-type]
    with pytest.raises(PipeError, match="mesh: 2 given; it must be a DeviceMesh, a process group, or None"):
        PipeEngine(model, 2, plan)  # type: ignore[arg-type]
    with pytest.raises(PipeError, match="loss_fn='mse': it must be a function of outputs and target"):
        PipeEngine(model, None, plan, "mse")  # type: ignore[arg-type]
