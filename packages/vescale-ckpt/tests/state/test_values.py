"""Values without tensors: what comes back is equal and of the same class; what cannot come back is refused by name."""

import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._state.values import NumpyScalar, decode, decode_key, encode, encode_key, is_primitive, levels
from vescale_ckpt.errors import FormatError, StateError

FLOATS = st.floats(allow_nan=False)
SIMPLE = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), FLOATS, st.text(max_size=9), st.binary(max_size=9)
)
KEYS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), FLOATS, st.text(max_size=5)),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)
ELEMENTS = st.recursive(
    st.one_of(SIMPLE, st.complex_numbers(allow_nan=False)),
    lambda inner: st.one_of(st.tuples(inner), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)


@dataclasses.dataclass
class Spot:
    x: int


def through_json(node):
    return json.loads(json.dumps(node, allow_nan=False))


def back(value):
    node = through_json(encode(value, ("key",)))
    if is_primitive(node):
        return node
    ((tag, payload),) = node.items()
    return decode(tag, payload, "tree: key")


def same(a, b):
    """Equal, of the same class, and -0.0 is not 0.0."""
    if isinstance(a, (set, frozenset)):
        return type(a) is type(b) and a == b
    return type(a) is type(b) and repr(a) == repr(b)


@given(st.one_of(SIMPLE, FLOATS, st.complex_numbers(), st.sets(ELEMENTS, max_size=4), st.frozensets(ELEMENTS)))
@settings(max_examples=300, deadline=None)
def test_values_come_back(value):
    assert same(back(value), value)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        -0.0,
        complex(math.nan, -math.inf),
        complex(-0.0, 0.0),
        2**4095,
        -(2**4095),
        "",
        "\0\u2028\U0001f600",
        bytes(range(256)),
        torch.Size([]),
        torch.Size([2, 0, 3]),
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.device("cpu"),
        torch.device("cuda:3"),
        torch.device("meta"),
        set(),
        pytest.param(frozenset({(1, ("a", b"b")), frozenset({1.5})}), id="nested"),
        pytest.param({torch.float32, torch.int8}, id="dtypes"),
        {math.inf},
        collections.Counter([7, 3, 3, "a", (1, 2.5)]),
        collections.Counter({"gone": -2, "zero": 0}),
        collections.Counter(),
    ],
    ids=str,
)
def test_special_values_come_back(value):
    assert same(back(value), value)


@pytest.mark.parametrize(
    "name",
    "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128".split(),
)
@pytest.mark.parametrize("order", "<>")
def test_numpy_scalars_come_back(name, order):
    value = numpy.array([3.7], name).astype(numpy.dtype(name).newbyteorder(order))[0]
    found = back(value)
    assert type(found) is NumpyScalar
    made = found.make("state")
    assert type(made) is type(numpy.dtype(name).type(0))
    assert made == value


def test_numpy_scalars_are_little_endian():
    node = encode(numpy.uint16(0x0102), ())
    assert node == {"$numpy_scalar": ["uint16", "AgE="]}


def test_sets_do_not_depend_on_their_order():
    words = [f"w{n}" for n in range(50)]
    nodes = set()
    for seed in range(5):
        random.Random(seed).shuffle(words)
        nodes.add(json.dumps(encode(set(words), ())))
    assert len(nodes) == 1


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


