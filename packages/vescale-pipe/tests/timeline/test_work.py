"""What ranks computed, and what they should take for it."""

from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe import timeline
from vescale_pipe._timeline.rank_file import RankSpans
from vescale_pipe._timeline.span import Span
from vescale_pipe._timeline.work import Work, baselines, works

Write = Callable[[Path, RankSpans], Path]
MakeRank = Callable[..., RankSpans]


def work(rank: int, stage: int, clean: int, kind: str = "F") -> Work:
    return Work(rank, 0, kind, stage, 0, 0, clean, clean)


def test_waiting_inside_of_an_action_is_not_its_work(tmp_path: Path, write: Write, rank_of: MakeRank) -> None:
    action = Span(100, 200, "compute", "0F0", 0, 0, {"kind": "F", "stage": 0, "microbatch": 0})
    others = [
        Span(110, 130, "communication", "all_reduce"),
        Span(120, 140, "communication", "all_gather"),  # overlaps: 30 in all
        Span(190, 250, "ckpt.save", "it"),  # sticks out: 10 inside
        Span(150, 160, "communication", "elsewhere", 0, 5),  # on another thread
        Span(150, 160, "message", "m", 0, 0, {"direction": "recv", "peer": 1, "key": 0, "blocked": 0}),
        Span(50, 60, "communication", "before"),
    ]
    write(tmp_path, rank_of(0, [action, *others]))
    (work,) = works(timeline.merge(tmp_path))
    assert (work.length, work.clean) == (100, 60)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=30))
def test_peers_are_the_median_of_the_means_of_all_others(rows: list[tuple[int, int]]) -> None:
    found = baselines([work(rank, 0, clean) for rank, clean in rows])
    means = {rank: fmean(clean for r, clean in rows if r == rank) for rank, _ in rows}
    for rank in means:
        others = [mean for other, mean in means.items() if other != rank]
        if others:
            assert found[rank, "F", 0].clean == median(others)
        else:
            assert found[rank, "F", 0].clean == median(clean for _, clean in rows)


def test_peers_come_before_other_stages_and_these_before_the_rank_itself() -> None:
    some = [work(0, 0, 10), work(1, 0, 30), work(2, 0, 12), work(3, 1, 50), work(3, 1, 70), work(3, 1, 60, "B")]
    found = baselines(some)
    assert (found[0, "F", 0].clean, found[0, "F", 0].of) == (21, "peers")
    assert (found[1, "F", 0].clean, found[1, "F", 0].of) == (11, "peers")
    assert (found[3, "F", 1].clean, found[3, "F", 1].of) == (12, "stages")
    assert (found[3, "B", 1].clean, found[3, "B", 1].of) == (60, "itself")


def test_a_rank_that_is_slow_now_and_then_is_slow() -> None:
    some = [work(rank, 0, 10) for rank in range(3) for _ in range(9)]
    some += [work(0, 0, 110), work(1, 0, 10), work(2, 0, 10)]
    found = baselines(some)
    assert found[0, "F", 0].clean == 10
    assert found[1, "F", 0].clean == 15  # of 20 and 10
