import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import MismatchError
from vescale_ckpt.testing import MemoryStorage

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
]


@pytest.fixture
def storage():
    return MemoryStorage()


def test_everything_comes_back(storage):
    weight = torch.randn(300, 7)
    state = {
        "all": {str(d): torch.randint(0, 2, (99,)).to(d) for d in DTYPES},
        "turned": weight.t(),
        "tied": [weight, weight],
        3: ("x", None, {"deep": [1.5, float("inf"), b"bytes", torch.Size([2])]}),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    ck.save(storage, state, step=1)
    found = ck.load_dict(storage)
    for name, tensor in state["all"].items():
        assert torch.equal(found["all"][name], tensor), name
    assert torch.equal(found["turned"], weight.t())
    assert found["tied"][0] is found["tied"][1]
    assert found[3] == state[3]
    assert found["empty"].shape == (0, 4)
    assert found["scalar"].item() == 2.5


def test_only_what_is_wanted_is_read(storage):
    ck.save(storage, {"a": {"x": torch.ones(1000), "y": torch.zeros(1 << 20)}, "l": [torch.ones(2), 5, 6]}, step=1)
    read = []
    found = ck.load_dict(storage, keys="a.x", progress=read.append)
    assert list(found) == ["a"]
    assert torch.equal(found["a"]["x"], torch.ones(1000))
    assert list(found["a"]) == ["x"]
    assert 0 < sum(read) <= 4000
    assert ck.load_dict(storage, keys=["l.1"]) == {"l": [None, 5, None]}
    assert list(ck.load_dict(storage, keys=lambda name: name == "a.y")["a"]) == ["y"]
    with pytest.raises(MismatchError, match=r"a\.x"):
        ck.load_dict(storage, keys="a.xx")


def test_empty_containers_come_back_where_their_own_name_is_wanted(storage):
    state = {"a": {"x": 1, "none": {}}, "none": [], "deep": {"none": {"none": ()}}, "own": ck.local(5)}
    ck.save(storage, state, step=1)
    everything = {"a": {"x": 1, "none": {}}, "none": [], "deep": {"none": {"none": ()}}, "own": 5}
    assert ck.load_dict(storage) == ck.load_dict(storage, keys="*") == everything
    assert ck.load_dict(storage, keys="a.x") == {"a": {"x": 1}}
    assert ck.load_dict(storage, keys="own") == {"own": 5}
    assert ck.load_dict(storage, keys=["none", "a.*"]) == {"a": {"x": 1, "none": {}}, "none": []}
    assert ck.load_dict(storage, keys="deep.none.none") == {"deep": {"none": {"none": ()}}}


def test_values_of_a_rank(storage):
    ck.save(storage, {"own": ck.local({"pos": 3, "t": torch.arange(200)}), "b": 1}, step=1)
    found = ck.load_dict(storage)
    assert found["own"]["pos"] == 3
    assert torch.equal(found["own"]["t"], torch.arange(200))


def test_arrays_are_arrays(storage):
    numpy = pytest.importorskip("numpy")
    ck.save(storage, {"a": numpy.arange(500.0), "s": numpy.float32(3)}, step=1)
    found = ck.load_dict(storage)
    assert isinstance(found["a"], numpy.ndarray)
    assert (found["a"] == numpy.arange(500.0)).all()
    assert found["s"] == 3
    assert found["s"].dtype == numpy.float32


def test_an_earlier_step(storage):
    ck.save(storage, {"a": torch.ones(500)}, step=1)
    ck.save(storage, {"a": torch.zeros(500)}, step=2)
    assert ck.load_dict(storage, step=1)["a"].sum() == 500
    assert ck.load_dict(storage)["a"].sum() == 0