class Custom:
    pass


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Custom(), "state_dict and load_state_dict"),
        (Custom, "state_dict and load_state_dict"),
        (len, "state_dict and load_state_dict"),
        (Color.RED, r"take its \.value"),
        (datetime.datetime(2026, 1, 1), "isoformat"),
        (datetime.timedelta(1), "total_seconds"),
        (pathlib.Path("a"), r"str\(\.\.\.\)"),
        (Spot(1), r"dataclasses\.asdict\(\.\.\.\)"),
        (Text("a"), r"str\(\.\.\.\)"),
        (Point(1, 2), r"tuple\(\.\.\.\)"),
        (collections.deque([1]), r"list\(\.\.\.\)"),
        (range(3), r"list\(\.\.\.\)"),
        (bytearray(b"a"), r"bytes\(\.\.\.\)"),
        (memoryview(b"a"), r"bytes\(\.\.\.\)"),
        (collections.Counter(a=1.5), r"has the count 1\.5, which is no int"),
        (collections.Counter(a=True), "has the count True"),
        (collections.ChainMap({}), "save the numbers"),
        (collections.defaultdict(int), r"dict\(\.\.\.\)"),
        (torch.Generator(), r"get_state\(\)"),
        (numpy.datetime64(1, "s"), "save the numbers"),
        (numpy.str_("a"), r"str\(\.\.\.\)"),
        (2**4097, "4098 bits"),
        ("\ud800", "surrogate"),
        ({"\ud800"}, "surrogate"),
        ({Custom()}, "use a list"),
        ({numpy.int64(1)}, "use a list"),
        (torch.quint8, "torch.quint8"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_other_values_are_refused_by_name(value, advice):
    with pytest.raises(StateError, match=advice) as caught:
        encode(value, ("optimizer", "groups", 0, "x"))
    assert "optimizer.groups.0.x" in str(caught.value)
    assert isinstance(caught.value, TypeError)


@given(KEYS)
@settings(max_examples=200, deadline=None)
def test_keys_come_back(key):
    assert same(decode_key(through_json(encode_key(key, ())), "tree"), key)


def nested(depth):
    return () if depth == 0 else (nested(depth - 1),)


def test_keys_may_be_as_deep_as_they_are_read():
    deepest = nested(15)  # 16 tuples
    assert decode_key(encode_key(deepest, ()), "tree") == deepest
    with pytest.raises(StateError, match=r"at a.b has the key"):
        encode_key(nested(16), ("a", "b"))
    with pytest.raises(FormatError, match="no key"):
        decode_key({"$tuple": [encode_key(deepest, ())]}, "tree")


def test_sets_may_be_as_deep_as_they_are_read():
    deepest = nested(15)
    assert back({deepest}) == {deepest}
    with pytest.raises(StateError, match="the set at a"):
        encode({nested(16)}, ("a",))


@pytest.mark.parametrize("key", [math.nan, b"a", Color.RED, Text("a"), frozenset(), 1j, (1, b"a"), "\ud800", 2**5000])
def test_other_keys_are_refused(key):
    with pytest.raises(StateError, match="the dict at model has the key"):
        encode_key(key, ("model",))


@pytest.mark.parametrize(
    "node",
    [
        {"$float": "nan"},
        {"$float": 1},
        {"$float": ["inf"]},
        {"$tuple": "ab"},
        {"$tuple": [{}]},
        {"$tuple": [1], "$float": "inf"},
        {"$set": []},
        {"tuple": []},
        {},
        [],
        [1],
        math.nan,
    ],
    ids=str,
)
def test_what_is_no_key_is_refused(node):
    with pytest.raises(FormatError, match=r"tree: a: .* is no key"):
        decode_key(node, "tree: a")


@pytest.mark.parametrize(
    ("tag", "payload"),
    [
        ("$float", "1"),
        ("$float", "NaN"),
        ("$float", None),
        ("$float", ["nan"]),
        ("$float", {}),
        ("$complex", [1]),
        ("$complex", [1, 2, 3]),
        ("$complex", "12"),
        ("$complex", [True, 0]),
        ("$complex", [1, {"$float": "x"}]),
        ("$complex", [1, {"a": "nan"}]),
        ("$complex", [10**400, 0]),
        ("$complex", {"a": 1, "b": 2}),
        ("$bytes", "a"),
        ("$bytes", "a b="),
        ("$bytes", 7),
        ("$bytes", "\u00e4=="),
        ("$set", {}),
        ("$set", [[1]]),
        ("$set", [{"$set": []}]),
        ("$set", [{"$tensor": 0}]),
        ("$set", [{"$size": [1]}]),
        ("$set", [{"a": 1}]),
        ("$set", [{}]),
        ("$set", [{"$tuple": 5}]),
        ("$frozenset", None),
        ("$counter", {"a": 1}),
        ("$counter", ["ab"]),
        ("$counter", [["a"]]),
        ("$counter", [["a", 1.0]]),
        ("$counter", [["a", True]]),
        ("$counter", [["a", 1], ["a", 2]]),
        ("$counter", [[["a"], 1]]),
        ("$counter", [[1, 1], [True, 2]]),
        ("$counter", [["a", 1 << 4097]]),
        ("$size", [-1]),
        ("$size", [1.0]),
        ("$size", [True]),
        ("$size", [1 << 63]),
        ("$size", "12"),
        ("$dtype", "torch.float32"),
        ("$dtype", "Tensor"),
        ("$dtype", "__class__"),
        ("$dtype", 3),
        ("$dtype", ["float32"]),
        ("$device", "cuda:0; import os"),
        ("$device", "nonsense"),
        ("$device", "cpu:-1"),
        ("$device", "cuda:999999"),
        ("$device", 0),
        ("$numpy_scalar", ["int8", "AAA="]),
        ("$numpy_scalar", ["object", "AAAAAAAAAAA="]),
        ("$numpy_scalar", ["bool", "Ag=="]),
        ("$numpy_scalar", {"int8": 1, "AA==": 2}),
        ("$numpy_scalar", [["int8"], "AA=="]),
        ("$numpy_scalar", ["int8"]),
        ("$pickle", "gASVAA=="),
        ("$absent", None),
        ("$", 1),
        ("$Tensor", 1),
    ],
    ids=str,
)
def test_hostile_payloads_are_refused(tag, payload):
    with pytest.raises(FormatError, match=r"^tree: a: "):
        decode(tag, payload, "tree: a")


@pytest.mark.parametrize(
    ("node", "depth"),
    [(1, 0), ("a", 0), ({}, 1), ([], 1), ({"$tuple": [1]}, 2), ({"$set": [{"$tuple": [{"$float": "inf"}]}]}, 5)],
    ids=str,
)
def test_levels(node, depth):
    assert levels(node) == depth
