"""Names of leaves: unique, independent of the order of dicts, and plain wherever that is possible."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._state.names import escaped, named, plain, spell

# Few letters, so that names collide all the time.
TEXT = st.text("ab0.[]\\$", max_size=4)
KEYS = st.one_of(TEXT, st.integers(0, 2), st.none(), st.booleans(), st.just(1.5), st.tuples(TEXT, st.integers(0, 1)))
PATHS = st.lists(
    st.lists(KEYS, min_size=1, max_size=3).map(tuple), unique_by=lambda path: tuple(map(repr, path)), max_size=8
)


@pytest.mark.parametrize(
    ("path", "name", "long"),
    [
        ((), "$", "$"),
        (("model", "layers", 0, "weight"), "model.layers.0.weight", "model.layers.[0].weight"),
        (("a.b", "c"), "a.b.c", r"a\.b.c"),
        (("a\\", "b"), "a\\.b", r"a\\.b"),
        (("[0]",), "[0]", r"\[0]"),
        ((0,), "0", "[0]"),
        ((None, True, 1.5), "None.True.1.5", r"[null].[true].[1\.5]"),
        ((("a", 1),), "(a,1)", '[["a",1]]'),
        (("",), "", ""),
    ],
)
def test_names_by_hand(path, name, long):
    assert plain(path) == name
    assert escaped(path) == long


@given(PATHS)
@settings(max_examples=500, deadline=None)
def test_names_are_unique_and_plain_where_they_can_be(paths):
    names = named(paths)
    assert len(set(names)) == len(paths)
    for path, name in zip(paths, names, strict=True):
        assert name in (plain(path), escaped(path))
    if len({plain(path) for path in paths}) == len(paths):
        assert names == [plain(path) for path in paths]


@given(PATHS, st.integers(0, 100))
@settings(max_examples=300, deadline=None)
def test_names_do_not_depend_on_order(paths, seed):
    shuffled = list(paths)
    random.Random(seed).shuffle(shuffled)
    before = {repr(path): name for path, name in zip(paths, named(paths), strict=True)}
    assert before == {repr(path): name for path, name in zip(shuffled, named(shuffled), strict=True)}


def test_escaped_names_are_all_different():
    keys = ["a", "a.b", "b", "", "\\", "\\.", ".", "[0]", "\\[0]", 0, "0", None, "None", True, 1.0, 1, ("a", "b"), "[a"]
    paths = [path for length in (1, 2, 3) for path in itertools.product(keys, repeat=length)]
    assert len({escaped(path) for path in paths}) == len(paths)


def test_an_escaped_name_that_is_taken_pushes_its_owner_aside():
    # The second one is escaped to "a\.b", which is the plain name of the third.
    paths = [("a", "b"), ("a.b",), ("a\\", "b")]
    names = named(paths)
    assert len(set(names)) == 3
    assert names == ["a.b", "a\\.b", "a\\\\.b"]


def test_messages_are_short_and_ascii():
    assert spell(()) == "the state itself"
    assert spell(("a", "\u00e4\n")) == r"a.\xe4\n"
    long = spell(("x" * 5000, "end"))
    assert len(long) <= 300
    assert long.endswith(".end")
