"""States taken apart, sent through JSON and put together again: equal, of the same classes, ties kept."""

import collections
import json

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt import local
from vescale_ckpt._state import build, pack, parse, unpack
from vescale_ckpt.errors import FormatError, StateError

KEYS = st.one_of(
    st.text("ab.$[0\u00e4", max_size=3),
    st.integers(-2, 3),
    st.booleans(),
    st.none(),
    st.sampled_from([0.5, float("inf")]),
    st.tuples(st.text("a", max_size=1), st.integers(0, 1)),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=4),
    st.complex_numbers(),
    st.sets(st.integers(0, 5), max_size=3),
    st.sampled_from([torch.float16, torch.device("cuda:1"), torch.Size([3]), frozenset({"a"})]),
    st.sampled_from(["float32", "int8", "bool", "complex64"]).map(lambda n: numpy.dtype(n).type(1)),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).map(lambda d: torch.ones(2, 3).to(d)),
    st.integers(0, 3).map(lambda n: torch.arange(n)),
    st.sampled_from(["float64", "uint8", ">i4"]).map(lambda n: numpy.arange(6).reshape(2, 3).astype(n)),
)
STATES = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=10,
)


def through_json(node):
    return json.loads(json.dumps(node, allow_nan=False, ensure_ascii=False))


def there_and_back(state):
    packed = pack(state)
    owned = [unpack(n, lambda i: packed.local_tensors[i][1], lambda _: None) for n in map(through_json, packed.local)]
    return unpack(
        through_json(packed.tree),
        lambda i: packed.tensors[i][1],
        owned.__getitem__,
        tensors=len(packed.tensors),
        locals=len(packed.local),
    )


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, numpy.ndarray):
        assert a.dtype == b.dtype.newbyteorder("=")
        assert numpy.array_equal(a, b)
    elif isinstance(a, dict):
        assert list(map(repr, a)) == list(map(repr, b))
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, (set, frozenset)):
        assert a == b
    else:
        assert repr(a) == repr(b)


@given(STATES)
@settings(max_examples=300, deadline=None)
def test_states_come_back(state):
    assert_same(there_and_back(state), state)


@given(STATES)
@settings(max_examples=100, deadline=None)
def test_names_are_unique_and_sorted(state):
    packed = pack({"model": state, "rest": [state]})
    names = [name for name, _ in packed.tensors]
    assert names == sorted(set(names))
    assert set(packed.paths) == set(names)


@given(st.dictionaries(st.text("ab.", min_size=1, max_size=3), VALUES, max_size=5), st.randoms())
@settings(max_examples=100, deadline=None)
def test_numbers_do_not_depend_on_the_order_of_dicts(state, random):
    keys = list(state)
    random.shuffle(keys)
    first, second = pack(state), pack({key: state[key] for key in keys})
    assert [name for name, _ in first.tensors] == [name for name, _ in second.tensors]
    assert first.tree == second.tree


def test_the_tree_by_hand():
    weight = torch.zeros(2)
    state = {
        "b": weight,
        "a": [weight, (1, torch.ones(1)), numpy.zeros(3)],
        "o": collections.OrderedDict(x=1),
        "$x": 1,
        "n": {1: {2: ()}},
        "s": {"$tensor": 0},
        "empty": [{}, [], ()],
    }
    packed = pack(state)
    assert packed.tree == {
        "$dict": [
            ["b", {"$tensor": 0}],
            ["a", [{"$tensor": 0}, {"$tuple": [1, {"$tensor": 1}]}, {"$numpy": 2}]],
            ["o", {"$ordered": [["x", 1]]}],
            ["$x", 1],
            ["n", {"$dict": [[1, {"$dict": [[2, {"$tuple": []}]]}]]}],
            ["s", {"$dict": [["$tensor", 0]]}],
            ["empty", [{}, [], {"$tuple": []}]],
        ]
    }
    assert [name for name, _ in packed.tensors] == ["a.0", "a.1.1", "a.2"]
    assert packed.tensors[0][1] is weight
    assert packed.paths["a.1.1"] == ("a", 1, 1)


def test_a_state_that_is_one_leaf():
    packed = pack(torch.ones(3))
    assert (packed.tree, packed.tensors[0][0]) == ({"$tensor": 0}, "$")
    assert pack(5).tree == 5
    packed = pack(local(5))
    assert (packed.tree, packed.local, packed.local_names) == ({"$local": 0}, [5], ["$"])


BASE = torch.arange(12.0)


@pytest.mark.parametrize(
    ("other", "tied"),
    [
        (BASE, True),
        (BASE.detach(), True),
        (BASE.view(12), True),
        (torch.nn.Parameter(BASE), True),
        (torch.from_numpy(BASE.numpy()), True),
        (BASE.numpy(), True),
        (BASE.clone(), False),
        (BASE.view(3, 4), False),
        (BASE[1:], False),
        (BASE[:11], False),
        (BASE[::2], False),
        (BASE.view(torch.int32), False),
        (torch.as_strided(BASE, (12,), (0,)), False),
        (BASE.view(3, 4).t(), False),
        (torch._neg_view(BASE), False),
        (BASE.numpy()[::-1], False),
    ],
    ids=range(16),
)
def test_aliases_are_saved_once_and_near_aliases_are_not(other, tied):
    packed = pack({"a": BASE, "b": other})
    assert len(packed.tensors) == (1 if tied else 2)
    assert packed.tensors[0][0] == "a"
    found = there_and_back({"a": BASE, "b": other})
    expected = torch.as_tensor(other.copy() if isinstance(other, numpy.ndarray) else other)
    assert torch.equal(torch.as_tensor(found["b"]), expected)
    if tied and not isinstance(other, numpy.ndarray):
        assert found["a"] is found["b"]


