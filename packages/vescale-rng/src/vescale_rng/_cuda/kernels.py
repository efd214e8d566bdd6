"""CUDA's random kernels computed with torch operators, on any device: what a given GPU would draw.

Integers, uniform numbers, bernoulli and dropout masks are exact. Normal, log-normal, exponential, cauchy and geometric
numbers in float32 and half types come from the same words in the same places, but the GPU takes their logarithms,
sines, tangents and exponentials from fast approximate instructions, so the last bits can differ; float64 differs less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .floats import fma, round_to, uniform32, uniform64
from .laws import Law, random_range
from .philox import philox_words
from .profile import DeviceProfile

__all__ = ["emulate", "emulate_at"]

_Words = tuple[Tensor, Tensor, Tensor, Tensor]
_Transform = Callable[[_Words, int], Tensor]
_TWO_PI_2POW32 = 2.3283064365386963e-10 * 6.2831854820251465
_SIGN = -(1 << 63)


def _block(device: torch.device) -> int:
    """Threads whose words are held at a time; memory does not grow with the draw.

    On a CPU so many fit a cache, on a GPU they keep it busy.
    """
    return 1 << 15 if device.type == "cpu" else 1 << 22


def emulate(
    law: Law,
    out: Tensor,
    start: int,
    params: tuple[Any, ...],
    *,
    numel: int,
    seed: int,
    offset: int,
    profile: DeviceProfile,
) -> None:
    """Compute some elements of one launch.

    Args:
        law: of the draw.
        out: contiguous 1-D tensor; gets the elements `[start, start + len(out))`.
        start: first element, counted in the order of the kernel.
        params: of the kernel; tensors among them are 1-D, contiguous and of `len(out)`.
        numel: elements of the whole launch.
        seed: of the generator.
        offset: of the generator when the launch begins, a multiple of 4.
        profile: of the GPU.
    """
    if out.numel() == 0:
        return
    if law.layout == "grid":
        _grid(law, out, start, _transform(law, params), profile.threads(numel), seed, offset // 4)
    else:
        threads = profile.threads(numel) if law.layout == "vector" else -(-numel // 4)
        _neighbours(law, out, start, params, threads, seed, offset // 4)


def emulate_at(
    law: Law,
    out: Tensor,
    positions: Tensor,
    params: tuple[Any, ...],
    *,
    numel: int,
    seed: int,
    offset: int,
    profile: DeviceProfile,
) -> None:
    """Compute elements of one launch that do not follow each other.

    Args:
        law: of a draw of the layout "grid" that takes one word per element.
        out: contiguous 1-D tensor to fill.
        positions: int64 of `len(out)`, the elements, counted in the order of the kernel.
        params: of the kernel, no tensors.
        numel: elements of the whole launch.
        seed: of the generator.
        offset: of the generator when the launch begins, a multiple of 4.
        profile: of the GPU.
    """
    threads = profile.threads(numel)
    transform = _transform(law, params)
    block = _block(out.device)
    for start in range(0, out.numel(), block):
        some, place = positions[start : start + block], out[start : start + block]
        within = some % law.round_numel(threads)
        step, lane, thread = some // law.round_numel(threads), within // threads, within % threads
        words = torch.stack(philox_words(seed, thread, step + offset // 4))
        word = words.gather(0, lane.unsqueeze(0))[0]
        place.copy_(transform((word, word, word, word), 0))


def _grid(law: Law, out: Tensor, start: int, transform: _Transform, threads: int, seed: int, counter: int) -> None:
    stop = start + out.numel()
    for step, low, high in _thread_blocks(start, stop, threads, law.round_numel(threads), _block(out.device)):
        # Of each lane, the threads of this block whose elements are asked for.
        base = step * law.round_numel(threads)
        spans = []
        for lane in range(law.unroll):
            first = base + lane * threads
            a, b = max(start, first + low), min(stop, first + high)
            if a < b:
                spans.append((lane, a - first, b - first))
        if not spans:
            continue
        least = min(a for _, a, _ in spans)
        most = max(b for _, _, b in spans)
        words = philox_words(seed, torch.arange(least, most, device=out.device), counter + step)
        for lane, a, b in spans:
            w0, w1, w2, w3 = (w[a - least : b - least] for w in words)
            at = base + lane * threads - start
            out[at + a : at + b].copy_(transform((w0, w1, w2, w3), lane))


def _thread_blocks(start: int, stop: int, threads: int, round_numel: int, block: int) -> Iterator[tuple[int, int, int]]:
    """`(step, low, high)`: blocks of threads, for each step that a range of elements touches."""
    for step in range(start // round_numel, (stop - 1) // round_numel + 1):
        for low in range(0, threads, block):
            yield step, low, min(low + block, threads)


def _neighbours(
    law: Law, out: Tensor, start: int, params: tuple[Any, ...], threads: int, seed: int, counter: int
) -> None:
    """Dropout and bernoulli(tensor), where a thread takes `unroll` neighbours at a time."""
    width, stop, block = law.unroll, start + out.numel(), _block(out.device)
    for low in range(start // width, -(-stop // width), block):
        high = min(low + block, -(-stop // width))
        group = torch.arange(low, high, device=out.device)
        thread, call = group % threads, (group // threads) * law.calls + counter
        words = [w for i in range(law.calls) for w in philox_words(seed, thread, call + i)]
        uniform = uniform32(torch.stack(words[:width], dim=1).view(-1))
        a, b = max(start, low * width), min(stop, high * width)
        uniform = uniform[a - low * width : b - low * width]
        if law.layout == "apply":
            chance = params[0][a - start : b - start].to(torch.float64 if law.dtype == torch.float64 else torch.float32)
            out[a - start : b - start].copy_(uniform <= chance)
        else:
            out[a - start : b - start].copy_(_keep(uniform, params[0], law.dtype))


# ------------------------------------------------------------------ transforms of the grid kernels


def _transform(law: Law, params: tuple[Any, ...]) -> _Transform:
    return _TRANSFORMS[law.kernel](law, params)


def _filled(params: tuple[Any, ...], *defaults: float) -> tuple[float, ...]:
    return (*params, *defaults[len(params) :])


def _uniforms(law: Law) -> _Transform:
    if law.unroll == 2:
        return lambda w, lane: uniform64(w[2 * lane], w[2 * lane + 1])
    return lambda w, lane: uniform32(w[lane])


def _normals(law: Law) -> _Transform:
    """Box-Muller: the even lane takes the sine, the odd one the cosine."""
    if law.unroll == 2:

        def wide(w: _Words, lane: int) -> Tensor:
            radius = uniform64(w[0], w[1]).log_().mul_(-2.0).sqrt_()
            # sincospi of a number in (0, 2]
            angle = (w[2] ^ (w[3] << 21)).to(torch.float64).mul_(2.0**-52).add_(2.0**-53).mul_(math.pi)
            return radius * (angle.cos_() if lane else angle.sin_())

        return wide
    step = round_to(_TWO_PI_2POW32, torch.float32)

    def narrow(w: _Words, lane: int) -> Tensor:
        pair = lane // 2 * 2
        log = uniform32(w[pair]).to(torch.float64).log_().to(torch.float32)
        radius = (log * -2.0).to(torch.float64).sqrt_().to(torch.float32)
        word = w[pair + 1].to(torch.float64).to(torch.float32)
        angle = fma(word, step, step / 2).to(torch.float64)
        return radius * (angle.cos_() if lane % 2 else angle.sin_()).to(torch.float32)

    return narrow


def _acc(law: Law) -> torch.dtype:
    return torch.float64 if law.dtype == torch.float64 else torch.float32


def _precise(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """A function of float32 numbers rounded once, independent of this CPU's vector library."""
    return function(value.to(torch.float64)).to(value.dtype)


