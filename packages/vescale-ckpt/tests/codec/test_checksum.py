"""Checksums: the fingerprint against slow integer code, what it must tell apart, and that no thread is started."""

import hashlib
import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._codec import checksum
from vescale_ckpt._codec.checksum import ROW, crc32, fingerprint, keys, sha256

BLOCK = 32 * ROW


def random_bytes(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def slow_fingerprint(data: bytes) -> bytes:
    """What the docstring of `fingerprint` says, in integers of any size."""
    r, s = keys()
    rows = len(data) // 8192
    first: list[int] = []
    second: list[int] = []
    for start in range(0, rows * 8192, 32 * 8192):
        block = data[start : min(start + 32 * 8192, rows * 8192)]
        for words, factors, sums in ((block, r, first), (block[4:] + block[:4], s, second)):
            for at in range(0, len(words), 8192):
                row = [int.from_bytes(words[at + i : at + i + 8], "little") for i in range(0, 8192, 8)]
                sums.append(sum(x * f for x, f in zip(row, factors, strict=True)) % 2**64)
    text = len(data).to_bytes(8, "little") + b"".join(n.to_bytes(8, "little") for n in first + second)
    return hashlib.sha256(text + data[rows * 8192 :]).digest()[:16]


@pytest.mark.parametrize("length", [0, 1, 7, ROW - 1, ROW, ROW + 1, 3 * ROW + 5, BLOCK, BLOCK + ROW + 3])
def test_it_is_what_its_description_says(length: int) -> None:
    data = random_bytes(length)
    assert fingerprint(data) == slow_fingerprint(bytes(data.tolist()))


def test_the_keys_are_those_of_splitmix64() -> None:
    r, s = keys()
    # The first outputs of the reference implementation from state 0, made odd.
    assert r[:3] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4 | 1, 0x06C45D188009454F]
    assert len(r) == len(s) == 1024
    assert len({*r, *s}) == 2048
    assert all(key % 2 for key in r + s)


def test_the_address_does_not_matter() -> None:
    data = random_bytes(2 * BLOCK + 100)
    expected = fingerprint(data)
    for shift in range(1, 10):
        moved = torch.zeros(data.numel() + shift, dtype=torch.uint8)[shift:]
        moved.copy_(data)
        assert fingerprint(moved) == expected


def swap_words(data: torch.Tensor) -> None:
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    words[[3, 700]] = words[[700, 3]]


def swap_rows(data: torch.Tensor) -> None:
    data[: 2 * ROW] = torch.cat([data[ROW : 2 * ROW], data[:ROW]])


def swap_blocks(data: torch.Tensor) -> None:
    data[: 2 * BLOCK] = torch.cat([data[BLOCK : 2 * BLOCK], data[:BLOCK]])


def flip_signs(step: int, count: int, width: int) -> Callable[[torch.Tensor], None]:
    def flip(data: torch.Tensor) -> None:
        data[width - 1 :: width][::step][:count] ^= 0x80

    return flip


def negate(width: int) -> Callable[[torch.Tensor], None]:
    def flip(data: torch.Tensor) -> None:
        data[width - 1 :: width] ^= 0x80

    return flip


def shift_by(distance: int) -> Callable[[torch.Tensor], None]:
    def shift(data: torch.Tensor) -> None:
        data.copy_(data.roll(distance))

    return shift


CHANGES: dict[str, Callable[[torch.Tensor], None]] = {
    "swap words": swap_words,
    "swap rows": swap_rows,
    "swap blocks": swap_blocks,
    **{f"flip {n} signs of {w} bytes": flip_signs(3, n, w) for n in (1, 2, 4, 6) for w in (2, 4, 8)},
    **{f"flip {n} signs in rows": flip_signs(1024, n, 8) for n in (2, 4)},
    **{f"flip {n} signs side by side": flip_signs(1, n, 8) for n in (2, 4)},
    **{f"negate {w} bytes": negate(w) for w in (2, 4, 8)},
    **{f"shift by {n}": shift_by(n) for n in (1, 4, 8, 16, ROW, BLOCK)},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["random", "floats"])
