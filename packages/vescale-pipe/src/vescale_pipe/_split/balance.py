"""The linear partition: consecutive parts of a list such that the most expensive part costs as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["partition"]


def partition(costs: Sequence[float], num_parts: int, borders: Sequence[float] | None = None) -> list[int]:
    """Cut a list into consecutive parts, none of them empty.

    The largest sum of a part is as small as possible; among all ways with that, the total of `borders` at the cuts is
    smallest; among these, the parts are as even as can be (by the sum of their squares).

    Args:
        costs: of the items, not negative.
        num_parts: at least 1, at most as many as there are items.
        borders: price of a cut before each item (that of item 0 is never paid), such as the bytes sent there.

    Returns:
        the first item of each part.

    Example:
        >>> partition([9, 2, 2, 2, 3, 9], 3)
        [0, 1, 5]

    Source: dynamic programming as in Skiena, The Algorithm Design Manual, section 10.7 (the linear partition problem).
    """
    count = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    infinite = float("inf")
    best = [[infinite] * (count + 1) for _ in range(num_parts + 1)]  # best[k][n]: largest part of the first n in k
    best[0][0] = 0.0
    for part in range(1, num_parts + 1):
        for end in range(part, count + 1):
            best[part][end] = min(
                max(best[part - 1][start], before[end] - before[start]) for start in range(part - 1, end)
            )
    # Sums of floats taken in another order may differ in the last digits.
    limit = best[num_parts][count] * (1 + 1e-12)
    worst = (infinite, infinite)
    paid = [[worst] * (count + 1) for _ in range(num_parts + 1)]
    chosen = [[0] * (count + 1) for _ in range(num_parts + 1)]
    paid[0][0] = (0.0, 0.0)
    for part in range(1, num_parts + 1):
        for end in range(part, count + 1):
            for start in range(part - 1, end):
                size = before[end] - before[start]
                border, squares = paid[part - 1][start]
                price = (border + (borders[start] if borders is not None and start else 0.0), squares + size * size)
                if size <= limit and price < paid[part][end]:
                    paid[part][end], chosen[part][end] = price, start
    starts = []
    end = count
    for part in range(num_parts, 0, -1):
        end = chosen[part][end]
        starts.append(end)
    return starts[::-1]
