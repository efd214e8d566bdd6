"""Words of messages: numbers with their nouns, and names that were probably meant."""

import pytest

from vescale_ckpt._words import counted, near


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "rank", "0 ranks"),
        (1, "box", "1 box"),
        (3, "box", "3 boxes"),
        (1, "chunk", "1 chunk"),
        (2, "pass", "2 passes"),
    ],
)
def test_nouns(count, noun, text):
    assert counted(count, noun) == text


def test_verbs():
    assert [counted(n, "step", ("stays", "stay")) for n in (0, 1, 2)] == [
        "0 steps stay",
        "1 step stays",
        "2 steps stay",
    ]


def test_near_names_and_beginnings():
    names = ["model.layers.0.weight", "model.layers.0.bias", "optimizer.state", "epoch"]
    assert near(["modle.*"], names) == ["model"]
    assert near(["model.layer.*"], names)[0] == "model.layers"
    assert near(["epohc"], names) == ["epoch"]
    assert near(["model.layers.0.wieght"], names)[0] == "model.layers.0.weight"
    assert near(["zzz"], names) == []
    assert len(near(["model.layers.0.x"], names, limit=2)) <= 2
