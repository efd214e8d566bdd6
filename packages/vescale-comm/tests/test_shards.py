"""Runs of elements as boxes, and tensors that tell which elements of a whole they hold."""

import copy
import io
import itertools
import pickle

import pytest
import torch

from vescale_comm._shards import Box, ShardTensor, layout_of_shard, run_boxes, whole_of


def picked(whole: torch.Tensor, boxes: tuple[Box, ...]) -> torch.Tensor:
    """Read boxes out of a tensor, one after the other, by plain indexing."""
    parts = [whole[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in boxes]
    return torch.cat(parts) if parts else whole.new_empty(0)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 2), (1, 1)])
def test_every_run_is_its_elements_in_few_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for start, stop in itertools.combinations_with_replacement(range(whole.numel() + 1), 2):
        boxes = run_boxes(whole_of(shape).boxes, start, stop)
        assert torch.equal(picked(whole, boxes), whole.flatten()[start:stop])
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert all(box.numel for box in boxes)


def test_runs_count_through_the_boxes_of_a_local_part() -> None:
    whole = torch.arange(24.0).view(4, 6)
    held = (Box((0, 3), (2, 3)), Box((3, 0), (1, 6)))
    flat = picked(whole, held)
    for start, stop in itertools.combinations(range(13), 2):
        assert torch.equal(picked(whole, run_boxes(held, start, stop)), flat[start:stop])


def test_tensors_without_elements_have_no_boxes() -> None:
    assert run_boxes(whole_of((3, 0)).boxes, 0, 0) == ()
    assert run_boxes(whole_of((3, 2)).boxes, 4, 4) == ()


def test_a_shard_shares_memory_and_operators_forget_it() -> None:
    memory = torch.arange(10.0)
    part = ShardTensor.make(memory[2:6], whole_of((2, 3)), 1, 5)
    memory[2] = -1
    assert part.plain()[0] == -1
    assert type(part.plain()) is torch.Tensor
    assert type(part + 1) is torch.Tensor
    assert "4 of [2, 3]" in repr(part)
    layout = layout_of_shard(part)
    assert layout is not None
    assert (layout.global_shape, layout.global_stride, layout.partial) == ((2, 3), (3, 1), False)
    assert layout.local.data_ptr() == memory[2:].data_ptr()
    assert picked(torch.arange(6.0).view(2, 3), tuple(layout.boxes)).tolist() == [1, 2, 3, 4]
    assert layout_of_shard(memory) is None


def test_a_shard_can_be_copied_and_pickled() -> None:
    part = ShardTensor.make(torch.arange(4.0), whole_of((2, 3)), 1, 5)
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert isinstance(other, ShardTensor)
        assert (other.global_shape, other.boxes) == (part.global_shape, part.boxes)
        assert torch.equal(other.plain(), part.plain())
        assert other.data_ptr() != part.data_ptr()


def test_parts_without_elements_do_not_look_like_ties() -> None:
    memory = torch.arange(10.0)
    parts = [ShardTensor.make(memory[:0], whole_of((3,)), 3, 3) for _ in range(2)]
    places = {part.untyped_storage()._cdata for part in (*parts, memory)}
    assert len(places) == 3
    assert [tuple(part.shape) for part in parts] == [(0,), (0,)]


def test_a_saved_shard_is_loaded_by_the_default_of_torch() -> None:
    part = ShardTensor.make(torch.arange(4.0), whole_of((2, 3)), 1, 5)
    file = io.BytesIO()
    torch.save({"part": part, "twice": part}, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    other = found["part"]
    assert isinstance(other, ShardTensor)
    assert (other.global_shape, other.boxes) == (part.global_shape, part.boxes)
    assert all(isinstance(box, Box) for box in other.boxes)
    assert torch.equal(other.plain(), part.plain())
    assert found["twice"].data_ptr() == other.data_ptr()
