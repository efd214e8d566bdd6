"""Philox4x32-10 in torch int64 operators: the generator behind every CUDA random operator.

A block of four 32-bit words is a pure function of (seed, subsequence, counter), so any element of any draw can be
computed alone. Words are held in int64 tensors, since torch has no arithmetic on unsigned 32-bit integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["MASK32", "philox_words"]

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
# Ten rounds make about 300 passes over their operands: in blocks that stay in a CPU's cache they cost a third.
_BLOCK = 1 << 14


def _multiply(value: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of value * multiplier; in 16-bit halves, because int64 cannot hold the unsigned product."""
    low = value * (multiplier & 0xFFFF)
    middle = (value * (multiplier >> 16)).add_(low >> 16)
    high = middle >> 16
    middle.bitwise_and_(0xFFFF).bitwise_left_shift_(16).bitwise_or_(low.bitwise_and_(0xFFFF))
    return high, middle


def _rounds(
    key0: int, key1: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1 = high1.bitwise_xor_(c1).bitwise_xor_(key0), low1
        c2, c3 = high0.bitwise_xor_(c3).bitwise_xor_(key1), low0
        key0 = (key0 + _WEYL[0]) & MASK32
        key1 = (key1 + _WEYL[1]) & MASK32
    return c0, c1, c2, c3


def philox_words(seed: int, subsequence: Tensor | int, counter: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of Philox4x32-10 at each (subsequence, counter).

    Args:
        seed: 64-bit key; negative seeds wrap as in ``torch.manual_seed``.
        subsequence: int64 tensor or int, the high 64 bits of the counter (a CUDA kernel's thread).
        counter: int64 tensor or int, the low 64 bits of the counter (a CUDA generator's offset // 4, plus the call).
            The two broadcast against each other; each is read as an unsigned 64-bit number.

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2**32), on the device of the arguments.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

    >>> [f"{int(word):08x}" for word in philox_words(0, 0, 0)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    device = next((x.device for x in (subsequence, counter) if isinstance(x, Tensor)), None)
    broadcast: Any = torch.broadcast_tensors
    sub, ctr = broadcast(*(torch.as_tensor(x, dtype=torch.int64, device=device) for x in (subsequence, counter)))
    key0, key1 = seed & MASK32, (seed >> 32) & MASK32
    if sub.numel() <= _BLOCK or sub.device.type != "cpu":
        return _rounds(key0, key1, ctr & MASK32, (ctr >> 32) & MASK32, sub & MASK32, (sub >> 32) & MASK32)
    words = torch.empty((4, *sub.shape), dtype=torch.int64, device=sub.device)
    flat, sub, ctr = words.view(4, -1), sub.reshape(-1), ctr.reshape(-1)
    for start in range(0, sub.numel(), _BLOCK):
        s, c = sub[start : start + _BLOCK], ctr[start : start + _BLOCK]
        block = _rounds(key0, key1, c & MASK32, (c >> 32) & MASK32, s & MASK32, (s >> 32) & MASK32)
        torch.stack(block, out=flat[:, start : start + _BLOCK])
    return words[0], words[1], words[2], words[3]
