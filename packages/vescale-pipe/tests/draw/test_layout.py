"""Where things are: bars where their times say, labels inside of them, nothing over anything else."""

import pytest

from vescale_pipe._draw.bars import Bar, picture
from vescale_pipe._draw.layout import EM, IDLE, MEAN, lay_out
from vescale_pipe._simulate import Costs, simulate


def bars_of(canvas):
    return [box for box in canvas.rectangles if box.tip]


def test_bars_lie_where_their_times_say(one_f_one_b):
    canvas = lay_out(picture(one_f_one_b))
    rows = [box for box in canvas.rectangles if box.fill == IDLE]
    assert len(rows) == 2
    scale = rows[0].width / 9
    expected = {"0F0": (0, 1), "0F1": (1, 1), "0B0": (4, 2), "0B1": (7, 2), "1F0": (1, 1), "1B0": (2, 2), "1B1": (5, 2)}
    found = {box.tip.split(":")[0]: box for box in bars_of(canvas)}
    for name, (start, length) in expected.items():
        box, row = found[name], rows[int(name[0])]
        assert box.x == pytest.approx(row.x + start * scale)
        assert box.width == pytest.approx(length * scale)
        assert (box.y, box.height) == (row.y, row.height)
    assert found["0B0"].tip == "0B0: 4 to 6"


def test_nothing_lies_over_anything_else(one_f_one_b, folded, overlaps):
    for schedule in (one_f_one_b, folded):
        canvas = lay_out(picture(schedule))
        bars = bars_of(canvas)
        assert overlaps([(box.x, box.y, box.width, box.height) for box in bars]) == []
        letters = []
        for text in canvas.texts:
            width = (EM if text.text.isdigit() else MEAN) * text.size * len(text.text)
            left = text.x - {"start": 0, "middle": width / 2, "end": width}[text.anchor]
            letters.append((left, text.y - 0.72 * text.size, width, 0.72 * text.size))
            assert left >= 0
            assert left + width <= canvas.width
            assert text.y <= canvas.height - 3
        assert overlaps(letters) == []
        # Numbers of micro-batches are inside of their bars.
        for bar in bars:
            inside = [
                text
                for text in canvas.texts
                if text.anchor == "middle"
                and bar.x < text.x < bar.x + bar.width
                and bar.y < text.y < bar.y + bar.height
            ]
            assert len(inside) == 1
            assert EM * inside[0].size * len(inside[0].text) <= bar.width


def test_a_legend_names_the_colours(folded):
    canvas = lay_out(picture(folded))
    words = [text.text for text in canvas.texts]
    places = [words.index(word) for word in ("forward", "backward", "input gradient", "weight gradient")]
    assert places == sorted(places)
    assert words[-2:] == ["chunk 0", "chunk 1"]
    # The swatch of forwards has the colour of those of chunk 0; those of chunk 1 are lighter.
    forward = canvas.texts[places[0]]
    swatch = next(box for box in canvas.rectangles if box.y > 150 and box.x < forward.x)
    colours = {box.tip.split(":")[0]: box.fill for box in bars_of(canvas)}
    assert colours["0F0"] == colours["1F1"] == swatch.fill
    assert colours["3F0"] == colours["2F1"] > swatch.fill
    assert len({colours[name] for name in ("0F0", "0B0", "3F0", "3I0", "3W0", "2B0")}) == 6


def test_wide_pictures_are_not_wider_than_a_page(one_f_one_b):
    bars = [Bar(0, m, m + 1, str(m), "F") for m in range(10_000)]
    canvas = lay_out(picture(bars))
    assert canvas.width < 3000
    # There is no room for numbers.
    assert not [text for text in canvas.texts if text.anchor == "middle" and text.y < 90]
    with pytest.raises(ValueError, match="60000 bars to draw"):
        lay_out(picture(bars * 6))


def test_one_long_bar_does_not_hide_the_labels_of_the_others(one_f_one_b):
    canvas = lay_out(picture(one_f_one_b, Costs(forward=1e-3, backward=[5e-3, 1.5e-3])))
    assert len([text for text in canvas.texts if text.text in ("0", "1")]) == 8


def test_ticks_are_round_numbers_up_to_the_end(one_f_one_b):
    for length, first in ((9.0, ["0", "2", "4", "6", "8"]), (0.9e-3, ["0 s", "200 us", "400 us", "600 us", "800 us"])):
        done = simulate(one_f_one_b, Costs(forward=length / 9, backward=2 * length / 9))
        canvas = lay_out(picture(done, unit="" if length == 9 else "s"))
        ticks = [text.text for text in canvas.texts if text.size == 11 and text.colour != "#ffffff"]
        assert [tick for tick in ticks if not tick.startswith("time")][: len(first)] == first


def test_nothing_to_draw_is_drawn():
    canvas = lay_out(picture([]))
    assert bars_of(canvas) == []
    assert canvas.height > 0