def _uniform(law: Law, params: tuple[Any, ...]) -> _Transform:
    low, high = (round_to(x, law.dtype) for x in _filled(params, 0.0, 1.0))
    width = round_to(high - low, law.dtype)
    draw = _uniforms(law)

    def transform(w: _Words, lane: int) -> Tensor:
        value = fma(draw(w, lane), width, low).to(law.dtype)
        return torch.where(value == high, low, value)

    return transform


def _normal(law: Law, params: tuple[Any, ...]) -> _Transform:
    mean, std = (round_to(x, _acc(law)) for x in _filled(params, 0.0, 1.0))
    draw = _normals(law)
    return lambda w, lane: fma(draw(w, lane), std, mean)


def _log_normal(law: Law, params: tuple[Any, ...]) -> _Transform:
    inner = _normal(law, _filled(params, 1.0, 2.0))
    return lambda w, lane: _precise(torch.exp, inner(w, lane))


def _exponential(law: Law, params: tuple[Any, ...]) -> _Transform:
    acc = _acc(law)
    (rate,) = (round_to(x, acc) for x in _filled(params, 1.0))
    half = torch.finfo(acc).eps / 2
    factor = round_to(-1.0 / rate, acc)
    draw = _uniforms(law)

    def transform(w: _Words, lane: int) -> Tensor:
        value = draw(w, lane)
        # The logarithm of 1 is 0, which is no exponential number.
        return torch.where(value >= 1.0 - half, -half, _precise(torch.log, value)) * factor

    return transform


