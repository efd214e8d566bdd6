"""The cost model against sums on paper."""

from __future__ import annotations

import pytest

from vescale_dtensor._auto import Link, Machine
from vescale_dtensor._auto.cost import wire_bytes


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring_algorithms_send_what_they_must(ranks: int) -> None:
    """A whole tensor of `ranks` blocks: each step of a ring sends one block, and there are `ranks - 1` steps."""
    block = 120
    whole = block * ranks
    steps = ranks - 1
    assert wire_bytes("reduce_scatter", whole, ranks) == pytest.approx(steps * block)
    assert wire_bytes("all_gather", block, ranks) == pytest.approx(steps * block)
    assert wire_bytes("all_reduce", whole, ranks) == pytest.approx(2 * steps * block)
    assert wire_bytes("all_to_all", whole, ranks) == pytest.approx(steps * block)


def test_seconds_by_the_slowest_axis() -> None:
    machine = Machine(Link(1e-6, 1e9), links={"dp": Link(5e-6, 1e8)})
    assert machine.seconds("all_gather", 1000, 3, ("tp",)) == pytest.approx(1e-6 + 2000 / 1e9)
    assert machine.seconds("all_gather", 1000, 3, ("dp",)) == pytest.approx(5e-6 + 2000 / 1e8)
    assert machine.seconds("all_gather", 1000, 3, ("dp", "tp")) == pytest.approx(5e-6 + 2000 / 1e8)


def test_an_all_reduce_is_no_cheaper_than_its_halves() -> None:
    machine = Machine(Link(1e-5, 1e9))
    halves = machine.seconds("reduce_scatter", 4000, 4, ("tp",)) + machine.seconds("all_gather", 1000, 4, ("tp",))
    assert machine.seconds("all_reduce", 4000, 4, ("tp",)) == pytest.approx(halves)
