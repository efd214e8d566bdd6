"""Blocks against the published vectors and a model in Python integers."""

from __future__ import annotations

import pytest
import torch

from vescale_rng._portable.philox import philox_blocks

CPU = torch.device("cpu")
ONES = 2**64 - 1

# Random123's kat_vectors for philox4x32 with 10 rounds: counter (low, high half), key, words.
PUBLISHED = [
    ((0, 0), 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES, ONES), ONES, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x85A308D3243F6A88, 0x0370734413198A2E), 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def model(seed: int, call: int, block: int) -> list[int]:
    """The algorithm as published, in Python integers."""
    c = [block & 0xFFFFFFFF, block >> 32, call & 0xFFFFFFFF, call >> 32]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def words(seed: int, call: int, first: int, count: int) -> list[list[int]]:
    even, odd = philox_blocks(seed, call, first, count, CPU)
    return torch.stack((even[0], odd[0], even[1], odd[1]), 1).tolist()


@pytest.mark.parametrize(("counter", "key", "expected"), PUBLISHED)
def test_published_vectors(counter, key, expected):
    (block,) = words(key, counter[1], counter[0], 1)
    assert " ".join(f"{w:08x}" for w in block) == expected


@pytest.mark.parametrize("seed", [0, 1, 0x123456789ABCDEF0, ONES])
@pytest.mark.parametrize("call", [0, 1, 2**32 - 1, 2**32, 2**63, ONES])
@pytest.mark.parametrize("first", [0, 77, 2**32 - 9, 2**32, 2**63 + 2**31, 2**64 - 9])
def test_equals_the_model(seed, call, first):
    assert words(seed, call, first, 9) == [model(seed, call, b) for b in range(first, first + 9)]


def test_no_blocks():
    even, odd = philox_blocks(1, 2, 3, 0, CPU)
    assert even.shape == odd.shape == (2, 0)


def test_refuses_blocks_with_different_upper_halves():
    with pytest.raises(ValueError, match=r"multiple of 2\*\*32"):
        philox_blocks(0, 0, 2**32 - 1, 2, CPU)
