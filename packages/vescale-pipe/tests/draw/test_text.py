"""Pictures for a terminal."""

from vescale_pipe._draw import Bar, render


def test_a_joined_pair_has_two_lines(folded):
    # Of half a rank, a backward takes two columns, and the pair of 2F1 and 2B0 three: it starts when 3I0 has ended.
    assert render(folded, format="text").splitlines()[2:] == [
        "rank 0 (stages 0, 3)  0F0-0F1-.   3F0-3I0-3W0-.   .   3F1-3I1-3W1-0B0-----.   0B1-----",
        "rank 1 (stages 1, 2)  .   1F0-2F0-1F1-.   2F1---------1B0-----2B1-----1B1-----.   .",
        "                                          2B0---------",
        "one column: 0.5",
    ]


def test_columns_of_a_picture_that_would_be_too_wide():
    bars = [Bar(0, 0.0, 1e-6, "0", "F"), Bar(0, 1e-6, 1.0, "0", "B"), Bar(1, 0.5, 1.0, "0", "F")]
    text = render(bars, format="text", title="t")
    lines = text.splitlines()
    assert lines[0] == "t"
    assert lines[-1] == "one column: 2.5 ms"
    assert all(len(line) < 1300 for line in lines)
    # A bar that is shorter than a column gives way to the one after it.
    assert lines[2].startswith("rank 0  B0-")
    assert lines[3].startswith("rank 1  .  .")
    assert lines[3].endswith("F0-" + "-" * 3 * 199)


def test_nothing_to_draw():
    assert render([], format="text") == "makespan 0 s, bubble 0.0%\none column: 0 s\n"