def _cauchy(law: Law, params: tuple[Any, ...]) -> _Transform:
    acc = _acc(law)
    median, sigma = (round_to(x, acc) for x in _filled(params, 0.0, 1.0))
    eps = torch.finfo(acc).eps
    pi = round_to(math.pi, acc)
    draw = _uniforms(law)

    def transform(w: _Words, lane: int) -> Tensor:
        value = draw(w, lane)
        if acc == torch.float32:
            value = value.clamp_(eps, 1.0 - eps)
        return fma(_precise(torch.tan, (value - 0.5) * pi), sigma, median)

    return transform


def _geometric(law: Law, params: tuple[Any, ...]) -> _Transform:
    acc = _acc(law)
    p = torch.tensor(params[0], dtype=torch.float64).to(acc)
    # float32 has no log1p on the device: torch takes the logarithm of the rounded 1 - p there.
    scale = _precise(torch.log, 1.0 - p) if acc == torch.float32 else torch.log1p(-p)
    draw = _uniforms(law)
    return lambda w, lane: (_precise(torch.log, draw(w, lane)) / scale.to(w[0].device)).ceil_()


def _bernoulli(law: Law, params: tuple[Any, ...]) -> _Transform:
    p = round_to(_filled(params, 0.5)[0], _acc(law))
    draw = _uniforms(law)
    return lambda w, lane: draw(w, lane) < p


def _keep(uniform: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Dropout draws float32 for every type, and compares in the type that it accumulates in."""
    chance = 1.0 - p
    return uniform.to(torch.float64) < chance if dtype == torch.float64 else uniform < round_to(chance, torch.float32)


def _dropout(law: Law, params: tuple[Any, ...]) -> _Transform:
    return lambda w, lane: _keep(uniform32(w[lane]), params[0], law.dtype)


def _random(law: Law, params: tuple[Any, ...]) -> _Transform:
    low, width = random_range(law.dtype, params) if params else (0, _default_width(law.dtype))

    def transform(w: _Words, lane: int) -> Tensor:
        value = w[lane] if law.unroll == 4 else (w[2 * lane] << 32) | w[2 * lane + 1]
        return _cast(_unsigned_remainder(value, width) + low, law.dtype)

    return transform


def _default_width(dtype: torch.dtype) -> int:
    """Number of values of `random_()`."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps) + 1
    return torch.iinfo(dtype).max + 1


def _unsigned_remainder(value: Tensor, width: int) -> Tensor:
    """Return value % width, `value` read as unsigned 64-bit."""
    if width == 1 << 64:
        return value
    if width >= 1 << 63:
        wrapped = width - (1 << 64)
        below = (value ^ _SIGN) < (wrapped ^ _SIGN)
        return torch.where(below, value, value - wrapped)
    # Twice the remainder of the upper 63 bits, plus the last bit, less the width where it reaches that.
    half = ((value >> 1) & (2**63 - 1)) % width
    rest = width - half - (value & 1)
    return torch.where(half >= rest, half - rest, half - rest + width)


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    # torch casts int64 to a half type by way of float32, on either device.
    return value.to(torch.float32).to(dtype) if dtype in (torch.float16, torch.bfloat16) else value.to(dtype)


_TRANSFORMS: dict[str, Callable[[Law, tuple[Any, ...]], _Transform]] = {
    "uniform_": _uniform,
    "normal_": _normal,
    "log_normal_": _log_normal,
    "exponential_": _exponential,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "bernoulli_": _bernoulli,
    "dropout": _dropout,
    "random_": _random,
}
