"""`Prepared`: one operator on one layout, worked out once, so that a training step pays for little but its numbers.

What `fill` finds anew at each call (form, law, plan) is kept as a list of moves and kernel calls. It serves calls with
parameters that `fill` has accepted before, drawn by torch's own CPU generator; all others go to `fill`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._layout import Part
from .._streams.advance import advance_words
from .cpu import cpu_source
from .cpu_sources import Blocks, Even
from .fill import fill
from .forms import resolve
from .mode import active_sampler
from .unseen import unseen
from .walk import program_of

__all__ = ["Prepared", "fill_again"]

_transform = torch._C._functorch.peek_interpreter_stack
_KEPT = 64
"""Parameters whose programs are kept; those of a schedule never come back."""

_KEPT_LAYOUTS = 4096
_kept: dict[tuple[Any, ...], Prepared] = {}

_Copies = tuple[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int], ...]
_Program = tuple[Callable[..., Any], tuple[tuple[int, int, int | _Copies | None], ...], int]
"""A kernel; its steps: words to pass over, elements, and where they go (None: they are the local tensor); the words
behind the last step."""


class Prepared:
    """Fills local tensors of one kind with their elements of one operator's draws.

    Args:
        op: aten base name, as for `fill`.
        local: a tensor of the shape, strides, dtype and device of those to fill.
        part: which elements of the whole they hold.
    """

    __slots__ = ("op", "part", "programs", "simple")

    def __init__(self, op: str, local: Tensor, part: Part) -> None:
        self.op, self.part = op, part
        self.simple = local.device.type == "cpu" and not local.is_complex()
        self.programs: dict[tuple[Any, ...], _Program | None] = {}

    def __call__(self, local: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Fill a tensor; arguments as those of `fill`."""
        generator: Any = torch.default_generator
        quick = self.simple and active_sampler() is None
        if kwargs:
            generator = kwargs.get("generator")
            quick = (
                quick and len(kwargs) == 1 and isinstance(generator, torch.Generator) and generator.device.type == "cpu"
            )
        if not quick or local.requires_grad or local.is_neg() or _transform() is not None:
            fill(self.op, local, self.part, args, kwargs)
            return
        try:
            program = self.programs[args]  # a tensor among them hashes by identity and is not kept
        except (KeyError, TypeError):
            fill(self.op, local, self.part, args, kwargs)
            self._learn(local, args)
            return
        if program is None:
            fill(self.op, local, self.part, args, kwargs)
        else:
            self._run(program, local, args, generator)

    def _learn(self, local: Tensor, args: tuple[Any, ...]) -> None:
        """Note how to fill with parameters that have just been accepted."""
        if not all(isinstance(a, bool | int | float | None) for a in args):
            return
        if len(self.programs) >= _KEPT:
            self.programs.clear()
        self.programs[args] = _program(self.op, local, self.part, args)

    def _run(self, program: _Program, local: Tensor, args: tuple[Any, ...], generator: torch.Generator) -> None:
        kernel, steps, rest = program
        for skipped, count, where in steps:
            if skipped:
                advance_words(generator, skipped)
            if where is None:
                kernel(local, generator)
            elif isinstance(where, int):
                kernel(local.as_strided((count,), (1,), local.storage_offset() + where), generator)
            else:
                block = torch.empty(count, dtype=local.dtype, device=local.device)
                kernel(block, generator)
                base = local.storage_offset()
                for shape, stride, offset, target_stride, target in where:
                    local.as_strided(shape, target_stride, base + target).copy_(block.as_strided(shape, stride, offset))
        if rest:
            advance_words(generator, rest)


@unseen
def fill_again(op: str, local: Tensor, part: Part, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`fill` for callers that come back with the same operator and layout; the arguments are those of `fill`."""
    if type(local) is not Tensor or local.shape != part.local_shape:
        fill(op, local, part, args, kwargs)
        return
    key = (op, part, local.dtype, local.device, local.stride())
    prepared = _kept.get(key)
    if prepared is None:
        if len(_kept) >= _KEPT_LAYOUTS:
            _kept.clear()
        prepared = _kept[key] = Prepared(op, local, part)
    prepared(local, args, kwargs)


def _program(op: str, local: Tensor, part: Part, args: tuple[Any, ...]) -> _Program | None:
    """Work out how to fill; None where only `fill` does it right."""
    form = resolve(op, args, None)
    if form.after is not None:
        return None
    method, given = getattr(Tensor, form.kernel), form.args

    def kernel(out: Tensor, generator: torch.Generator) -> None:
        method(out, *given, generator=generator)

    if part.is_whole and local.stride() == part.global_stride:
        return kernel, ((0, local.numel(), None),), 0
    source = cpu_source(form.kernel, local.dtype, part.global_shape, part.global_stride, given, torch.Generator())
    if not isinstance(source, Even | Blocks):
        return None
    plan = program_of(part, local.stride(), source.seek_cost, source.skip_cost, source.grain)
    if plan is None:
        return None
    tail = part.numel - source.grain if isinstance(source, Blocks) and source.ragged else part.numel
    steps: list[tuple[int, int, int | _Copies | None]] = []
    at = 0
    for start, count, where in plan:
        if start % source.grain or count % source.grain or start + count > tail:
            return None
        alone = where == 0 and count == local.numel() and local.is_contiguous()
        steps.append((start * source.words - at, count, None if alone else where))
        at = (start + count) * source.words
    return kernel, tuple(steps), source.words_total() - at
