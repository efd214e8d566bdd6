"""States that are a pure function of (seed, step), so that whoever finds a step knows what must be in it.

Some tensors change with every step, some with every fifth, some never: chunks of earlier steps are referred to.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["TENSORS", "Spec", "difference", "local_value", "make", "state_of"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of the state."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: torch.dtype
    """Of the elements."""
    period: int
    """Steps after which it changes; 0: never."""
    layout: str = "plain"
    """How 4 ranks hold it: a name that the saver knows."""


TENSORS = {
    "w": Spec((256, 256), torch.float32, 1, "rows"),
    "odd": Spec((30, 1001), torch.bfloat16, 1, "rows"),
    "grid": Spec((128, 512), torch.bfloat16, 5, "grid"),
    "columns": Spec((64, 640), torch.float32, 5, "columns"),
    "replica": Spec((128, 160), torch.float64, 1, "replica"),
    "plain": Spec((300, 100), torch.float32, 5),
    "frozen": Spec((400, 400), torch.float32, 0, "rows"),
    "frozen_replica": Spec((333, 111), torch.int32, 0),
    "mask": Spec((5, 7), torch.bool, 1),
    "scalar": Spec((), torch.float64, 1),
    "empty": Spec((0, 3), torch.float32, 0),
}


def make(seed: int, step: int, name: str) -> Tensor:
    """Return the whole of a tensor at a step, in memory of its own."""
    period = TENSORS[name].period
    return _make(seed, step // period if period else -1, name).clone()


@functools.lru_cache(256)
def _make(seed: int, period: int, name: str) -> Tensor:
    spec = TENSORS[name]
    generator = _generator(seed, period, name)
    if spec.dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator, dtype=torch.float32).to(spec.dtype)
    return torch.randint(0, 2 if spec.dtype == torch.bool else 1 << 30, spec.shape, generator=generator).to(spec.dtype)


def local_value(seed: int, step: int, rank: int) -> dict[str, Any]:
    """Return what one rank keeps for itself."""
    rng = torch.randint(0, 256, (700,), generator=_generator(seed, step, f"rank {rank}"), dtype=torch.uint8)
    return {"rng": rng, "position": step * 1000 + rank}


def state_of(
    seed: int, step: int, place: Callable[[str, Tensor], Any], local: Callable[[dict[str, Any]], Any], rank: int
) -> dict[str, Any]:
    """Return the state.

    Args:
        seed: of the drill.
        step: of the training.
        place: makes of the name and the whole of a tensor what the state holds.
        local: marks a value as the rank's own.
        rank: whose state.
    """
    tensors = {name: place(name, make(seed, step, name)) for name in TENSORS}
    tensors["tied"] = tensors["replica"]
    return {
        "model": tensors,
        "step": step,
        "log": {"losses": [1 / (n + 1) for n in range(step % 7)], "name": f"run {seed}", "at": (step, None, True)},
        "own": local(local_value(seed, step, rank)),
    }


def difference(found: Any, wanted: Any, at: str = "state") -> str:
    """Return where two states first differ in a bit; an empty string where they do not.

    Example:
        >>> difference({"a": [torch.ones(2), 1]}, {"a": [torch.ones(2), 2]})
        "state['a'][1]: 1, but must be 2"
    """
    if type(found) is not type(wanted):
        return f"{at}: a {type(found).__name__}, but must be a {type(wanted).__name__}"
    if isinstance(wanted, Tensor):
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return f"{at}: {found.dtype} {list(found.shape)}, but must be {wanted.dtype} {list(wanted.shape)}"
        one, other = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (found, wanted))
        wrong = int((one != other).sum())
        return f"{at}: {wrong} of {one.numel()} bytes are wrong" if wrong else ""
    if isinstance(wanted, dict):
        if list(found) != list(wanted):
            return f"{at}: the keys {list(found)}, but must be {list(wanted)}"
        pairs = [(found[key], wanted[key], f"{at}[{key!r}]") for key in wanted]
    elif isinstance(wanted, list | tuple):
        if len(found) != len(wanted):
            return f"{at}: {len(found)} items, but must be {len(wanted)}"
        pairs = [(a, b, f"{at}[{n}]") for n, (a, b) in enumerate(zip(found, wanted, strict=True))]
    else:
        return "" if found == wanted else f"{at}: {found!r}, but must be {wanted!r}"
    return next((text for pair in pairs if (text := difference(*pair))), "")


def _generator(seed: int, period: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {period} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
