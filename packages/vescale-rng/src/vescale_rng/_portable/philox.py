"""Philox4x32-10 blocks of one operator call, as integer torch operations on any device.

The key is the 64-bit seed. The 128-bit counter is the index of the block in the low half and the number of the
operator call in the high half, so any block can be made by itself. Source: Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["MASK", "MULTIPLIERS", "ROUNDS", "WEYL", "philox_blocks"]

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_blocks(seed: int, call: int, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the blocks `first ... first + count - 1` of a call.

    A product of two 32-bit numbers fills an int64 and its sign bit. Its upper half is therefore masked after the shift,
    and only once per round, because the junk above bit 31 does not matter to the exclusive ors before it.

    Args:
        seed: the key, 0 <= seed < 2**64.
        call: high half of the counter, 0 <= call < 2**64.
        first: low half of the counter for the first block; `first` and the last block lie between two multiples of
            2**32.
        count: number of blocks.
        device: where to make them.

    Returns:
        Two int64 tensors of shape (2, count), values below 2**32: words 0 and 2, and words 1 and 3 of the blocks.

    >>> even, odd = philox_blocks(0, 0, 0, 1, torch.device("cpu"))
    >>> [f"{w:08x}" for w in (even[0, 0], odd[0, 0], even[1, 0], odd[1, 0])]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    m0, m1 = MULTIPLIERS
    keys = [((seed + i * WEYL[0]) & MASK, ((seed >> 32) + i * WEYL[1]) & MASK) for i in range(ROUNDS)]
    low, high = first & MASK, first >> 32
    if low + count > MASK + 1:
        raise ValueError(
            f"first={first}, count={count}: blocks on both sides of a multiple of 2**32; ask for each side"
        )
    even = torch.empty((2, count), dtype=torch.int64, device=device)
    odd = torch.empty_like(even)
    other = torch.empty_like(even)
    (even0, even1), (odd0, odd1), (other0, other1) = even.unbind(), odd.unbind(), other.unbind()

    # Two rounds in which all but one of the words are the same in every block.
    product = (call & MASK) * m1
    word0 = (product >> 32) ^ high ^ keys[0][0]
    word1 = product & MASK
    torch.arange(low, low + count, out=other1)
    other1.mul_(m0)  # word 3 after this round, and the carrier of word 2
    torch.bitwise_right_shift(other1, 32, out=even1)
    even1.bitwise_xor_((call >> 32) ^ keys[0][1]).bitwise_and_(MASK)

    product = word0 * m0
    torch.mul(even1, m1, out=odd0)
    torch.bitwise_right_shift(odd0, 32, out=even0)
    even0.bitwise_xor_(word1 ^ keys[1][0])
    torch.bitwise_xor(other1, (product >> 32) ^ keys[1][1], out=even1)
    even.bitwise_and_(MASK)
    odd1.fill_(product & MASK)

    for key0, key1 in keys[2:]:
        torch.mul(even1, m1, out=other0)
        torch.mul(even0, m0, out=other1)
        torch.bitwise_right_shift(other, 32, out=even)
        even.bitwise_xor_(odd)
        even0.bitwise_xor_(key0)
        even1.bitwise_xor_(key1)
        even.bitwise_and_(MASK)
        odd, other = other, odd
        odd0, odd1, other0, other1 = other0, other1, odd0, odd1
    return even, odd.bitwise_and_(MASK)
