"""What is told of a step that cannot be read: which are there before it, and what became of the targets."""

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._geometry import Box
from vescale_ckpt._load import Request
from vescale_ckpt._load.earlier import with_earlier
from vescale_ckpt.testing import MemoryStorage


def state():
    return {"w": torch.randn(5000, generator=torch.Generator().manual_seed(3)), "v": torch.ones(5000)}


def damaged(steps, part, damage=True):
    """A store whose last step is damaged in a file of this name."""
    storage = MemoryStorage()
    for step in steps:
        folder = ck.save(storage, state(), step=step, dedup=None).folder
    (path,) = [path for path in storage.files() if path.startswith(folder) and part in path]
    data = bytearray(storage.files()[path])
    data[len(data) // 2] ^= 1
    storage.remove(path)
    storage.put(path, bytes(data))
    return storage


READERS = {
    "load": lambda storage: ck.load(storage, state()),
    "load_dict": lambda storage: ck.load_dict(storage),
    "view": lambda storage: [ck.open(storage)[name][:] for name in "vw"],
    "restore": lambda storage: ck.Checkpointer(storage).restore(state(), missing_ok=True),
}


@pytest.mark.parametrize("part", [".pack", "index", "manifest"])
@pytest.mark.parametrize("reader", READERS)
def test_earlier_steps_are_named(reader, part):
    with pytest.raises(ck.CorruptionError, match=r"Earlier steps that are there: 7, 2\. Load one with step=7"):
        READERS[reader](damaged([2, 7, 9], part))
    with pytest.raises(ck.CorruptionError) as caught:
        READERS[reader](damaged([9], part))
    assert "Earlier" not in str(caught.value)
    assert bool(caught.value.tensors) == (part == ".pack")


@pytest.mark.parametrize(
    ("reader", "text"),
    [("load", "is partly loaded"), ("load_dict", "Nothing was returned."), ("view", "Nothing was returned.")],
)
def test_what_became_of_the_targets(reader, text):
    with pytest.raises(ck.CorruptionError, match=r"(?s)1 chunk of 1 tensor is damaged:.*" + text) as caught:
        READERS[reader](damaged([1], ".pack"))
    assert "targets" not in str(caught.value)


def test_a_target_of_the_caller_is_told_of():
    storage = damaged([1], ".pack")
    said = "The targets hold what could be read"
    with ck.open(storage) as checkpoint, pytest.raises(ck.CorruptionError, match=said):
        checkpoint.read_many([Request(number, Box.whole((5000,)), torch.zeros(5000)) for number in (0, 1)])


def test_many_steps_and_later_ones():
    storage = MemoryStorage()
    for step in range(10):
        ck.save(storage, {"w": torch.ones(2)}, step=step)
    error = ck.CorruptionError("it is bad", ("w",))
    found = with_earlier(error, storage, 6)
    assert str(found).startswith("it is bad\nEarlier steps that are there: 5, 4, 3, 2 and more. Load one with step=5;")
    assert found.tensors == ("w",)
    assert with_earlier(error, storage, 0) is error


def test_a_storage_that_fails_as_well_does_not_hide_the_damage(monkeypatch):
    storage, error = MemoryStorage(), ck.CorruptionError("it is bad")

    def fail(*_, **__):
        raise ck.StorageError("down")

    monkeypatch.setattr(storage, "list", fail)
    assert with_earlier(error, storage, 5) is error
