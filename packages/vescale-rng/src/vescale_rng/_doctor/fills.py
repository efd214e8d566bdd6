"""The doctor's look at operators of closed form: parts filled one by one against what torch draws for the whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._draw import cpu
from .._draw.cpu_sources import words_taken
from .._draw.fill import default_generator, fill
from .._draw.forms import resolve
from .._layout import Part, part_of_slices
from . import laws
from .cases import FILLS, LAYOUTS, Fill, Layout
from .report import Finding, Verdict
from .stream import WAITS, WORDS_END, same_bits, skip

__all__ = ["check_fills", "name_of"]

_MANY = 100_003
"""Elements with which torch uses several threads."""
_LARGE = (Layout((2503, 1001), None, 0), Layout((2503, 1001), None, 1))
"""More elements than the threads of a GPU, so that its grid is full and each thread draws more than once."""


def name_of(dtype: torch.dtype) -> str:
    """Name without the module."""
    return str(dtype).removeprefix("torch.")


def check_fills(device: torch.device) -> Iterator[Finding]:
    """Try every operator of `FILLS` with every dtype; dtypes with the same outcome share a finding."""
    for case in FILLS:
        outcomes: dict[tuple[Verdict, str], list[str]] = {}
        for dtype in case.dtypes:
            outcomes.setdefault(_look(case, dtype, device), []).append(name_of(dtype))
        for (verdict, why), names in outcomes.items():
            yield Finding(device.type, case.name, tuple(names), verdict, why)


def _look(case: Fill, dtype: torch.dtype, device: torch.device) -> tuple[Verdict, str]:
    try:
        why = _parts_differ(case, dtype, device) or _threads_matter(case, dtype, device)
        if why:
            return "NOT bitwise", why
        why = _law_is_broken(case, dtype, device)
        if why:
            return "drawn whole", why
        return "closed form", _words_differ(case, dtype, device)
    except Exception as error:  # noqa: BLE001  a check that cannot run is a finding
        return "NOT bitwise", f"{type(error).__name__}: {error}"


def _layouts(case: Fill, device: torch.device) -> list[Layout]:
    every = LAYOUTS if device.type == "cpu" else LAYOUTS + _LARGE
    return [layout for layout in every if layout.stride is None or case.strided]


def _starts(device: torch.device) -> list[Tensor]:
    """States to draw from: a fresh one, and one in the middle of things."""
    fresh = torch.Generator(device).manual_seed(2024)
    used = torch.Generator(device).manual_seed((5 << 32) + 77)
    torch.rand(700, generator=used, device=device)
    torch.randn(1, generator=used, device=device)  # on the CPU the second number of the pair waits
    return [fresh.get_state(), used.get_state()]


def _draw(case: Fill, dtype: torch.dtype, layout: Layout, device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """Draw the whole as one device does; returns it, and the arguments."""
    args = case.args
    if case.tensors:
        numel = Part.whole(layout.shape).numel
        chances = torch.linspace(0.1, 0.9, numel, dtype=torch.float64, device=device).view(layout.shape)
        args = tuple(chances.to(given or dtype) for given in case.tensors)
    out = torch.empty(layout.shape, dtype=dtype, device=device)
    if layout.stride is not None:
        out = torch.empty_strided(layout.shape, layout.stride, dtype=dtype, device=device)
    return case.run(out, args), args


def _cuts(size: int) -> list[slice]:
    """Three uneven pieces."""
    first = min(size, size // 2 + 1)
    second = min(size, first + size // 3)
    return [slice(0, first), slice(first, second), slice(second, size)]


def _parts_differ(case: Fill, dtype: torch.dtype, device: torch.device) -> str:
    generator = default_generator(device)
    for start in _starts(device):
        for layout in _layouts(case, device):
            generator.set_state(start)
            whole, args = _draw(case, dtype, layout, device)
            after = generator.get_state()
            for number, cut in enumerate(_cuts(layout.shape[layout.dim])):
                slices = [slice(None)] * len(layout.shape)
                slices[layout.dim] = cut
                wanted = whole[tuple(slices)]
                local = torch.empty(wanted.shape, dtype=dtype, device=device)
                given = tuple(a[tuple(slices)].contiguous() if isinstance(a, Tensor) else a for a in args)
                generator.set_state(start)
                fill(case.op, local, part_of_slices(layout.shape, slices, whole.stride()), given)
                where = f"part {number} of 3 along dim {layout.dim} of a tensor of shape {layout.shape}"
                if whole.stride() != Part.whole(layout.shape).global_stride:
                    where += f" and strides {whole.stride()}"
                if not same_bits(local, wanted):
                    return f"{where} is not the slice of what torch draws"
                if not torch.equal(generator.get_state(), after):
                    return f"{where} leaves the generator in another state than torch does"
    return ""


def _words_differ(case: Fill, dtype: torch.dtype, device: torch.device) -> str:
    generator = default_generator(device)
    for start in _starts(device):
        for layout in _layouts(case, device):
            generator.set_state(start)
            whole, _ = _draw(case, dtype, layout, device)
            why = _cpu_words(case, whole, start) if device.type == "cpu" else _cuda_offset(case, whole, start)
            if why:
                return f"{why} for a tensor of shape {layout.shape}"
    return ""


def _cpu_words(case: Fill, whole: Tensor, start: Tensor) -> str:
    words, waits = case.law(whole.numel(), whole.dtype, whole.is_contiguous(), bool(start[WAITS]))
    model = torch.Generator()
    model.set_state(start)
    skip(model, words)
    found, wanted = torch.default_generator.get_state(), model.get_state()
    if not torch.equal(found[:WORDS_END], wanted[:WORDS_END]):
        return f"torch does not take the {words} words that the model says"
    if bool(found[WAITS]) != waits:
        return f"a normal number {'does not wait' if waits else 'waits'} after the draw"
    return ""


def _cuda_offset(case: Fill, whole: Tensor, start: Tensor) -> str:
    """The offset moves by 4 for every round in which all threads of the grid take a block of Philox each."""
    generator = default_generator(whole.device)
    before = torch.Generator(whole.device)
    before.set_state(start)
    moved = generator.get_offset() - before.get_offset()
    numel, real = whole.numel() * (2 if whole.is_complex() else 1), _real(whole.dtype)
    kernel = resolve(case.op, case.args or tuple(torch.ones(1) for _ in case.tensors), None).kernel
    if kernel == "bernoulli_" and case.tensors:
        expected = 12 if numel else 0  # a kernel without rounds, which reserves 10
    else:
        gpu = torch.cuda.get_device_properties(whole.device)
        unroll = 4 if case.op == "dropout" else laws.cuda_unroll(kernel, real, case.law(1, real, True, False)[0])
        expected = laws.cuda_increment(numel, unroll, gpu.multi_processor_count, gpu.max_threads_per_multi_processor)
    return "" if moved == expected else f"the offset moves by {moved}, the model says {expected},"


def _law_is_broken(case: Fill, dtype: torch.dtype, device: torch.device) -> str:
    """What differs where the package found its law broken and draws whole, which is right but slow."""
    if device.type != "cpu":
        return ""
    tried = set()
    for layout in _layouts(case, device):
        whole, args = _draw(case, dtype, layout, device)
        form = resolve(case.op, args, None)
        law = cpu._law(form.kernel, whole.numel() * (2 if dtype.is_complex else 1), whole.is_contiguous())
        if law in tried:
            continue
        tried.add(law)
        tensors = any(isinstance(a, Tensor) for a in form.args)
        words = words_taken(form.kernel, _real(dtype), tuple(_one(a) for a in form.args)) if law == "even" else 0
        why = cpu.law_holds(law, form.kernel, _real(dtype), words, tensors)
        if why:
            return f"torch does not keep the law by which parts are drawn ({why})"
    return ""


def _one(value: Any) -> Any:
    return value.reshape(-1)[:1] if isinstance(value, Tensor) else value


def _real(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the two numbers that a complex one is drawn as."""
    return {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)


def _threads_matter(case: Fill, dtype: torch.dtype, device: torch.device) -> str:
    if device.type != "cpu":
        return ""
    start, found = _starts(device)[0], []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        torch.default_generator.set_state(start)
        whole, _ = _draw(case, dtype, Layout((_MANY,), None, 0), device)
        found.append((whole, torch.default_generator.get_state()))
    (one, after), (other, after_other) = found
    if not same_bits(one, other):
        return "values differ between 1 and 2 threads"
    return "" if torch.equal(after, after_other) else "the generator's state differs between 1 and 2 threads"