def test_conjugated_views_are_no_aliases():
    z = torch.tensor([1 + 2j])
    assert len(pack([z, z.conj()]).tensors) == 2
    assert len(pack([z.conj(), z.conj()]).tensors) == 1


def test_empty_tensors_are_tied_by_their_storage():
    a, b = torch.empty(0, 3), torch.empty(0, 3)
    assert len(pack([a, b]).tensors) == 2
    assert len(pack([a, a, a.detach()]).tensors) == 1
    assert len(pack([torch.empty(0) for _ in range(100)]).tensors) == 100


def test_arrays_that_are_copied_are_never_taken_for_aliases():
    # Each copy could get the memory of the one before it.
    arrays = [numpy.full(1000, n)[::-1] for n in range(50)]
    found = there_and_back(arrays)
    assert [int(array[0]) for array in found] == list(range(50))


def test_tied_tensors_are_named_by_the_first_name():
    shared = torch.zeros(2)
    for state in ({"z": shared, "m": shared, "k": 1}, {"m": shared, "k": 1, "z": shared}):
        packed = pack(state)
        assert packed.tensors[0][0] == "m"
        assert packed.paths == {"m": ("m",)}


def test_colliding_names_are_told_apart():
    packed = pack({"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)})
    assert [name for name, _ in packed.tensors] == ["a.b", r"a\.b"]
    assert packed.paths == {"a.b": ("a", "b"), r"a\.b": ("a.b",)}
    assert packed.tree == {"a": {"b": {"$tensor": 0}}, "a.b": {"$tensor": 1}}


def test_names_have_a_limit():
    longest = "x" * 16384
    packed = pack({longest: torch.zeros(1)})
    unpack(packed.tree, lambda i: i, lambda i: i)
    for state in ({longest + "x": torch.zeros(1)}, {longest: {"a": 1}}, {"a": local({longest: {"b": 2}})}):
        with pytest.raises(StateError, match=r"characters, where 16384 are allowed. Use shorter keys"):
            pack(state)


def test_local_values_have_tensors_of_their_own():
    shared = torch.zeros(2)
    packed = pack({"w": shared, "z": local({"w": shared, "v": [shared]}), "a": local((numpy.ones(2), 3))})
    assert packed.tree == {"w": {"$tensor": 0}, "z": {"$local": 1}, "a": {"$local": 0}}
    assert packed.local_names == ["a", "z"]
    assert packed.local == [{"$tuple": [{"$numpy": 0}, 3]}, {"w": {"$tensor": 1}, "v": [{"$tensor": 1}]}]
    assert [name for name, _ in packed.local_tensors] == ["a.0", "z.v.0"]


def test_each_number_is_asked_for_once():
    asked = []
    tree = [{"$tensor": 1}, {"$tensor": 1}, {"$tensor": 0}, {"a": {"$tensor": 1}}]
    found = unpack(tree, lambda n: asked.append(n) or [n], lambda n: n, tensors=2)
    assert sorted(asked) == [0, 1]
    assert found[0] is found[1] is found[3]["a"]


def test_every_place_and_every_state_has_containers_of_its_own():
    root = parse({"a": [1, 2], "s": {"$set": [1]}, "d": {}})
    first, second = (build(root, lambda n: n, lambda n: n) for _ in range(2))
    first["a"].append(3)
    first["s"].add(2)
    first["d"]["x"] = 1
    assert second == {"a": [1, 2], "s": {1}, "d": {}}


def test_an_array_of_what_numpy_lacks_is_refused():
    with pytest.raises(FormatError, match=r"tree: a: .*torch.bfloat16, which numpy does not have"):
        unpack({"a": {"$numpy": 0}}, lambda n: torch.zeros(2, dtype=torch.bfloat16), lambda n: n)


def test_arrays_share_memory_with_the_tensors_that_are_given():
    tensor = torch.arange(4)
    found = unpack([{"$numpy": 0}, {"$tensor": 0}], lambda n: tensor, lambda n: n)
    tensor[0] = 7
    assert found[0].tolist() == [7, 1, 2, 3]
    assert found[1] is tensor


def test_without_numpy_an_array_is_refused_and_the_rest_is_read(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "numpy", None)
    for tree in ({"a": {"$numpy": 0}}, {"a": {"$numpy_scalar": ["int8", "AQ=="]}}):
        with pytest.raises(StateError, match=r"state: a.*install numpy"):
            unpack(tree, lambda n: torch.zeros(2), lambda n: n)
    assert unpack({"a": 1}, lambda n: n, lambda n: n) == {"a": 1}


def test_tensors_in_transformations_are_refused():
    seen = []

    def look(x):
        with pytest.raises(StateError, match=r"a is a tensor inside of a transformation.*Save it outside"):
            pack({"a": x})
        seen.append(1)
        return x

    torch.vmap(look)(torch.ones(2, 3))
    assert seen
