"""Nesting is the way back from flat keys."""

import pytest

from vescale_ckpt import FormatError
from vescale_ckpt._interop.nesting import nest


def test_gaps_in_lists_become_none_but_only_few():
    assert nest([(("a", 3), "x"), (("a", 1), "y")]) == {"a": [None, "y", None, "x"]}
    with pytest.raises(FormatError, match="place 5000"):
        nest([(("a", 5000), "x")])


def test_nothing_is_an_empty_dict():
    assert nest([]) == {}


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a",), ("a",)],
        [("a", 0), ("a", "b")],
        [(0,), (1,)],
    ],
)
def test_paths_that_contradict_each_other(paths):
    with pytest.raises(FormatError, match="keys"):
        nest([(path, 1) for path in paths])
