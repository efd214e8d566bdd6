"""Small schedules to draw."""

from collections.abc import Callable

import pytest

from vescale_pipe._schedule import Schedule, parse_action


@pytest.fixture
def one_f_one_b() -> Schedule:
    """Two ranks and two micro-batches; it takes 9, of which each rank idles 3."""
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    return Schedule.of("1f1b", [0, 1], 2, [[parse_action(word) for word in row.split()] for row in rows])


@pytest.fixture
def folded() -> Schedule:
    """Two ranks with two stages each, with halves of backwards, and one joined pair on rank 1."""
    rows = ["0F0 0F1 3F0 3I0 3W0 3F1 3I1 3W1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]
    actions = [[parse_action(word) for word in row.split()] for row in rows]
    return Schedule.of("folded", [0, 1, 1, 0], 2, actions, [(1, 3)])


@pytest.fixture
def overlaps() -> Callable[[list[tuple[float, float, float, float]]], list[tuple[int, int]]]:
    """Return the pairs of boxes (x, y, width, height) of which more than a hair lies over each other."""

    def find(boxes: list[tuple[float, float, float, float]]) -> list[tuple[int, int]]:
        found = []
        for i, (x, y, w, h) in enumerate(boxes):
            for j, (x2, y2, w2, h2) in enumerate(boxes[:i]):
                if min(x + w, x2 + w2) - max(x, x2) > 0.01 and min(y + h, y2 + h2) - max(y, y2) > 0.01:
                    found.append((j, i))
        return found

    return find
