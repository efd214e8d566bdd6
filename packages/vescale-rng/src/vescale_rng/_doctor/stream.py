"""The doctor's look at the CPU generator itself: its words, the bytes of its state, jumps, the order of elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._streams.advance import advance_words
from .._streams.jump import jump_blocks
from .report import Finding

__all__ = ["WAITS", "WORDS_END", "check_stream", "guarded", "same_bits", "skip"]

_SEED, _LEFT, _NEXT, WORDS_END, WAITS = slice(0, 8), slice(8, 12), slice(16, 24), 5016, 5040
"""Where fields stand in the 5056 bytes of the state. Up to `WORDS_END` they tell which words come next; the byte at
`WAITS` tells whether a normal number waits."""
_BLOCK = 624

# Of mt19937 with its default seed 5489: the first two, published with the algorithm, and the 10000th, which the C++
# standard ([rand.predef]) gives.
_PUBLISHED = {1: 3499211612, 2: 581869302, 10000: 4123659995}


def check_stream() -> list[Finding]:
    """Look at everything that does not belong to one operator."""
    rules: tuple[tuple[str, Callable[[], str]], ...] = (
        ("mt19937 words", _words),
        ("bytes of the state", _layout),
        ("jump ahead", _jumps),
        ("order of elements", _order),
        ("strides of _like results", _strides),
    )
    return [Finding("stream", name, (), "NOT bitwise" if why else "ok", why) for name, why in _told(rules)]


def _told(rules: tuple[tuple[str, Callable[[], str]], ...]) -> list[tuple[str, str]]:
    return [(name, guarded(rule)) for name, rule in rules]


def guarded(rule: Callable[[], str]) -> str:
    """What differs, an exception included: a check that cannot run is a finding too.

    What fails must fail twice: on a loaded machine a call was once seen to differ and never again.
    """
    return _told_once(rule) and _told_once(rule)


def _told_once(rule: Callable[[], str]) -> str:
    try:
        return rule()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"


def skip(generator: torch.Generator, words: int) -> None:
    """Draw words one by one, with the kernel that takes one word per element."""
    buffer = torch.empty(min(words, 1 << 16), dtype=torch.uint8, device="cpu")
    while words > 0:
        part = buffer[:words]
        part.random_(generator=generator)
        words -= part.numel()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equality that tells -0.0 from 0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (one, other)))


def _words() -> str:
    generator = torch.Generator().manual_seed(5489)
    low = torch.empty(10000, dtype=torch.uint8, device="cpu").random_(generator=generator)
    pair = torch.empty(1, dtype=torch.int64, device="cpu").random_(
        -(2**63), None, generator=generator.manual_seed(5489)
    )
    wrong = [str(i) for i, word in _PUBLISHED.items() if int(low[i - 1]) != word % 256]
    if int(pair) % 2**64 != (_PUBLISHED[1] << 32) + _PUBLISHED[2]:
        wrong.append("1 and 2 as 64 bits")
    return f"these differ from the published ones: {', '.join(wrong)}" if wrong else ""


def _number(state: Tensor, where: slice) -> int:
    return int.from_bytes(bytes(state[where].tolist()), "little")


def _layout() -> str:
    generator = torch.Generator().manual_seed(7 + (5 << 32))
    state = generator.get_state()
    if state.numel() != 5056:
        return f"it has {state.numel()} bytes instead of 5056"
    if _number(state, _SEED) != 7 + (5 << 32):
        return "the first 8 bytes are not the seed"
    for drawn, left, used in ((0, 1, 0), (1, 624, 1), (623, 1, 624), (1, 624, 1), (99, 525, 100)):
        skip(generator, drawn)
        state = generator.get_state()
        if (_number(state, _LEFT), _number(state, _NEXT)) != (left, used):
            return f"left and next are {_number(state, _LEFT)}, {_number(state, _NEXT)} instead of {left}, {used}"
    if state[WAITS]:
        return "a normal number seems to wait after drawing words only"
    torch.randn(1, generator=generator, device="cpu")
    return "" if generator.get_state()[WAITS] else "a normal number does not wait after randn(1)"


def _jumps() -> str:
    for before in (0, 1, 100, _BLOCK):
        for words in (0, 1, _BLOCK - before, _BLOCK, 1000, 3_000_001):
            stepped, jumped, far = (torch.Generator().manual_seed(3) for _ in range(3))
            for generator in (stepped, jumped, far):
                torch.randn(1, generator=generator, device="cpu")  # 4 words; a second number waits
                skip(generator, before)
            skip(stepped, words)
            advance_words(jumped, words)
            if not torch.equal(stepped.get_state(), jumped.get_state()):
                return f"{words} words from word {before + 4} lead to another state than drawing them"
            jump_blocks(far, words // _BLOCK)
            skip(far, words % _BLOCK)
            if not torch.equal(stepped.get_state(), far.get_state()):
                return f"{words // _BLOCK} blocks from word {before + 4} lead to another state than drawing them"
    return ""


_DENSE = (((4, 6), (1, 4)), ((2, 3, 4, 5), (60, 1, 15, 3)), ((3, 4, 5), (1, 15, 3)))
"""Shapes and strides of transposed, channels last and permuted tensors without gaps."""
_KERNELS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("uniform_", ()), ("bernoulli_", (0.3,)), ("random_", ()), ("exponential_", ()), ("cauchy_", ()),
    ("geometric_", (0.3,)), ("log_normal_", ()),
)  # fmt: skip


def _order() -> str:
    for kernel, args in _KERNELS:
        for shape, stride in _DENSE:
            out = torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu")
            flat = torch.empty(out.numel(), dtype=torch.float32, device="cpu")
            getattr(out, kernel)(*args, generator=torch.Generator().manual_seed(1))
            getattr(flat, kernel)(*args, generator=torch.Generator().manual_seed(1))
            if not same_bits(out.as_strided((out.numel(),), (1,)), flat):
                return f"{kernel} does not fill a tensor of strides {stride} in the order of its memory"
        wide = torch.zeros(6, 10, dtype=torch.float32, device="cpu")
        rows = torch.empty(6, 4, dtype=torch.float32, device="cpu")
        getattr(wide[:, 2:10:2], kernel)(*args, generator=torch.Generator().manual_seed(1))
        getattr(rows, kernel)(*args, generator=torch.Generator().manual_seed(1))
        if not same_bits(wide[:, 2:10:2], rows):
            return f"{kernel} does not fill every other column row by row"
    return ""


def _strides() -> str:
    for function in (torch.rand_like, torch.randn_like, torch.empty_like):
        for shape, stride in _DENSE:
            found = function(torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu")).stride()
            if found != stride:
                return f"{function.__name__} of strides {stride} has strides {found}"
        for like in (torch.ones(4, 1, device="cpu").expand(4, 6), torch.ones(4, 12, device="cpu")[:, ::2]):
            if not function(like).is_contiguous():
                return f"{function.__name__} of strides {like.stride()} is not contiguous"
    return ""
