"""Checks of buffers, and descriptions of collectives."""

from __future__ import annotations

import pytest
import torch

from vescale_comm._transport.call import Call, broadcast_of, flat_buffer, flat_equal_parts, reduction


def test_flat_buffers_only():
    for wrong in (torch.zeros(2, 3), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.complex64).conj()):
        with pytest.raises(ValueError, match="buffer: needs one dimension and contiguous memory"):
            flat_buffer(wrong)
    part = torch.zeros(8)[2:5]
    assert flat_buffer(part).data_ptr() == part.data_ptr()


def test_parts_are_equal():
    buffer = torch.arange(6.0)
    assert [part.tolist() for part in flat_equal_parts(buffer, 3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ValueError, match="multiple of the number of ranks, 4; got 6 elements"):
        flat_equal_parts(buffer, 4)


def test_results_do_not_touch_autograd():
    leaf = torch.zeros(4, requires_grad=True)
    flat_equal_parts(leaf, 2)[0].fill_(1.0)
    assert leaf.tolist() == [1, 1, 0, 0]
    assert leaf.requires_grad
    assert leaf.is_leaf


def test_calls_are_spelled_and_told_apart():
    call = reduction("all_reduce", torch.zeros(10, dtype=torch.bfloat16), 4, torch.float32)
    assert str(call) == "all_reduce of 10 bfloat16 summed in float32 divided by 4"
    assert call.nbytes == 20
    others = [
        Call("all_reduce", 11, torch.bfloat16, 4.0, torch.float32),
        Call("all_reduce", 10, torch.float16, 4.0, torch.float32),
        Call("all_reduce", 10, torch.bfloat16, 2.0, torch.float32),
        Call("all_reduce", 10, torch.bfloat16, 4.0),
        Call("reduce_scatter", 10, torch.bfloat16, 4.0, torch.float32),
    ]
    assert call.check not in [other.check for other in others]
    assert call.check == Call("all_reduce", 10, torch.bfloat16, 4.0, torch.float32).check


def test_broadcast_takes_any_shape_as_bytes():
    buffer = torch.tensor([[1, 2], [3, 4]], dtype=torch.int16)
    call, flat = broadcast_of(buffer, 1, 2)
    assert str(call) == "broadcast of 4 int16 from rank 1"
    assert flat.dtype == torch.uint8
    assert flat.data_ptr() == buffer.data_ptr()
    assert broadcast_of(torch.tensor(1.0), 0, 2)[1].numel() == 4
    with pytest.raises(ValueError, match="contiguous"):
        broadcast_of(torch.zeros(3, 2).t(), 0, 2)
    with pytest.raises(ValueError, match="0 <= source < 2; got 2"):
        broadcast_of(buffer, 2, 2)
