"""What of a live state is taken apart, what is refused, and that the message names the key."""

import collections
import json
import sys

import numpy
import pytest
import torch

from vescale_ckpt import local
from vescale_ckpt._format import jsonio
from vescale_ckpt._state import leaf_names, pack, unpack
from vescale_ckpt._state.scan import as_tensor, is_stateful, scan
from vescale_ckpt.errors import StateError


class Counter:
    """A Stateful object that counts how often it was asked."""

    def __init__(self, given):
        self.given, self.asked = given, 0

    def state_dict(self):
        self.asked += 1
        return self.given

    def load_state_dict(self, state):
        self.given = state


class Mapping(dict):
    """A dict that is Stateful too: what it says of itself counts."""

    def state_dict(self):
        return {"said": 1}

    def load_state_dict(self, state):
        pass


def tree(state):
    return pack(state).tree


def test_stateful_objects_are_asked_once():
    inner = Counter({"x": 1, "t": torch.ones(2)})
    outer = Counter({"inner": inner, "list": [inner]})
    packed = pack({"a": outer})
    assert packed.tree == {"a": {"inner": {"x": 1, "t": {"$tensor": 0}}, "list": [{"x": 1, "t": {"$tensor": 0}}]}}
    assert outer.asked == 1
    assert inner.asked == 2  # once per place
    assert tree(Mapping(b=2)) == {"said": 1}


def test_modules_and_optimizers_are_stateful():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    packed = pack({"model": model, "optimizer": optimizer})
    names = [name for name, _ in packed.tensors]
    assert names[:2] == ["model.bias", "model.weight"]
    assert "optimizer.state.1.exp_avg_sq" in names
    assert packed.paths["optimizer.state.1.exp_avg"] == ("optimizer", "state", 1, "exp_avg")
    assert dict(packed.tensors)["model.weight"].data_ptr() == model.weight.data_ptr()
    assert packed.tree["model"]["$ordered"][0] == ["weight", {"$tensor": 1}]
    assert packed.tree["optimizer"]["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        (torch.nn.Linear(1, 1), True),
        (Counter({}), True),
        (Mapping(), True),
        (Counter, False),
        (torch.nn.Linear, False),
        (torch.zeros(1), False),
        ({}, False),
        (None, False),
    ],
)
def test_is_stateful(value, answer):
    assert is_stateful(value) is answer


def test_cycles_are_refused():
    loop = {"a": {"b": []}}
    loop["a"]["b"].append(loop["a"])
    with pytest.raises(StateError, match=r"state: a\.b\.0 is the same object .* a cycle"):
        scan(loop)
    itself = Counter(None)
    itself.given = [itself]
    with pytest.raises(StateError, match=r"x\.0 is the same object"):
        scan({"x": itself})
    marked = local(None)
    marked.value = [marked]
    with pytest.raises(StateError, match=r"cycle|nested too deeply"):
        scan({"x": marked})
    marked.value = marked
    with pytest.raises(StateError, match="x is nested too deeply"):
        scan({"x": marked})


def test_one_object_in_two_places_is_no_cycle():
    shared = {"n": [1, {"x": 2}]}
    assert tree({"a": shared, "b": [shared, shared]})["b"][1] == {"n": [1, {"x": 2}]}


class Endless:
    def state_dict(self):
        return {"next": Endless()}

    def load_state_dict(self, state):
        pass


def wrap(value, kind):
    return {
        "list": lambda: [value, {}],
        "numbers": lambda: [value],
        "dict": lambda: {"a": value},
        "any key": lambda: {1: value},
        "tuple": lambda: (value, {}),
        "ordered": lambda: collections.OrderedDict(a=value),
        "stateful": lambda: Counter({"a": value}),
        "local": lambda: local([value]),
    }[kind]()


LEAVES = {
    "int": 1,
    "list": [1, 2],
    "tuple": (1, 2),
    "set": {((((1,),),),)},
    "inf": float("inf"),
    "complex": complex(float("nan"), 0),
    "key": {((((1,),),),): 0},
    "tensor": torch.zeros(1),
}