def test_changes_show(change: str, kind: str) -> None:
    length = 2 * BLOCK + ROW
    data = random_bytes(length)
    if kind == "floats":
        data = torch.linspace(-1, 1, length // 8, dtype=torch.float64).view(torch.uint8).clone()
    before = fingerprint(data)
    original = data.clone()
    CHANGES[change](data)
    assert not torch.equal(data, original)
    assert fingerprint(data) != before


def test_a_plain_sum_of_products_would_not_see_two_signs() -> None:
    # Why there is a second sum: the first is the same before and after.
    r, _ = keys()
    words = random_bytes(ROW).view(torch.int64)
    flipped = words.clone()
    flipped[[10, 500]] ^= -(2**63)
    sums = [sum(x * f for x, f in zip(some.tolist(), r, strict=True)) % 2**64 for some in (words, flipped)]
    assert sums[0] == sums[1]
    assert fingerprint(words.view(torch.uint8)) != fingerprint(flipped.view(torch.uint8))


def test_no_two_flips_of_top_bits_cancel_out():
    """Of the top bit of a word the first sum sees only parity, the second one 33 bits: enough for any two words."""
    _, s = keys()
    seen = {value % (1 << 33) for value in s} | {-value % (1 << 33) for value in s}
    assert len(seen) == 2 * len(s)


def test_zeros_of_different_lengths_differ() -> None:
    lengths = [0, 1, 2, 8, ROW - 1, ROW, ROW + 1, 2 * ROW, BLOCK, BLOCK + ROW, 2 * BLOCK]
    found = {fingerprint(torch.zeros(length, dtype=torch.uint8)) for length in lengths}
    assert len(found) == len(lengths)


@given(
    length=st.integers(1, 3 * ROW),
    positions=st.lists(st.tuples(st.integers(0, 3 * ROW), st.integers(0, 7)), min_size=1, max_size=6, unique=True),
)
@settings(max_examples=150, deadline=None)
def test_flipped_bits_show(length: int, positions: list[tuple[int, int]]) -> None:
    data = random_bytes(length)
    before = data.clone()
    for byte, bit in positions:
        data[byte % length] ^= 1 << bit
    assert (fingerprint(data) == fingerprint(before)) == torch.equal(data, before)


def test_crc_and_sha_are_the_standard_ones() -> None:
    data = random_bytes(100_001)
    text = bytes(data.tolist())
    assert crc32(data) == crc32(memoryview(text)) == zlib.crc32(text)
    assert sha256(data) == sha256(memoryview(text)) == hashlib.sha256(text).digest()
    assert crc32(data[:0]) == 0
    numbers = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    assert crc32(numbers) == zlib.crc32(b"\x80\x3f\x00\x40")


def test_it_draws_nothing_and_minds_no_default() -> None:
    before = torch.get_rng_state()
    expected = fingerprint(random_bytes(3 * ROW))
    checksum._key_tensors.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            data = torch.randint(
                0, 256, (3 * ROW,), dtype=torch.uint8, device="cpu", generator=torch.Generator("cpu").manual_seed(0)
            )
            assert fingerprint(data) == expected
    finally:
        torch.set_default_dtype(torch.float32)
        checksum._key_tensors.cache_clear()
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_no_run_of_bytes_is_refused() -> None:
    for wrong in (torch.zeros(8), random_bytes(64).view(8, 8), random_bytes(64)[::2]):
        with pytest.raises(ValueError, match=r"data: expected a 1-D contiguous torch.uint8"):
            fingerprint(wrong)


def test_many_threads_at_a_time() -> None:
    chunks = [random_bytes(BLOCK + 999 * i, i) for i in range(4)]
    expected = [fingerprint(data) for data in chunks]
    found: list[list[bytes]] = [[] for _ in range(4)]
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for turn in range(20):
            found[number].append(fingerprint(chunks[(number + turn) % 4]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected[(number + turn) % 4] for turn in range(20)] for number in range(4)]


PROGRAM = """
import os, torch
from vescale_ckpt._codec import choose, codec, crc32, fingerprint
tasks = lambda: len(os.listdir("/proc/self/task"))
torch.set_num_threads(4)
before = tasks()
for shift in (0, 1):
    for width in (1, 2, 4, 8):
        data = torch.frombuffer(bytearray(b"12345678" * 2**18 + bytes(shift)), dtype=torch.uint8)[shift:]
        fingerprint(data), crc32(data), choose(data[: 2**18], width, True, "auto")
        for name in ("zstd", "planes"):
            out = torch.empty(2**21 + shift, dtype=torch.uint8)[shift:]
            stored = b"".join(codec(name).encode(data, width))
            codec(name).decode(memoryview(bytearray(stored)), out, width)
after = tasks()
torch.ones(2**20) + 1
print(before, after, tasks())
"""


def test_no_threads_are_started() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    before, after, with_team = map(int, done.stdout.split())
    assert after == before
    # An operator on more elements does start them, so the count would have told.
    assert with_team > after
