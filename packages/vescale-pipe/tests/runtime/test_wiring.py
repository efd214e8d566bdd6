"""Which values go where: hand-made graphs against messages worked out by hand."""

from typing import Any

import pytest
from torch import nn

from vescale_pipe._runtime.wiring import wire
from vescale_pipe._split import Port, Stage, StageGraph
from vescale_pipe.errors import PipeError


def graph(*stages: tuple[list[Any], tuple[bool, ...]]) -> StageGraph:
    """Per stage its inputs ((stage, output), or a position in the batch), and which outputs need gradients."""
    made = []
    for index, (inputs, needs) in enumerate(stages):
        ports = tuple(Port("batch", one, 0) if isinstance(one, int) else Port("stage", *one) for one in inputs)
        made.append(Stage(index, nn.Identity(), ports, len(needs), needs))
    return StageGraph(tuple(made), ())


def test_a_chain() -> None:
    found = wire(graph(([0], (True,)), ([(0, 0)], (True,)), ([(1, 0)], (True,))))
    assert found.edges == found.grad_edges == ((0, 1), (1, 2))
    assert not found.relayed
    assert found.stages[1].incoming == ((0, ((0, 0),)),)
    assert found.stages[1].outgoing == ((2, (0,)),)
    assert found.stages[1].args == (0,)


def test_a_value_of_several_stages_is_passed_on() -> None:
    """Stage 0 makes a; 1, 2 and 4 take it. Stage 1 makes b for 2; 2 makes c for 3; 3 makes d for 4."""
    stages = (
        ([0], (True,)),
        ([(0, 0)], (True,)),
        ([(0, 0), (1, 0)], (True,)),
        ([(2, 0)], (True,)),
        ([(0, 0), (3, 0)], (True,)),
    )
    found = wire(graph(*stages))
    assert found.relayed
    assert found.edges == ((0, 1), (1, 2), (2, 3), (2, 4), (3, 4))
    # Stage 1 hands on what came in first (-1), and its own output 0.
    assert found.stages[1].outgoing == ((2, (-1, 0)),)
    # Stage 2 gets both from stage 1; a goes on to 4, c to 3; the latest consumer comes first.
    assert found.stages[2].incoming == ((1, ((0, 0), (1, 0))),)
    assert found.stages[2].outgoing == ((4, (-1,)), (3, (0,)))
    assert found.stages[4].incoming == ((2, ((0, 0),)), (3, ((3, 0),)))
    direct = wire(graph(*stages), relay=False)
    assert not direct.relayed
    assert direct.edges == ((0, 1), (0, 2), (0, 4), (1, 2), (2, 3), (3, 4))
    assert direct.stages[0].outgoing == ((4, (0,)), (2, (0,)), (1, (0,)))


def test_inputs_in_any_order_and_twice() -> None:
    found = wire(graph(([0], (True, False, True)), ([(0, 2), 1, (0, 0), (0, 2)], (True,))))
    assert found.stages[1].incoming == ((0, ((0, 0), (0, 2))),)
    assert found.stages[1].args == (1, Port("batch", 1, 0), 0, 1)
    assert found.stages[0].outgoing == ((1, (0, 2)),)


def test_edges_without_gradients() -> None:
    found = wire(graph(([0], (True, False)), ([(0, 0)], (True,)), ([(1, 0), (0, 1)], (True,))))
    assert found.edges == ((0, 1), (0, 2), (1, 2))
    assert found.grad_edges == ((0, 1), (1, 2))


def test_what_makes_no_sense_is_told() -> None:
    with pytest.raises(PipeError, match="stage 1 takes a value of stage 1, which must be one before it"):
        wire(graph(([0], (True,)), ([(1, 0)], (True,))))
    with pytest.raises(PipeError, match="stage 1 takes output 1 of stage 0, which has 1"):
        wire(graph(([0], (True,)), ([(0, 1)], (True,))))
    stage = Stage(1, nn.Identity(), (), 1, (True,))
    with pytest.raises(PipeError, match="stage 1 is at place 0"):
        wire(StageGraph((stage,), ()))
