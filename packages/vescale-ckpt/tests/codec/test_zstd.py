"""The codec "zstd": plain frames that any zstandard reads, and frames that lie."""

import contextlib

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._codec.zstd import Zstd
from vescale_ckpt.errors import CorruptionError

CODEC = Zstd()


def tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def frame(data: torch.Tensor) -> bytearray:
    parts = CODEC.encode(data, 1)
    assert parts is not None
    return bytearray(b"".join(parts))


def test_any_zstandard_reads_it() -> None:
    data = torch.arange(100_000).remainder(40).to(torch.uint8)
    stored = frame(data)
    assert zstandard.ZstdDecompressor().decompress(stored) == bytes(data.tolist())
    assert zstandard.get_frame_parameters(stored).has_checksum is False


@given(st.binary(min_size=0, max_size=200), st.integers(1, 20), st.integers(1, 19))
@settings(max_examples=100, deadline=None)
def test_frames_of_any_level_are_read(part: bytes, times: int, level: int) -> None:
    data = part * times
    out = torch.full((len(data),), 9, dtype=torch.uint8)
    CODEC.decode(memoryview(zstandard.ZstdCompressor(level=level).compress(data)), out, 1)
    assert bytes(out.tolist()) == data


def test_fp8_and_bool_become_smaller_and_noise_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = torch.empty(1 << 17).normal_(0, 0.02, generator=generator)
    assert 1.4 * len(frame(normal.to(torch.float8_e4m3fn).view(torch.uint8))) < 1 << 17
    assert 7.5 * len(frame((normal > 0.05).view(torch.uint8))) < 1 << 17
    noise = torch.randint(0, 256, (1 << 17,), dtype=torch.uint8, generator=generator)
    assert CODEC.encode(noise, 1) is None
    assert CODEC.encode(noise[:0], 1) is None


def test_lies_are_noticed() -> None:
    data = tensor(b"abcdabcd" * 100)
    stored = frame(data)
    out = torch.zeros_like(data)
    for length in range(len(stored)):
        with pytest.raises(CorruptionError, match="file is damaged"):
            CODEC.decode(memoryview(stored[:length]), out, 1)
    for extra in (b"\0", bytes(stored), zstandard.ZstdCompressor().compress(b"")):
        with pytest.raises(CorruptionError, match="cannot be decompressed"):
            CODEC.decode(memoryview(stored + extra), out, 1)
    for wrong in (0, 799, 801):
        with pytest.raises(CorruptionError, match=f"promises 800 bytes where {wrong} were stored"):
            CODEC.decode(memoryview(stored), torch.empty(wrong, dtype=torch.uint8), 1)
    # A skippable frame, a frame that keeps its size secret, and one that promises too much.
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    secret = zstandard.ZstdCompressor(write_content_size=False).compress(b"x" * 800)
    other = zstandard.ZstdCompressor().compress(b"x" * (1 << 24))
    for bad in (skippable, secret, other, b"", b"not a frame at all"):
        with pytest.raises(CorruptionError):
            CODEC.decode(memoryview(bad), out, 1)


def test_a_frame_that_gives_less_than_it_promises_is_refused() -> None:
    # Header: no checksum, single segment, one byte of content size (200); then a last raw block of 3 bytes.
    lying = b"\x28\xb5\x2f\xfd" + b"\x20" + bytes([200]) + (3 << 3 | 1).to_bytes(3, "little") + b"abc"
    with pytest.raises(CorruptionError):
        CODEC.decode(memoryview(lying), torch.zeros(200, dtype=torch.uint8), 1)
    honest = lying.replace(bytes([200]), bytes([3]))
    out = torch.zeros(3, dtype=torch.uint8)
    CODEC.decode(memoryview(honest), out, 1)
    assert bytes(out.tolist()) == b"abc"


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bits_never_do_more_than_change_bytes(draw: st.DataObject) -> None:
    data = tensor(b"some text, some more text, and some text again" * 8)
    stored = frame(data)
    for _ in range(draw.draw(st.integers(1, 3))):
        stored[draw.draw(st.integers(0, len(stored) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    memory = torch.full((data.numel() + 64,), 0x33, dtype=torch.uint8)
    with contextlib.suppress(CorruptionError):
        CODEC.decode(memoryview(stored), memory[32 : 32 + data.numel()], 1)
    assert bool((memory[:32] == 0x33).all())
    assert bool((memory[-32:] == 0x33).all())
