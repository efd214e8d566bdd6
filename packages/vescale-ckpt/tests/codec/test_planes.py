"""The codec "planes": against struct and zstandard, all widths and tails, and data that is not what it should be."""

import struct
import threading

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._codec.interface import BLOCK
from vescale_ckpt._codec.planes import PLANES, Planes
from vescale_ckpt.errors import CorruptionError

CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
CODEC = Planes()


def chunk(count: int, width: int, tail: int = 0, seed: int = 0) -> torch.Tensor:
    """Bytes of `count` numbers with a redundant top byte, and `tail` bytes more."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (count * width + tail,), dtype=torch.uint8, generator=generator)
    data[width - 1 : count * width : width] &= 3
    return data


def join(parts: list[memoryview] | None) -> bytearray:
    assert parts is not None
    return bytearray(b"".join(parts))


def raw(data: torch.Tensor) -> bytes:
    return bytes(data.tolist())


def read_slowly(stored: bytes, length: int, width: int) -> bytes:
    """Decode as the description of the format says, number by number."""
    count, tail = divmod(length, width)
    values, at, shift = [0] * count, 0, 0
    for size in {1: [], 2: [1], 4: [2, 1], 8: [4, 2, 1]}[width]:
        for i in range(count):
            values[i] |= int.from_bytes(stored[at : at + size], "little") << shift
            at += size
        shift += 8 * size
    rest = stored[at : at + tail]
    top = zstandard.ZstdDecompressor().decompress(stored[at + tail :])
    values = [value | byte << shift for value, byte in zip(values, top, strict=True)]
    return struct.pack(f"<{count}{CODES[width]}", *values) + rest


def write_slowly(data: bytes, width: int) -> bytes:
    """Encode number by number, with another compression level."""
    count = len(data) // width
    values = struct.unpack(f"<{count}{CODES[width]}", data[: count * width])
    out, shift = b"", 0
    for size in {1: [], 2: [1], 4: [2, 1], 8: [4, 2, 1]}[width]:
        out += b"".join((value >> shift & (1 << 8 * size) - 1).to_bytes(size, "little") for value in values)
        shift += 8 * size
    frame = zstandard.ZstdCompressor(level=5).compress(bytes(value >> shift for value in values))
    return out + data[count * width :] + frame


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [200, 1001, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
def test_both_ways_against_slow_code(width: int, count: int) -> None:
    for tail in {0, width - 1}:
        data = chunk(count, width, tail)
        stored = join(CODEC.encode(data, width))
        assert len(stored) < len(data)
        assert read_slowly(bytes(stored), len(data), width) == raw(data)
        out = torch.full_like(data, 0x5A)
        CODEC.decode(memoryview(bytearray(write_slowly(raw(data), width))), out, width)
        assert torch.equal(out, data)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    count=st.integers(1, 300),
    tail=st.integers(0, 7),
    shift=st.integers(0, 9),
    stored_shift=st.integers(0, 9),
    readonly=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_any_length_at_any_address(
    width: int, count: int, tail: int, shift: int, stored_shift: int, readonly: bool, seed: int
) -> None:
    source = chunk(count, width, tail % width, seed)
    memory = torch.zeros(shift + len(source) + 9, dtype=torch.uint8)
    data = memory[shift : shift + len(source)]
    data.copy_(source)
    parts = CODEC.encode(data, width)
    stored = write_slowly(raw(source), width) if parts is None else bytes(join(parts))
    if parts is not None:
        assert read_slowly(stored, len(source), width) == raw(source)
    padded = bytes(stored_shift) + stored
    view = memoryview(padded if readonly else bytearray(padded))[stored_shift:]
    memory.fill_(0x77)
    CODEC.decode(view, data, width)
    assert torch.equal(data, source)
    assert bool((memory[:shift] == 0x77).all())
    assert bool((memory[shift + len(source) :] == 0x77).all())


def test_negative_numbers_and_special_values_keep_their_bits() -> None:
    special = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1.5]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        numbers = torch.tensor(special * 500, dtype=dtype)
        data = numbers.view(torch.uint8)
        out = torch.zeros_like(data)
        CODEC.decode(memoryview(join(CODEC.encode(data, dtype.itemsize))), out, dtype.itemsize)
        assert torch.equal(out, data)


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.bfloat16, 1.47), (torch.float32, 1.18), (torch.float16, 1.17)])
def test_weights_become_smaller(dtype: torch.dtype, ratio: float) -> None:
    numbers = torch.empty(1 << 18).normal_(0, 0.02, generator=torch.Generator().manual_seed(1)).to(dtype)
    data = numbers.view(torch.uint8)
    assert data.numel() > ratio * len(join(CODEC.encode(data, dtype.itemsize)))


def test_the_source_is_left_alone_and_the_result_is_its_own() -> None:
    data = chunk(5000, 4)
    before = data.clone()
    first = CODEC.encode(data, 4)
    assert torch.equal(data, before)
    kept = bytes(join(first))
    data.zero_()
    assert bytes(join(first)) == kept


def test_what_does_not_pay_is_refused() -> None:
    random = torch.randint(0, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for width in (1, 2, 4, 8):
        assert CODEC.encode(random, width) is None
    assert CODEC.encode(random[:0], 2) is None
    assert CODEC.encode(random[:3], 4) is None


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_every_cut_is_noticed(width: int) -> None:
    data = chunk(40, width, width - 1)
    stored = write_slowly(raw(data), width)
    out = torch.zeros_like(data)
    for length in range(len(stored)):
        with pytest.raises(CorruptionError):
            CODEC.decode(memoryview(bytearray(stored[:length])), out, width)
    with pytest.raises(CorruptionError, match="cannot be decompressed"):
        CODEC.decode(memoryview(bytearray(stored + b"\0")), out, width)


def test_other_sizes_and_bombs_are_refused() -> None:
    data = chunk(1000, 2)
    stored = memoryview(join(CODEC.encode(data, 2)))
    for wrong in (0, 1, 1999, 2001, 2002, 4000, 1 << 20):
        with pytest.raises(CorruptionError):
            CODEC.decode(stored, torch.empty(wrong, dtype=torch.uint8), 2)
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(CorruptionError, match="promises 16777216 bytes where 1000 were stored"):
        CODEC.decode(memoryview(bytearray(stored[:1000]) + bomb), torch.empty(2000, dtype=torch.uint8), 2)


def test_arguments_are_checked() -> None:
    data = chunk(100, 2)
    for width in (0, 3, 16, -2):
        with pytest.raises(ValueError, match="expected 1, 2, 4 or 8"):
            CODEC.encode(data, width)
        with pytest.raises(ValueError, match="expected 1, 2, 4 or 8"):
            CODEC.decode(memoryview(b"abc"), data, width)
    for wrong in (data.view(torch.int16), data.view(10, 20), data[::2]):
        with pytest.raises(ValueError, match=r"data: expected a 1-D contiguous torch.uint8"):
            CODEC.encode(wrong, 2)
        with pytest.raises(ValueError, match=r"out: expected a 1-D contiguous torch.uint8"):
            CODEC.decode(memoryview(b"abc"), wrong, 2)


def test_planes_cover_every_byte_once() -> None:
    for width, planes in PLANES.items():
        covered = [byte for plane in planes for byte in range(plane.offset, plane.offset + plane.width)]
        assert covered == list(range(width))
        assert planes[-1].width == 1
    assert BLOCK <= 32768


def test_many_threads_at_a_time() -> None:
    chunks = [chunk(20000 + 13 * i, width, i % width, i) for i, width in enumerate([1, 2, 4, 8] * 2)]
    expected = [bytes(join(CODEC.encode(data, width))) for data, width in zip(chunks, [1, 2, 4, 8] * 2, strict=True)]
    bad: list[int] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for turn in range(24):
            i = (turn + number) % 8
            width = [1, 2, 4, 8][i % 4]
            stored = join(CODEC.encode(chunks[i], width))
            out = torch.zeros_like(chunks[i])
            CODEC.decode(memoryview(stored), out, width)
            if bytes(stored) != expected[i] or not torch.equal(out, chunks[i]):
                bad.append(i)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bad == []
