import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vescale_ckpt as ck
from vescale_ckpt.testing import MemoryStorage

WHOLE = torch.arange(6 * 70 * 5).view(6, 70, 5)


@pytest.fixture(scope="module")
def view():
    storage = MemoryStorage()
    ck.save(storage, {"w": WHOLE, "zero": torch.tensor(7.5), "none": torch.empty(0, 3)}, step=1, chunk_bytes=4096)
    with ck.open(storage) as checkpoint:
        yield checkpoint.tensor("w")


def entries(size):
    steps = st.integers(1, 4) | st.none()
    ends = st.integers(-size - 2, size + 2) | st.none()
    return st.integers(-size, size - 1) | st.builds(slice, ends, ends, steps)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_indexing_is_that_of_torch(view, data):
    index = [data.draw(entries(size)) for size in WHOLE.shape[: data.draw(st.integers(0, 3))]]
    if data.draw(st.booleans()):
        index.append(...)
    found = view[tuple(index)]
    expected = WHOLE[tuple(index)]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


def test_indexes_from_the_end(view):
    assert torch.equal(view[..., 2], WHOLE[..., 2])
    assert torch.equal(view[-1, ..., 1:4:2], WHOLE[-1, ..., 1:4:2])
    assert torch.equal(view[3], WHOLE[3])


@pytest.mark.parametrize("index", [6, (0, 70), (-7,), (0, 0, 0, 0), (..., ...), slice(None, None, -1)])
def test_indexes_that_do_not_fit(view, index):
    with pytest.raises((IndexError, ValueError)):
        view[index]


@pytest.mark.parametrize("index", ["a", None, [1, 2], torch.tensor([1, 2])])
def test_indexes_of_other_kinds(view, index):
    with pytest.raises(TypeError, match="integers, slices"):
        view[index]


def test_what_it_tells(view):
    assert (view.name, view.shape, view.dtype, view.ndim) == ("w", WHOLE.shape, torch.int64, 3)
    assert (view.numel(), view.nbytes, view.itemsize, len(view)) == (2100, 16800, 8, 6)
    assert "int64" in repr(view)
    assert torch.equal(view.read(), WHOLE)
    checkpoint = view._checkpoint
    assert checkpoint.tensor("zero")[()].item() == 7.5
    assert checkpoint.tensor("none")[:, 1].shape == (0,)
    with pytest.raises(TypeError, match="0-d"):
        len(checkpoint.tensor("zero"))
