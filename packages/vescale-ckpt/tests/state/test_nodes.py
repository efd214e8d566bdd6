"""JSON of a state from a file that nobody trusts: every tree that is none is refused, and the place is named."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._state import ABSENT, check, is_absent, leaves, local_names, unpack
from vescale_ckpt._state.nodes import parse
from vescale_ckpt.errors import FormatError


def nest(depth, node=1, key=None):
    for _ in range(depth):
        node = [node] if key is None else {key: node}
    return node


HOSTILE = [
    # (tree, what the message says); 2 tensors and 1 local value exist
    ({"$tensor": 2}, "the state itself: .tensor 2 does not exist, there are 2"),
    ({"a": {"$tensor": -1}}, "a: .tensor -1 is no number"),
    ({"a": {"$tensor": True}}, "a: .tensor True is no number"),
    ({"a": {"$tensor": 0.0}}, "a: .tensor 0.0 is no number"),
    ({"a": {"$tensor": "0"}}, "a: .tensor '0' is no number"),
    ({"a": {"$tensor": None}}, "a: .tensor None"),
    ({"a": {"$tensor": [0]}}, "a: .tensor"),
    ({"a": {"$tensor": 10**300}}, "a: .tensor 1000"),
    ({"a": {"$numpy": 2}}, "a: .numpy 2 does not exist"),
    ({"a": {"$numpy": {}}}, "a: .numpy"),
    ({"a": {"$local": 1}}, "a: .local 1 does not exist, there are 1"),
    ({"a": {"$local": False}}, "a: .local False"),
    ({"a": {"$tensor": 0, "$numpy": 0}}, "a: an object with the keys .* one tag must stand alone"),
    ({"a": {"$tensor": 0, "b": 1}}, "a: an object with the keys"),
    ({"a": {"b": 1, "$tensor": 0}}, "a: an object with the keys"),
    ({"a": {"$dict": [], "$ordered": []}}, "a: an object with the keys"),
    ({"$": 1}, "'[$]' is no kind of value"),
    ({"$pickle": "gASVAA=="}, "is no kind of value; a newer version"),
    ({"a": [0, {"$object": ["os.system", "id"]}]}, "a.1: '.object' is no kind of value"),
    ({"a": {"$TENSOR": 0}}, "is no kind of value"),
    ({"a": {"$" + "x" * 10**6: 0}}, "is no kind of value"),
    ({"a": ABSENT}, "a: '.absent' is no kind of value"),
    ({"a": {"$tuple": 1}}, "a: .tuple must hold a list"),
    ({"a": {"$tuple": {"0": 1}}}, "a: .tuple must hold a list"),
    ({"a": {"$tuple": "ab"}}, "a: .tuple must hold a list"),
    ({"a": {"$tuple": [1, {"$tensor": 7}]}}, "a.1: .tensor 7"),
    ({"a": {"$dict": {"b": 1}}}, "a: .dict must hold a list"),
    ({"a": {"$dict": [1]}}, "a: .dict must hold pairs"),
    ({"a": {"$dict": [[1]]}}, "a: .dict must hold pairs"),
    ({"a": {"$dict": [[1, 2, 3]]}}, "a: .dict must hold pairs"),
    ({"a": {"$dict": ["ab"]}}, "a: .dict must hold pairs"),
    ({"a": {"$dict": [[1, 2], [1, 3]]}}, "a: the key 1 stands twice"),
    ({"a": {"$dict": [[1, 2], [True, 3]]}}, "a: the key True stands twice"),
    ({"a": {"$dict": [[0.0, 2], [-0.0, 3]]}}, "a: the key -0.0 stands twice"),
    ({"a": {"$dict": [[{"$float": "nan"}, 2]]}}, "a: .*is no key"),
    ({"a": {"$dict": [[[1], 2]]}}, "a: .*is no key"),
    ({"a": {"$dict": [[{"$tuple": [{"$tensor": 0}]}, 2]]}}, "a: .*is no key"),
    ({"a": {"$dict": [[nest(17, 1, "$tuple"), 2]]}}, "a: .*is no key"),
    ({"a": {"$ordered": None}}, "a: .ordered must hold a list"),
    ({"a": {"$ordered": [["b", {"$numpy": 9}]]}}, "a.b: .numpy 9"),
    ({"a": {"$set": [{"$tensor": 0}]}}, "a: .* is no value of kind .set"),
    ({"a": {"$set": [[1]]}}, "a: .* is no value of kind .set"),
    ({"a": {"$bytes": "!"}}, "a: '!' is no value of kind .bytes"),
    ({"a": {"$size": [-1]}}, "a: .* is no value of kind .size"),
    ({"a": {"$size": [1 << 64]}}, "a: .* is no value of kind .size"),
    ({"a": {"$dtype": "Module"}}, "a: dtype: 'Module' is none of"),
    ({"a": {"$device": "x; y"}}, "a: .* is no value of kind .device"),
    ({"a": {"$float": "1e9"}}, "a: .* is no value of kind .float"),
    ({"a": {"$complex": []}}, "a: .* is no value of kind .complex"),
    ({"a": {"$numpy_scalar": ["O", ""]}}, "a: .* is no value of kind .numpy_scalar"),
    ({"a": math.nan}, "a: nan is no JSON"),
    ({"a": [math.inf]}, "a.0: inf is no JSON"),
    ({"a": 1 << 5000}, "a: .* is no JSON"),
    ({"a": "\ud800"}, "a: .* is no JSON"),
    ({"a": (1, 2)}, "a: .* is no JSON"),
    ({"a": b"x"}, "a: b'x' is no JSON"),
    ({"a": {1: 2}}, "a: .* the keys"),
    ({"a": object()}, "a: .* is no JSON"),
    (nest(192), "more than 190 levels deep"),
    (nest(192, 1, "a"), "more than 190 levels deep"),
    (nest(5000, 1, "$tuple"), ".tuple must hold a list"),
    ({"a" * 20000: 1}, "a name of 20001 characters"),
    (nest(100, 1, "b" * 1000), "a name of 100100 characters"),
    ({"$dict": [[{"$tuple": ["c" * 20000]}, 1]]}, "a name of 20003 characters"),
]


@pytest.mark.parametrize(("tree", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_trees_are_refused(tree, message):
    with pytest.raises(FormatError, match=f"^tree: .*{message}") as caught:
        check(tree, 2, 1)
    assert len(str(caught.value)) < 1000
    with pytest.raises(FormatError, match=message):
        unpack(tree, lambda n: pytest.fail("asked for a tensor"), lambda n: pytest.fail("asked"), tensors=2, locals=1)


def test_the_names_of_many_leaves_below_a_long_key_do_not_fill_the_memory():
    many = {"k" * 16000: {str(number): {} if number % 2 else [number, {}] for number in range(140000)}}
    with pytest.raises(FormatError, match="all names together too long"):
        parse(many)


def test_depth_up_to_the_limit_is_read():
    found = unpack(nest(190), pytest.fail, pytest.fail)
    for _ in range(190):
        (found,) = found
    assert found == 1


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text("a$.", max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text("a$.", max_size=2), inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                "$tensor $numpy $local $dict $ordered $tuple $set $frozenset $bytes $float $complex $size $dtype "
                "$device $numpy_scalar $absent".split()
            ),
            inner,
            min_size=1,
            max_size=1,
        ),
        st.lists(st.tuples(inner, inner).map(list), max_size=2).map(lambda pairs: {"$dict": pairs}),
    ),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=500, deadline=None)
def test_any_json_is_read_or_refused(tree):
    try:
        check(tree, 2, 1)
    except FormatError:
        with pytest.raises(FormatError):
            unpack(tree, lambda n: n, lambda n: n, tensors=2, locals=1)
        return
    asked = []
    unpack(tree, lambda n: asked.append(("tensor", n)), lambda n: asked.append(("local", n)), tensors=2, locals=1)
    assert set(asked) <= {("tensor", 0), ("tensor", 1), ("local", 0)}
    named = leaves(tree)
    assert len({leaf.name for leaf in named}) == len(named)
    assert {leaf.record for leaf in named} <= {None, 0, 1}


def test_leaves_are_named_in_order():
    tree = {
        "model": {"w": {"$tensor": 1}, "tied": {"$tensor": 1}},
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "table": {"$dict": [[3, {"$numpy": 0}]]},
        "empty": [],
        "rng": {"$local": 0},
        "shape": {"$size": [2, 3]},
    }
    assert [(leaf.name, leaf.record, leaf.slot) for leaf in leaves(tree)] == [
        ("model.w", 1, None),
        ("model.tied", 1, None),
        ("groups.0.lr", None, None),
        ("groups.0.params", None, None),
        ("table.3", 0, None),
        ("rng", None, 0),
        ("shape", None, None),
    ]
    assert leaves(tree)[3].node == [0, 1]
    assert leaves(tree)[4].path == ("table", 3)


def test_local_names_are_in_the_order_of_their_numbers():
    assert local_names({"b": {"$local": 0}, "a": [{"$local": 1}]}) == ["b", "a.0"]
    for numbers in ([0, 2], [1], [1, 2]):
        tree = {str(n): {"$local": n} for n in numbers}
        with pytest.raises(FormatError, match=r"must be 0, 1, 2"):
            local_names(tree)


def test_absent():
    assert is_absent(json.loads(json.dumps(ABSENT)))
    assert not any(map(is_absent, [None, 0, {}, [], {"absent": None}, "$absent", {"$tensor": 0}]))
