"""Tensors as memoryviews and back: the same bytes, and memory that lives as long as something looks at it."""

import gc
import threading
import weakref

import pytest
import torch

from vescale_ckpt._codec.memory import as_tensor, memory, scratch


def test_a_view_is_the_memory_of_the_tensor() -> None:
    numbers = torch.tensor([[1, -1], [256, 0]], dtype=torch.int16)
    view = memory(numbers)
    assert (view.format, view.ndim, view.readonly, view.nbytes) == ("B", 1, False, 8)
    assert bytes(view) == b"\x01\x00\xff\xff\x00\x01\x00\x00"
    view[6:8] = b"\x05\x01"
    assert numbers.tolist() == [[1, -1], [256, 261]]
    assert bytes(memory(numbers[1])) == b"\x00\x01\x05\x01"


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex128, torch.uint64])
def test_every_dtype_and_no_elements(dtype: torch.dtype) -> None:
    assert memory(torch.zeros(3, dtype=dtype)).nbytes == 3 * dtype.itemsize
    assert memory(torch.zeros((), dtype=dtype)).nbytes == dtype.itemsize
    assert memory(torch.zeros(0, 5, dtype=dtype)).nbytes == 0


def test_a_view_and_its_parts_keep_the_tensor_alive() -> None:
    storage = bytearray(b"abcdefgh")
    tensor = torch.frombuffer(storage, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    part = memory(tensor)[2:4]
    del tensor
    gc.collect()
    assert alive() is not None
    assert bytes(part) == b"cd"
    del part
    gc.collect()
    assert alive() is None


def test_what_has_no_single_run_of_bytes_is_refused() -> None:
    for wrong in (torch.zeros(4, 4).t(), torch.zeros(9)[::2], torch.zeros(3, device="meta")):
        with pytest.raises(ValueError, match="expected contiguous memory on the CPU"):
            memory(wrong)


def test_bytes_as_a_tensor() -> None:
    buffer = bytearray(b"\x01\x02\x03")
    tensor = as_tensor(memoryview(buffer)[1:])
    tensor[0] = 9
    assert buffer == b"\x01\x09\x03"
    fixed = b"\x01\x02"
    copy = as_tensor(memoryview(fixed))
    copy[0] = 9
    assert fixed == b"\x01\x02"
    assert as_tensor(memoryview(b"")).shape == (0,)


def test_scratch_is_reused_by_its_thread_only() -> None:
    first = scratch("test", 100)
    assert first.shape == (100,)
    assert scratch("test", 60).data_ptr() == first.data_ptr()
    assert scratch("other", 60).data_ptr() != first.data_ptr()
    grown = scratch("test", 5000)
    assert grown.shape == (5000,)
    assert scratch("test", 4096).data_ptr() == grown.data_ptr()
    large = scratch("test", (1 << 20) + 1)
    assert large.shape == ((1 << 20) + 1,)
    assert scratch("test", 5000).data_ptr() == grown.data_ptr()
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(scratch("test", 5000).data_ptr()))
    thread.start()
    thread.join()
    assert elsewhere != [grown.data_ptr()]
