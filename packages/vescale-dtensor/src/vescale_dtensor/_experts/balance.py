"""Which expert should live on which rank: a greedy exchange of experts that lowers the load of the busiest rank."""

from __future__ import annotations

from collections.abc import Sequence


def rank_loads(loads: Sequence[int], owner: Sequence[int], num_ranks: int) -> list[int]:
    """Sum of the loads of every rank's experts.

    >>> rank_loads([5, 1, 2, 3], [0, 0, 1, 1], 2)
    [6, 5]
    """
    total = [0] * num_ranks
    for load, rank in zip(loads, owner, strict=True):
        total[rank] += load
    return total


def lower_bound(loads: Sequence[int], num_ranks: int) -> int:
    """What the busiest rank has to do under any assignment: the largest load, or an equal share.

    >>> lower_bound([8, 1, 1], 2), lower_bound([3, 3, 3], 2)
    (8, 5)
    """
    return max(max(loads, default=0), -(-sum(loads) // num_ranks))


def balance(loads: Sequence[int], owner: Sequence[int], num_ranks: int, *, tolerance: float = 1.0) -> list[int]:
    """Return a better owner of every expert; each rank keeps the number of experts that it has.

    Repeats the one swap between the busiest rank and another that leaves the busier of the two with least to do,
    and ends when no swap helps or the busiest rank is within `tolerance` of what no assignment can beat. Every
    step lowers the loads in order of size, so it ends. All ranks that pass the same arguments get the same result.

    Args:
        loads: work of each expert, for example tokens since the last move.
        owner: rank of each expert.
        num_ranks: number of ranks.
        tolerance: how far above `lower_bound` is good enough.

    >>> balance([9, 8, 1, 1], [0, 0, 1, 1], 2)
    [1, 0, 0, 1]
    """
    owner = list(owner)
    total = rank_loads(loads, owner, num_ranks)
    enough = tolerance * lower_bound(loads, num_ranks)
    while True:
        busiest = max(range(num_ranks), key=lambda r: (total[r], -r))
        swap = _best_swap(loads, owner, total, busiest) if total[busiest] > enough else None
        if swap is None:
            return owner
        mine, theirs = swap
        gain, other = loads[mine] - loads[theirs], owner[theirs]
        owner[mine], owner[theirs] = other, busiest
        total[busiest] -= gain
        total[other] += gain


def _best_swap(
    loads: Sequence[int], owner: Sequence[int], total: Sequence[int], busiest: int
) -> tuple[int, int] | None:
    """The swap of an expert of the busiest rank that leaves the two ranks with the lowest maximum; None: none helps."""
    best, least = None, total[busiest]
    for mine in range(len(owner)):
        if owner[mine] != busiest:
            continue
        for theirs, other in enumerate(owner):
            gain = loads[mine] - loads[theirs]
            if other == busiest or gain <= 0:
                continue
            worse = max(total[busiest] - gain, total[other] + gain)
            if worse < least:
                best, least = (mine, theirs), worse
    return best


def settle(order: Sequence[int], positions: Sequence[Sequence[int]], owner: Sequence[int]) -> list[int]:
    """Return which expert each position holds once every expert lives with its new owner.

    Experts that stay with their rank keep their position.

    Args:
        order: expert at each position now.
        positions: positions that each rank holds.
        owner: new rank of each expert.

    >>> settle([0, 1, 2, 3], [[0, 1], [2, 3]], [1, 0, 0, 1])
    [2, 1, 0, 3]
    """
    new = [-1] * len(order)
    for rank, held in enumerate(positions):
        staying = {order[p] for p in held if owner[order[p]] == rank}
        arriving = iter([e for e in range(len(order)) if owner[e] == rank and e not in staying])
        for p in held:
            new[p] = order[p] if order[p] in staying else next(arriving)
    return new
