"""The doctor's look at calls as users write them: words taken, masks, kernels run, and independence of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import CALLS, Call
from .report import Finding
from .stream import WORDS_END, guarded, same_bits, skip

__all__ = ["check_calls"]


def check_calls() -> Iterator[Finding]:
    """Try every call of `CALLS`."""
    for call in CALLS:
        why = guarded(lambda call=call: _differs(call))  # type: ignore[misc]
        yield Finding("cpu", call.name, ("float32",), "NOT bitwise" if why else call.verdict, why)


def _differs(call: Call) -> str:
    start = torch.Generator().manual_seed(99).get_state()
    results, states = [], []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        torch.default_generator.set_state(start)
        results.append(call.run())
        states.append(torch.default_generator.get_state())
    if not torch.equal(*states):
        return "the generator's state differs between 1 and 2 threads"
    result = results[0]
    if isinstance(result, Tensor) and not same_bits(*results):
        return "values differ between 1 and 2 threads"
    return (
        _words_differ(call, start, states[0])
        or (_mask_differs(call, start, result) if call.mask is not None else "")
        or (_kernels_differ(call) if call.kernels else "")
    )


def _words_differ(call: Call, start: Tensor, after: Tensor) -> str:
    if call.words is None:
        return "it takes no words" if torch.equal(start, after) else ""
    model = torch.Generator()
    model.set_state(start)
    skip(model, call.words)
    if torch.equal(model.get_state()[:WORDS_END], after[:WORDS_END]):
        return ""
    return f"it does not take the {call.words} words that the model says"


def _mask_differs(call: Call, start: Tensor, result: Tensor) -> str:
    assert call.mask is not None
    model = torch.Generator()
    model.set_state(start)
    mask = torch.empty(call.mask, dtype=torch.bool, device="cpu").bernoulli_(0.7, generator=model)
    kept = result > (result.min() + result.max()) / 2
    if torch.equal(kept, mask.expand(result.shape)):
        return ""
    return f"what is kept is not bernoulli_(0.7) of shape {call.mask}"


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down which random kernels run, and on how many elements."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append((func._schema.name.removeprefix("aten::"), args[0].numel()))
        return func(*args, **(kwargs or {}))


def _kernels_differ(call: Call) -> str:
    with _Kernels() as kernels:
        numel = call.run().numel()
    strange = [
        f"{name} of {count} elements" for name, count in kernels.seen if name not in call.kernels or count != numel
    ]
    if not kernels.seen:
        return "it runs no random kernel that can be seen"
    if strange:
        return f"it runs {', '.join(strange)} instead of {' and '.join(call.kernels)} of all {numel} elements"
    return ""
