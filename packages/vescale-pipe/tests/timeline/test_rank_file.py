"""Files of ranks: what is read is what was written, and a file that was cut off is read as far as it goes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_pipe._timeline.rank_file import RankSpans, lines_of, read_file, write_lines
from vescale_pipe._timeline.span import ClockReading, Span

Write = Callable[[Path, RankSpans], Path]

numbers = st.integers(-(2**62), 2**62)
tags = st.dictionaries(st.text(), st.none() | st.booleans() | numbers | st.text(), max_size=3)
spans = st.builds(Span, numbers, numbers, st.text(), st.text(), numbers, st.integers(-1, 99), tags)
ranks = st.builds(
    RankSpans,
    st.integers(0, 9999),
    st.dictionaries(st.text(), st.integers(0, 99), max_size=3),
    numbers,
    numbers,
    st.text(),
    st.integers(0, 9999),
    st.lists(spans, max_size=5),
    st.dictionaries(st.integers(-1, 99), st.text(), max_size=3),
    st.lists(st.builds(ClockReading, numbers, st.integers(0, 99), numbers, numbers), max_size=3),
    st.integers(0, 99),
    st.lists(st.text(), max_size=3),
    st.just(True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@given(ranks)
def test_what_is_read_is_what_was_written(folder: Path, one: RankSpans) -> None:
    path = folder / "one"
    with path.open("w", encoding="utf-8") as file:
        write_lines(file, lines_of(one))
    assert read_file(path) == one


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, write: Write) -> None:
    one = RankSpans(3, spans=[Span(n, n + 1, "a", "b") for n in range(2500)], complete=True)
    path = write(tmp_path, one)
    text = path.read_text()
    path.write_text(text[: text.rindex("spans") + 30])
    read = read_file(path)
    assert read.spans == one.spans[:2000]
    assert not read.complete


def test_other_files_are_refused(tmp_path: Path, write: Write) -> None:
    path = tmp_path / "file"
    for text in ("", "no JSON", "{}", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="not the timeline of a rank"):
            read_file(path)
    path = write(tmp_path, RankSpans(0, spans=[Span(0, 1, "a", "b")], complete=True))
    text = path.read_text()
    path.write_text(text.replace('"version":1', '"version":2'))
    with pytest.raises(ValueError, match="version 2"):
        read_file(path)
    path.write_text(text.replace('{"spans', "{spans"))
    with pytest.raises(ValueError, match="line 2: it is not JSON"):
        read_file(path)
