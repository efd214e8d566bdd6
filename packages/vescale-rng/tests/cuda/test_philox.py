"""Philox4x32-10: published answers, and a plain integer implementation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vescale_rng._cuda.philox import philox_words

U64 = st.integers(0, 2**64 - 1)


def signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def plain(seed: int, subsequence: int, counter: int) -> list[int]:
    """The definition, on Python integers."""
    mask = 0xFFFFFFFF
    c = [counter & mask, counter >> 32, subsequence & mask, subsequence >> 32]
    k = [seed & mask, seed >> 32 & mask]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


# kat_vectors of Random123: counter, key, answer.
KNOWN = [
    ("00000000" * 4, "00000000" * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff" * 4, "ffffffff" * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a8885a308d313198a2e03707344", "a4093822299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    c = [int(counter[i : i + 8], 16) for i in range(0, 32, 8)]
    k = [int(key[i : i + 8], 16) for i in range(0, 16, 8)]
    words = philox_words(k[0] | k[1] << 32, signed(c[2] | c[3] << 32), signed(c[0] | c[1] << 32))
    assert [int(w) for w in words] == [int(w, 16) for w in answer.split()]


@pytest.mark.parametrize(
    ("seed", "offset", "first_words"),
    [
        (0, 0, "6627e8d5 844515e1 0661d677 f0a90abc"),
        (0, 4, "f8e4cca4 ca7cf69e 78130eff 547ade6a"),
        (42, 0, "9ceaf053 02933769 65fe70a6 0a51a6b2"),
    ],
)
def test_first_words_of_threads(seed: int, offset: int, first_words: str) -> None:
    words = philox_words(seed, torch.arange(4), offset // 4)
    assert [f"{int(w):08x}" for w in words[0]] == first_words.split()


@given(U64, U64, U64)
def test_any_counter(seed: int, subsequence: int, counter: int) -> None:
    words = philox_words(seed, torch.tensor([signed(subsequence)]), signed(counter))
    assert [int(w) for w in words] == plain(seed, subsequence, counter)


def test_negative_seeds_wrap() -> None:
    assert [int(w) for w in philox_words(-3, 5, 7)] == plain(2**64 - 3, 5, 7)


def test_blocks_and_broadcasting_do_not_change_words() -> None:
    numel = 70_000
    counter = torch.tensor([[3], [1 << 40]])
    words = philox_words(9, torch.arange(numel), counter)
    assert all(w.shape == (2, numel) and w.dtype == torch.int64 for w in words)
    for row, column in ((0, 0), (0, 16_383), (0, 16_384), (1, 0), (1, numel - 1)):
        assert [int(w[row, column]) for w in words] == plain(9, column, int(counter[row, 0]))