@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("kind", ["list", "numbers", "dict", "any key", "tuple", "ordered", "stateful", "local"])
def test_whatever_is_accepted_is_shallow_enough_to_be_read(kind, leaf):
    value, accepted = LEAVES[leaf], 0
    for depth in range(1, 260):
        value = wrap(value, kind)
        try:
            packed = pack(value)
        except StateError as error:
            assert "nested too deeply" in str(error)  # noqa: PT017
            break
        if depth > 30 and depth % 10:
            continue
        accepted = depth
        for node in (packed.tree, *packed.local):
            # As it stands in a file, two levels down.
            node = jsonio.loads(jsonio.dumps({"state": [node]}, "x"), "x", 1 << 20)["state"][0]
            unpack(node, lambda n: n, lambda n: n)
    else:
        pytest.fail("there is no limit")
    assert accepted >= 30
    with pytest.raises(StateError, match=r"next.next.*is nested too deeply"):
        scan(Endless())


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": [{"b": object()}]}, r"a\.0\.b is a builtins\.object"),
        ({"a": {1: {2: lambda: 0}}}, r"a\.1\.2 is a builtins\.function"),
        ([1, 2, object()], "2 is a"),
        ((1, (2, object())), r"1\.1 is a"),
        (collections.OrderedDict(x=collections.deque()), "x is a collections.deque"),
        ({"o": Counter({"x": object()})}, r"o\.x is a"),
        ({"o": local({"x": object()})}, r"o\.x is a"),
        ({"d": collections.defaultdict(list)}, r"d is a collections\.defaultdict.*dict\(\.\.\.\)"),
        ({"d": {b"k": 1}}, "the dict at d has the key b'k' of class bytes"),
        ({"d": {float("nan"): 1}}, "the dict at d has the key nan"),
        ({b"k": 1}, "the dict at the state itself has the key"),
        ([1.0, 2**5000], r"1 is an int of 5001 bits"),
        (["a", "\ud800"], "1 is a str with half"),
        (object(), "the state itself is a builtins.object"),
        ({"a": numpy.array(["x"])}, "a is a numpy.ndarray of dtype <U1"),
        ({"a": numpy.array([object()])}, "a is a numpy.ndarray of dtype object"),
        ({"a": numpy.array([1], "M8[s]")}, "a is a numpy.ndarray of dtype datetime64"),
        ({"a": numpy.zeros(2, "i4,f4")}, "a is a numpy.ndarray of dtype"),
        ({"a": numpy.ma.array([1])}, "a is a numpy.ma.*MaskedArray.*Saved are plain arrays"),
        ({"a": numpy.longdouble(1)}, "a is a numpy.longdouble"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_saved_is_named(state, key):
    with pytest.raises(StateError, match=key):
        pack(state)


@pytest.mark.parametrize("name", "bool uint8 int16 uint32 uint64 float16 float64 complex64 complex128".split())
@pytest.mark.parametrize(
    "how", ["plain", "order", "reversed", "strided", "read-only", "field", "unaligned", "empty", "0-d", "fortran"]
)
def test_arrays_become_tensors_of_the_same_elements(name, how):
    base = (numpy.arange(12).reshape(3, 4) % 5).astype(name)
    array = {
        "plain": lambda: base,
        "order": lambda: base.astype(base.dtype.newbyteorder(">")),
        "reversed": lambda: base[::-1, ::-1],
        "strided": lambda: base[::2, 1::2],
        "read-only": lambda: numpy.broadcast_to(base[:1], (5, 4)),
        "field": lambda: numpy.zeros(3, [("a", "u1"), ("b", name)])["b"],
        "unaligned": lambda: numpy.zeros(3, {"names": ["b"], "formats": [name], "offsets": [1], "itemsize": 32})["b"],
        "empty": lambda: base[:0],
        "0-d": lambda: base[1, 1:2].reshape(()),
        "fortran": lambda: numpy.asfortranarray(base),
    }[how]()
    tensor = as_tensor(array, ("a",))
    assert tuple(tensor.shape) == array.shape
    assert str(tensor.dtype) == f"torch.{name}"
    assert tensor.flatten().tolist() == array.flatten().tolist()
    shared = numpy.shares_memory(tensor.numpy(), array)
    bytewise = array.itemsize == 1 and how in ("field", "unaligned")
    native = how == "order" and array.dtype.isnative
    assert shared == (how in ("plain", "strided", "0-d", "fortran") or native or bytewise)


def test_numpy_is_not_needed(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    assert tree({"a": 1, "t": torch.zeros(1)}) == {"a": 1, "t": {"$tensor": 0}}
    assert "numpy" not in sys.modules


def test_local_values_are_leaves():
    marked = local({"position": 3, "seen": torch.arange(2)})
    root = scan({"data": marked, "step": 1})
    assert sorted(leaf_names(root).values()) == ["data", "step"]
    packed = pack({"data": marked, "step": 1})
    assert packed.tree == {"data": {"$local": 0}, "step": 1}
    assert packed.local == [{"position": 3, "seen": {"$tensor": 0}}]
    assert packed.local_names == ["data"]
    assert [name for name, _ in packed.local_tensors] == ["data.seen"]
    assert packed.tensors == []
    assert json.dumps(packed.local)


def test_marks_in_marks_are_one_mark():
    assert local(local(1)).value == 1
    packed = pack({"a": local({"b": local(7), "c": [local(torch.zeros(2))]})})
    assert packed.tree == {"a": {"$local": 0}}
    assert packed.local == [{"b": 7, "c": [{"$tensor": 0}]}]
