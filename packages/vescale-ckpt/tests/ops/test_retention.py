"""Which steps stay, by a table worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt import Keep
from vescale_ckpt._ops import Saved

LOSS = {0: 5.0, 10: 1.0, 20: math.nan, 30: 1.0, 40: 9.0, 50: None, 60: True}
STEPS = [
    Saved(step, created=1000.0 * step, metadata={"loss": loss, "eval": {"acc": loss}}) for step, loss in LOSS.items()
]


@pytest.mark.parametrize(
    ("keep", "stay"),
    [
        (Keep(), {40, 50, 60}),
        (Keep(last=1), {60}),
        (Keep(last=100), set(LOSS)),
        (Keep(last=1, every=30), {0, 30, 60}),
        (Keep(last=1, every=1), set(LOSS)),
        (Keep(last=1, every=7), {0, 60}),
        (Keep(last=1, best=("loss", "min")), {30, 60}),  # a tie goes to the newer one
        (Keep(last=1, best=("loss", "min", 2)), {10, 30, 60}),
        (Keep(last=1, best=("loss", "max")), {40, 60}),
        (Keep(last=1, best=("loss", "max", 99)), {0, 10, 30, 40, 60}),  # no number, NaN and True are never best
        (Keep(last=1, best=("eval.acc", "max", 2)), {0, 40, 60}),
        (Keep(last=1, best=("absent", "max", 2)), {60}),
        (Keep(last=1, hours=5.6), {40, 50, 60}),  # 60000 - 5.6 * 3600 = 39840
        (Keep(last=1, hours=0), {60}),
        (Keep(last=2, every=20, best=("loss", "max")), {0, 20, 40, 50, 60}),
    ],
)
def test_table(keep: Keep, stay: set[int]) -> None:
    assert keep.choose(STEPS, now=60000.0) == stay
    assert keep.choose(reversed(STEPS), now=60000.0) == stay


def test_a_name_with_a_dot_is_found_whole_too() -> None:
    saved = [Saved(1, metadata={"a.b": 1.0}), Saved(2, metadata={"a.b": 2.0}), Saved(3, metadata=[1])]
    assert Keep(last=1, best=("a.b", "min")).choose(saved) == {1, 3}


def test_no_steps() -> None:
    assert Keep(best=("x", "min"), every=2, hours=1).choose([]) == set()


@given(
    st.lists(st.integers(0, 50), unique=True, min_size=1),
    st.integers(1, 5),
    st.none() | st.integers(1, 9),
    st.none() | st.floats(0, 100),
)
def test_the_last_always_stays_and_nothing_is_made_up(
    steps: list[int], last: int, every: int | None, hours: float | None
) -> None:
    stay = Keep(last, every, None, hours).choose(
        [Saved(step, created=step * 3600.0) for step in steps], now=50 * 3600.0
    )
    assert set(sorted(steps)[-last:]) <= stay <= set(steps)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"last": 0}, "last"),
        ({"last": True}, "last"),
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"hours": -1}, "hours"),
        ({"hours": math.nan}, "hours"),
        ({"best": "loss"}, "best"),
        ({"best": ("loss", "smallest")}, "best"),
        ({"best": ("loss", "min", 0)}, "best"),
        ({"best": ("loss", "min", True)}, "best"),
        ({"best": ("loss",)}, "best"),
    ],
)
def test_wrong_rules_are_refused_at_once(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        Keep(**arguments)
