"""Every rank's part of every operator equals one device, bit for bit, and so does every generator's state.

Some 50000 combinations of operator, dtype, whole tensor, layout, world and state. `table.py` has the axes.
"""

from __future__ import annotations

from types import ModuleType

from vescale_rng._draw.forms import CLOSED_FORM


def test_sampled_table(table: ModuleType, operator: str) -> None:
    cases = list(table.sampled(operator))
    assert table.run(iter(cases)) == len(cases)
    # every dtype with every whole tensor, each with 5 layouts, and between them all layouts of all worlds
    assert len(cases) == len(table.OPERATORS[operator].dtypes) * len(table.WHOLES) * 5
    assert {(world, layout) for _, _, _, world, layout, _ in cases} == set(table.LAYOUTS)
    assert {state for *_, state in cases} == set(table.STATES)


def test_the_table_has_every_operator(table: ModuleType) -> None:
    assert {operator.op for operator in table.OPERATORS.values()} == CLOSED_FORM


def test_core_of_the_table_crossed(table: ModuleType, core_operator: str) -> None:
    assert table.run(table.crossed(core_operator)) > 2000


def test_large_tensors(table: ModuleType) -> None:
    assert table.large() == 66
