"""One call draws all: the format follows from the path, files hold what is returned."""

import struct

import pytest

from vescale_pipe._draw import Bar, render
from vescale_pipe._simulate import simulate
from vescale_pipe.errors import ScheduleError


def test_the_format_follows_from_the_path(one_f_one_b, tmp_path):
    svg = render(one_f_one_b, tmp_path / "a.svg")
    assert svg.startswith("<svg ")
    assert (tmp_path / "a.svg").read_text() == svg == render(one_f_one_b)
    text = render(one_f_one_b, tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == text == render(one_f_one_b, format="text")
    assert "rank 1  .  F0-B0----F1-B1----.  .\n" in text
    assert render(one_f_one_b, str(tmp_path / "b"), format="text") == text


def test_schedules_simulations_and_bars_are_drawn_alike(one_f_one_b):
    done = simulate(one_f_one_b)
    assert render(done, unit="") == render(one_f_one_b)
    bars = [
        Bar(rank, start, end, str(action.microbatch), action.kind.name, name=str(action))
        for rank in range(2)
        for action, start, end in done.action_times(rank)
    ]
    # Bars know nothing of memory; all else is the same.
    title = "1f1b: 2 ranks, 2 micro-batches"
    lines = render(bars, format="text", title=title, unit="").splitlines()
    expected = render(one_f_one_b, format="text").splitlines()
    assert lines == [title, "makespan 9, bubble 33.3%", *expected[2:]]


def test_png_files(folded, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.png"
    assert render(folded, path) == str(path)
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    svg = render(folded)
    assert f'width="{width // 2}" height="{height // 2}"' in svg
    import matplotlib.image

    pixels = matplotlib.image.imread(path)
    # All colours of the bars are there.
    colours = {tuple(round(255 * part) for part in pixel[:3]) for row in pixels[::3] for pixel in row[::3]}
    assert {(59, 111, 182), (47, 143, 91)} <= colours


def test_what_cannot_be_drawn(one_f_one_b, written_badly):
    with pytest.raises(ValueError, match="format: 'pdf' given"):
        render(one_f_one_b, format="pdf")
    with pytest.raises(ValueError, match="path: none given"):
        render(one_f_one_b, format="png")
    with pytest.raises(ScheduleError, match="cannot be simulated"):
        render(written_badly)


def test_without_matplotlib_png_tells_what_to_install(one_f_one_b, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"vescale-pipe\[plot\]"):
        render(one_f_one_b, tmp_path / "a.png")


@pytest.fixture
def written_badly(one_f_one_b):
    from vescale_pipe._schedule import Action, Kind, Schedule

    return Schedule.of("bad", [0], 1, [[Action(Kind.B, 0, 0)]])
