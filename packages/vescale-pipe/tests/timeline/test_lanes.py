"""Lanes nest, and no span is lost."""

from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.lanes import lanes
from vescale_pipe._timeline.span import Span

spans = st.builds(lambda start, length: Span(start, start + length, "a", "b"), st.integers(0, 30), st.integers(0, 15))


@given(st.lists(spans, max_size=25))
def test_spans_of_a_lane_never_cross(some: list[Span]) -> None:
    some.sort(key=lambda span: (span.start, -span.end))
    found = lanes(some)
    assert sorted((s.start, s.end) for lane in found for s in lane) == sorted((s.start, s.end) for s in some)
    for lane in found:
        for a in lane:
            for b in lane:
                assert not a.start < b.start < a.end < b.end


@given(st.lists(spans, max_size=25))
def test_spans_that_nest_need_one_lane(some: list[Span]) -> None:
    nested = [
        s for n, s in enumerate(some) if not any(t.start < s.start < t.end < s.end or s.start < t.start < s.end < t.end
                                                 for t in some[:n])
    ]  # fmt: skip
    pairs = [(a, b) for a in nested for b in nested]
    if not any(a.start < b.start < a.end < b.end for a, b in pairs):
        nested.sort(key=lambda span: (span.start, -span.end))
        assert len(lanes(nested)) <= 1
