import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CorruptionError, MismatchError, MissingStepError, TensorView
from vescale_ckpt.testing import MemoryStorage


@pytest.fixture
def storage():
    return MemoryStorage()


def state():
    weight = torch.arange(600.0).view(20, 30)
    return {
        "model": {"w": weight, "tied": weight, "b": torch.arange(5)},
        "opt": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.5, "betas": (0.9, 0.99)},
        "list": [torch.ones(3), 7],
        "own": ck.local({"pos": 9, "t": torch.arange(400)}),
    }


def test_what_it_tells(storage):
    ck.save(storage, state(), step=5, metadata={"loss": 2})
    with ck.open(storage) as checkpoint:
        assert (checkpoint.step, checkpoint.metadata, len(checkpoint)) == (5, {"loss": 2}, len(checkpoint.names))
        assert set(checkpoint.keys()) == {"model.w", "model.tied", "model.b", "opt.state.0.step", "list.0"}
        assert checkpoint.keys()["model.w"] == checkpoint.keys()["model.tied"]
        assert "step 5" in repr(checkpoint)


def test_keys_lead_to_leaves_and_parts(storage):
    ck.save(storage, state(), step=5)
    with ck.open(storage) as checkpoint:
        assert checkpoint["opt.lr"] == 0.5
        assert checkpoint["opt.betas"] == (0.9, 0.99)
        assert isinstance(checkpoint["opt"]["state"][0]["step"], TensorView)
        assert torch.equal(checkpoint["list"][0].read(), torch.ones(3))
        assert torch.equal(checkpoint.tensor("model.tied").read(), state()["model"]["w"])
        with pytest.raises(KeyError, match=r"model\.b"):
            checkpoint.tensor("model.bb")
        with pytest.raises(KeyError, match="nothing"):
            checkpoint["nothing"]


def test_the_tree_has_views_and_ties(storage):
    ck.save(storage, state(), step=5)
    with ck.open(storage) as checkpoint:
        tree = checkpoint.tree(rank=0)
        assert tree["model"]["w"] is tree["model"]["tied"]
        assert tree["opt"]["betas"] == (0.9, 0.99)
        assert tree["own"]["pos"] == 9
        assert torch.equal(tree["own"]["t"][100:200:7], torch.arange(400)[100:200:7])
        assert isinstance(checkpoint.tree()["own"], type(ck.local(0)))


def test_a_rank_own_tensor_by_its_number(storage):
    ck.save(storage, state(), step=5)
    with ck.open(storage) as checkpoint:
        assert checkpoint.index(0).local_tensors[0].shape == (400,)
        assert torch.equal(checkpoint.read(0, writer=0), torch.arange(400))
        assert checkpoint.read(0).dtype == torch.float32  # number 0 of the whole is another one


def test_reading_into_another_dtype_is_refused(storage):
    ck.save(storage, {"w": torch.arange(300)}, step=1)
    with ck.open(storage) as checkpoint, pytest.raises(MismatchError, match=r"int64.*float32"):
        checkpoint.read(0, None, torch.empty(300))


def test_steps_that_are_not_there(storage):
    ck.save(storage, {"a": 1}, step=1)
    with pytest.raises(MissingStepError, match="there are: 1"):
        ck.open(storage, 2)
    with ck.open(storage) as checkpoint, pytest.raises(MissingStepError, match="saved by 1 rank, numbered from 0"):
        checkpoint.index(1)


@pytest.mark.parametrize("name", ["manifest.json", "index/w00000.json"])
def test_any_flipped_bit_of_manifest_or_index_is_found(storage, name):
    ck.save(storage, state(), step=1)
    with ck.open(storage) as checkpoint:
        path = f"{checkpoint.folder}/{name}"
    good = storage.get(path, 1 << 20)
    for at in range(0, len(good), 97):
        storage.put(path, good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        with pytest.raises(CorruptionError), ck.open(storage) as checkpoint:
            checkpoint.tensor("model.w").read()


def test_indexes_of_other_writers_are_not_read(storage):
    ck.save(storage, state(), step=1)
    seen = []
    get = storage.get
    storage.get = lambda path, limit: seen.append(path) or get(path, limit)
    with ck.open(storage) as checkpoint:
        checkpoint["opt.lr"]
        assert not [path for path in seen if "/index/" in path]
        checkpoint.tensor("model.w")[3]
        checkpoint.tensor("model.b")[3]
        assert len([path for path in seen if "/index/" in path]) == 1
