"""The big table: operators x dtypes x whole tensors x layouts x worlds x states of the generator.

A rank is a part of the whole tensor, so no process group is needed. The oracle is plain torch on the whole tensor,
drawn from the default generator; each rank draws its part from a generator of its own in the same state, and numbers
and states must agree byte for byte. Run as a script it checks the core of the table and prints a summary as JSON.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from vescale_rng._draw.fill import fill
from vescale_rng._layout import Part, part_of_flat, part_of_mesh, part_of_slices

# ------------------------------------------------------------------ whole tensors

WHOLES: dict[str, Callable[[torch.dtype], Tensor]] = {
    **{
        "x".join(map(str, shape)) or "0-d": functools.partial(torch.empty, shape)  # type: ignore[misc]
        for shape in (
            (), (0,), (3, 0, 2), (1,), (2,), (15,), (16,), (17,), (32,), (1, 1, 1), (4, 4), (7, 3), (5, 33), (1, 40),
            (40, 1), (24, 8), (3, 5, 7), (2, 3, 4, 5), (71, 67), (4099,), (6, 1, 9), (8, 2, 16),
        )
    },
    "transposed": lambda dtype: torch.empty(9, 8, dtype=dtype).t(),
    "transposed small": lambda dtype: torch.empty(3, 5, dtype=dtype).t(),
    "permuted": lambda dtype: torch.empty(4, 5, 6, dtype=dtype).permute(2, 0, 1),
    "channels_last": lambda dtype: torch.empty(2, 3, 4, 5, dtype=dtype).to(memory_format=torch.channels_last),
    "channels_last_3d": lambda dtype: torch.empty(2, 3, 2, 3, 4, dtype=dtype).to(memory_format=torch.channels_last_3d),
    "columns": lambda dtype: torch.empty(8, 12, dtype=dtype)[:, 2:9],
    "every second row": lambda dtype: torch.empty(16, 6, dtype=dtype)[::2],
    "every third": lambda dtype: torch.empty(90, dtype=dtype)[::3],
    "slice of a transposed": lambda dtype: torch.empty(9, 8, dtype=dtype).t()[1:7, ::2],
}  # fmt: skip
LARGE: dict[str, Callable[[torch.dtype], Tensor]] = {
    "more than a chunk": lambda dtype: torch.empty(521, 523, dtype=dtype),
    "more than a chunk, transposed": lambda dtype: torch.empty(523, 521, dtype=dtype).t(),
}
"""More elements than torch fills by one thread, and than the walk produces at once."""


def empty(name: str, dtype: torch.dtype) -> Tensor:
    """Return an uninitialized whole tensor of the shape and strides that a name stands for."""
    make = WHOLES[name] if name in WHOLES else LARGE[name]
    return make(dtype=dtype) if isinstance(make, functools.partial) else make(dtype)


# ------------------------------------------------------------------ operators

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTS = (torch.int64, torch.int32, torch.int16, torch.uint8)
BOOL = (torch.bool,)
WIDE = (torch.int64, torch.int32, torch.float64, torch.float32)


@dataclass(frozen=True)
class Operator:
    """One way to call a random operator.

    Args:
        op: what `fill` is told.
        args: parameters of the distribution; a dtype stands for a tensor of chances or the like.
        dtypes: dtypes of results.
        whole: what one device runs, given an uninitialized tensor and the parameters.
        kwargs: named parameters.
    """

    op: str
    args: tuple[Any, ...]
    dtypes: tuple[torch.dtype, ...]
    whole: Callable[..., Tensor]
    kwargs: tuple[tuple[str, Any], ...] = ()


def in_place(op: str, *args: Any, dtypes: tuple[torch.dtype, ...] = FLOATS, **kwargs: Any) -> Operator:
    """An in-place method of tensors."""
    return Operator(op, args, dtypes, lambda out, *given: getattr(out, op)(*given, **kwargs), tuple(kwargs.items()))


def keep_mask(out: Tensor, p: float) -> Tensor:
    """The mask that torch's dropout multiplies by, seen from outside."""
    return functional.dropout(torch.ones_like(out), p).ne(0).to(out.dtype)


def normal(out: Tensor, mean: Any, std: Any) -> Tensor:
    return torch.normal(mean, std)


OPERATORS: dict[str, Operator] = {
    "rand": Operator("rand", (), FLOATS + COMPLEX, lambda out: torch.rand(out.shape, dtype=out.dtype)),
    "rand_like": Operator("rand_like", (), FLOATS + COMPLEX, torch.rand_like),
    "uniform_": in_place("uniform_", dtypes=FLOATS + COMPLEX),
    "uniform_ of bounds": in_place("uniform_", -1.0, 2.5),
    "randn": Operator("randn", (), FLOATS + COMPLEX, lambda out: torch.randn(out.shape, dtype=out.dtype)),
    "randn_like": Operator("randn_like", (), FLOATS + COMPLEX, torch.randn_like),
    "normal_": in_place("normal_", 0.3, 1.7, dtypes=FLOATS + COMPLEX),
    "normal_ of std 0": in_place("normal_", 1.0, 0.0),
    "normal of means": Operator("normal", (torch.dtype, 0.5), FLOATS + COMPLEX, normal),
    "normal of stds": Operator("normal", (2.0, torch.dtype), FLOATS, normal),
    "normal of both": Operator("normal", (torch.dtype, torch.dtype), FLOATS, normal),
    "randint": Operator(
        "randint", (3, 50), FLOATS + INTS, lambda out, *given: torch.randint(*given, out.shape, dtype=out.dtype)
    ),
    "randint of bool": Operator("randint", (2,), BOOL, lambda out, n: torch.randint(n, out.shape, dtype=torch.bool)),
    "randint_like": Operator("randint_like", (50,), FLOATS + INTS, torch.randint_like),
    "randint_like of bounds": Operator(
        "randint_like", (), FLOATS + INTS, lambda out: torch.randint_like(out, 2, 9), (("low", 2), ("high", 9))
    ),
    "random_": in_place("random_", dtypes=FLOATS + INTS + BOOL),
    "random_ to": in_place("random_", 100, dtypes=FLOATS + INTS),
    "random_ from to": in_place("random_", -5, 7, dtypes=(*FLOATS, torch.int64, torch.int32, torch.int16)),
    "random_ unsigned": in_place("random_", 0, 9, dtypes=(torch.uint16, torch.uint32, torch.uint64)),
    "random_ below 2^28": in_place("random_", 0, 2**28 - 1, dtypes=WIDE),
    "random_ to 2^28": in_place("random_", 0, 2**28, dtypes=WIDE),
    "random_ beyond 2^28": in_place("random_", 0, 2**28 + 1, dtypes=WIDE),
    "random_ of all words": in_place("random_", -(2**63), None, dtypes=(torch.int64,)),
    "random_ by name": in_place("random_", dtypes=(torch.int64, torch.float32), **{"from": 2, "to": 9}),
    "bernoulli_": in_place("bernoulli_", 0.3, dtypes=FLOATS + INTS + BOOL),
    "bernoulli_ of 0": in_place("bernoulli_", 0.0, dtypes=(torch.float32, torch.int64)),
    "bernoulli_ of 1": in_place("bernoulli_", 1.0, dtypes=(torch.float32, torch.int64)),
    "bernoulli_ of floats": in_place("bernoulli_", torch.float32, dtypes=FLOATS + INTS + BOOL),
    "bernoulli_ of doubles": in_place("bernoulli_", torch.float64, dtypes=FLOATS + INTS + BOOL),
    "bernoulli_ of bfloats": in_place("bernoulli_", torch.bfloat16, dtypes=(torch.float32, torch.bfloat16)),
    "bernoulli of chances": Operator("bernoulli", (torch.dtype,), FLOATS, lambda out, p: torch.bernoulli(p)),
    "bernoulli of a number": Operator("bernoulli", (0.6,), FLOATS, torch.bernoulli),
    "dropout": Operator("dropout", (0.3,), FLOATS, keep_mask),
    "exponential_": in_place("exponential_", 1.5),
    "cauchy_": in_place("cauchy_", 0.5, 2.0),
    "log_normal_": in_place("log_normal_", 0.1, 0.5),
    "geometric_": in_place("geometric_", 0.2, dtypes=FLOATS + INTS),
}


# ------------------------------------------------------------------ layouts


@dataclass(frozen=True)
class Interleaved:
    """The dim is `interleave` equal blocks; a rank has a chunk of each."""

    dim: int
    interleave: int


@dataclass(frozen=True)
class Ragged:
    """The leading dims, flattened, in pieces of the proportions `local_units`; the rest of the dims go along."""

    dims: tuple[int, ...]
    local_units: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """What one rank holds: the part, and how to cut it from the whole by hand."""

    part: Part
    cut: Callable[[Tensor], Tensor]


def cut_for(whole: Tensor, placement: Any, count: int, index: int) -> Tensor:
    """Return what of `whole` one rank of a mesh axis gets."""
    if isinstance(placement, Replicate):
        return whole
    if isinstance(placement, Interleaved):
        blocks = whole.tensor_split(placement.interleave, placement.dim)
        return torch.cat([cut_for(block, Shard(placement.dim), count, index) for block in blocks], placement.dim)
    if isinstance(placement, Ragged):
        rows = whole.flatten(0, len(placement.dims) - 1)
        unit = len(rows) // sum(placement.local_units)
        return rows.split([unit * n for n in placement.local_units])[index].flatten()
    dim = placement.dim % whole.dim()
    if isinstance(placement, _StridedShard):
        pieces = whole.tensor_split(placement.split_factor, dim)
        # As _StridedShard documents itself: chunk into split_factor pieces, each of them sharded.
        pieces = whole.chunk(placement.split_factor, dim)
        return torch.cat([cut_for(piece, Shard(dim), count, index) for piece in pieces], dim)
    chunks = whole.chunk(count, dim)
    return chunks[index] if index < len(chunks) else whole.narrow(dim, 0, 0)


def on_mesh(sizes: tuple[int, ...], placements: list[Any]) -> Callable[[Tensor], list[Held]]:
    """A layout of a mesh: parts of all its ranks."""

    def held(whole: Tensor) -> list[Held]:
        def cut(coordinate: tuple[int, ...], local: Tensor) -> Tensor:
            for placement, count, index in zip(placements, sizes, coordinate, strict=True):
                local = cut_for(local, placement, count, index)
            return local

        return [
            Held(
                part_of_mesh(tuple(whole.shape), sizes, placements, whole.stride(), at),
                functools.partial(cut, at),
            )
            for at in itertools.product(*map(range, sizes))
        ]

    return held


def by_flat_ranges(world: int) -> Callable[[Tensor], list[Held]]:
    """Ranges of the flattened tensor of any lengths, some of them empty."""

    def held(whole: Tensor) -> list[Held]:
        rng = random.Random(world)
        ends = sorted(rng.randint(0, whole.numel()) for _ in range(world - 1))
        found = []
        for start, stop in itertools.pairwise([0, *ends, whole.numel()]):
            part = part_of_flat(tuple(whole.shape), start, stop, whole.stride())
            found.append(Held(part, lambda t, a=start, b=stop: t.flatten()[a:b]))  # type: ignore[misc]
        return found

    return held


def by_slices(world: int) -> Callable[[Tensor], list[Held]]:
    """Slices at random, in some dims two of them: ranks may leave gaps and share elements."""

    def held(whole: Tensor) -> list[Held]:
        rng = random.Random(world)
        found = []
        for _ in range(world):
            chosen = []
            for size in whole.shape:
                a, b, c, d = sorted(rng.randint(0, size) for _ in range(4))
                chosen.append([[slice(a, b), slice(c, d)], [slice(a, d)], [slice(0, size)]][rng.randrange(3)])

            def cut(t: Tensor, chosen: list[list[slice]] = chosen) -> Tensor:
                for dim, slices in enumerate(chosen):
                    t = torch.cat([t.narrow(dim, s.start, s.stop - s.start) for s in slices], dim)
                return t

            found.append(Held(part_of_slices(tuple(whole.shape), chosen, whole.stride()), cut))
        return found

    return held


def layouts(world: int) -> dict[str, tuple[int, Callable[[Tensor], list[Held]]]]:
    """Layouts of a world: the least number of dims that the tensor must have, and the parts."""
    shard, replicate = Shard, Replicate()
    units = tuple((3, 0, 2, 1, 4, 0, 1, 5)[:world])
    found: dict[str, tuple[int, Callable[[Tensor], list[Held]]]] = {
        "replicate": (0, on_mesh((world,), [replicate])),
        "shard 0": (1, on_mesh((world,), [shard(0)])),
        "shard 1": (2, on_mesh((world,), [shard(1)])),
        "shard -1": (1, on_mesh((world,), [shard(-1)])),
        "interleaved -1": (1, on_mesh((world,), [Interleaved(-1, 2)])),
        "interleaved 0": (1, on_mesh((world,), [Interleaved(0, 4)])),
        "ragged rows": (1, on_mesh((world,), [Ragged((0,), units)])),
        "ragged": (2, on_mesh((world,), [Ragged((0, 1), units)])),
        "flat ranges": (1, by_flat_ranges(world)),
        "slices": (0, by_slices(world)),
    }
    for first in {4: (2,), 8: (2, 4)}.get(world, (1,)):
        sizes, name = (first, world // first), f" {first}x{world // first}"
        found |= {
            "shard 0, 1" + name: (2, on_mesh(sizes, [shard(0), shard(1)])),
            "shard 1, 0" + name: (2, on_mesh(sizes, [shard(1), shard(0)])),
            "shard 0, 0" + name: (1, on_mesh(sizes, [shard(0), shard(0)])),
            "shard -1, -1" + name: (1, on_mesh(sizes, [shard(-1), shard(-1)])),
            "shard, replicate" + name: (1, on_mesh(sizes, [shard(0), replicate])),
            "replicate, shard" + name: (1, on_mesh(sizes, [replicate, shard(-1)])),
            "strided, shard" + name: (1, on_mesh(sizes, [_StridedShard(0, split_factor=sizes[1]), shard(0)])),
            "shard, ragged" + name: (2, on_mesh(sizes, [shard(1), Ragged((0,), (2, 1, 0, 1)[: sizes[1]])])),
        }
    if world == 8:
        found["shard 0, 1, 0 2x2x2"] = (2, on_mesh((2, 2, 2), [shard(0), shard(1), shard(0)]))
        found["shard 2, 0, 1 2x2x2"] = (3, on_mesh((2, 2, 2), [shard(2), shard(0), shard(1)]))
    return found


WORLDS = (1, 2, 3, 4, 8)
LAYOUTS = [(world, name) for world in WORLDS for name in layouts(world)]


@functools.cache
def held_by_ranks(world: int, layout: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Held, ...]:
    """Parts of all ranks; none where the layout does not apply to the shape."""
    dims, make = layouts(world)[layout]
    whole = torch.empty_strided(shape, stride, device="meta")
    if len(shape) < dims:
        return ()
    if layout == "interleaved -1" and shape[-1] % 2:
        return ()
    if layout == "interleaved 0" and shape[0] % 4:
        return ()
    if "ragged" in layout and math.prod(shape[: 2 if layout == "ragged" else 1]) % _units(world, layout):
        return ()
    return tuple(make(whole))


def _units(world: int, layout: str) -> int:
    if layout.startswith("shard"):
        return sum((2, 1, 0, 1)[: int(layout.rsplit("x", 1)[1])])
    return sum((3, 0, 2, 1, 4, 0, 1, 5)[:world])


# ------------------------------------------------------------------ states of the generator


def _state(seed: int, words: int, waiting: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if waiting:
        torch.empty(1).normal_(generator=generator)  # takes 4 words
        words -= 4
    torch.empty(words, dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


STATES: dict[str, Tensor] = {
    "fresh": _state(7, 0, False),
    "fresh, seed of 40 bits": _state((5 << 32) + 11, 0, False),
    "within a block": _state(1, 100, False),
    "at the end of a block": _state(2, 624, False),
    "with a normal waiting": _state(3, 300, True),
    "with a normal waiting, at the end of two blocks": _state(4, 1248, True),
}


# ------------------------------------------------------------------ one combination


@functools.lru_cache(maxsize=64)
def _one_device(operator: str, dtype: torch.dtype, whole: str, state: str) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """What one device draws, the state that it leaves, and the parameters that were used."""
    what = OPERATORS[operator]
    out = empty(whole, dtype)
    makers = torch.Generator().manual_seed(len(operator))
    args = tuple(_parameter(a, out, makers) for a in what.args)
    before = torch.get_rng_state()
    try:
        torch.set_rng_state(STATES[state])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*out of bounds.*precision.*")
            out = what.whole(out, *args)
        return out, torch.get_rng_state(), args
    finally:
        torch.set_rng_state(before)


def _parameter(value: Any, like: Tensor, generator: torch.Generator) -> Any:
    if isinstance(value, torch.dtype):
        return torch.rand(like.shape, dtype=value, generator=generator)
    if value is torch.dtype:
        made = torch.empty_like(like)
        made.copy_(torch.rand(like.shape, dtype=torch.float64, generator=generator))
        return made
    return value


def raw(tensor: Tensor) -> Tensor:
    """Bytes of a tensor, in logical order."""
    return tensor.new_empty(tensor.numel()).copy_(tensor.flatten()).view(torch.uint8)


def check(operator: str, dtype: torch.dtype, whole: str, world: int, layout: str, state: str) -> bool:
    """Compare all ranks with one device.

    Returns:
        Whether the combination exists: not every layout applies to every tensor.
    """
    expected, after, args = _one_device(operator, dtype, whole, state)
    ranks = held_by_ranks(world, layout, tuple(expected.shape), expected.stride())
    for rank, held in enumerate(ranks):
        where = (operator, dtype, whole, world, layout, state, rank)
        generator = torch.Generator()
        generator.set_state(STATES[state])
        local = torch.empty(held.part.local_shape, dtype=dtype)
        if rank % 2 and held.part.windows is not None:  # local tensors of other strides than the usual
            local = torch.empty(held.part.local_shape[::-1], dtype=dtype).permute(list(reversed(range(local.dim()))))
        given = tuple(held.cut(a) if isinstance(a, Tensor) else a for a in args)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*out of bounds.*precision.*")
            kwargs = {**dict(OPERATORS[operator].kwargs), "generator": generator}
            fill(OPERATORS[operator].op, local, held.part, given, kwargs)
        mine = held.cut(expected)
        assert local.shape == mine.shape, where
        assert torch.equal(raw(local), raw(mine)), where
        assert torch.equal(generator.get_state(), after), where
    return bool(ranks)


# ------------------------------------------------------------------ which combinations


def sampled(operator: str, per_tensor: int = 5) -> Iterator[tuple[Any, ...]]:
    """All dtypes and whole tensors of an operator, each with the layouts and states that came up least so far."""
    pairs = list(LAYOUTS)
    random.Random(operator).shuffle(pairs)
    used = dict.fromkeys(pairs, 0)
    states = itertools.cycle([*STATES, *reversed(STATES)])
    for dtype, whole in itertools.product(OPERATORS[operator].dtypes, WHOLES):
        shape = tuple(empty(whole, dtype).shape)
        apply = (pair for pair in sorted(pairs, key=used.__getitem__) if layouts_apply(*pair, shape))
        for pair in itertools.islice(apply, per_tensor):
            used[pair] += 1
            yield operator, dtype, whole, *pair, next(states)


def layouts_apply(world: int, layout: str, shape: tuple[int, ...]) -> bool:
    """Tell whether a layout applies to a shape."""
    return bool(held_by_ranks(world, layout, shape, torch.empty(shape, device="meta").stride()))


CORE: dict[str, torch.dtype] = {
    "rand": torch.float32,
    "uniform_ of bounds": torch.float64,
    "randn": torch.float32,
    "normal_": torch.bfloat16,
    "randn_like": torch.float64,
    "bernoulli_ of floats": torch.float32,
    "dropout": torch.float32,
    "log_normal_": torch.float64,
    "random_ to 2^28": torch.int64,
}
"""An operator and a dtype for every law of the stream."""
CORE_WHOLES = ("0-d", "1", "15", "16", "17", "7x3", "24x8", "3x5x7", "transposed", "channels_last", "columns")
CORE_STATES = tuple(STATES)[2:5]


def crossed(operator: str) -> Iterator[tuple[Any, ...]]:
    """Everything with everything, for the core of the table."""
    for whole, (world, layout), state in itertools.product(CORE_WHOLES, LAYOUTS, CORE_STATES):
        yield operator, CORE[operator], whole, world, layout, state


def run(cases: Iterator[tuple[Any, ...]]) -> int:
    """Check combinations; return how many of them exist."""
    return sum(check(*case) for case in cases)


def large() -> int:
    """Everything large with the core of the table."""
    ran = 0
    for operator, dtype in (*CORE.items(), ("exponential_", torch.float32), ("cauchy_", torch.float32)):
        for whole, (world, layout) in itertools.product(LARGE, ((2, "shard 0"), (3, "shard 1"), (4, "slices"))):
            ran += check(operator, dtype, whole, world, layout, "with a normal waiting")
    return ran


# ------------------------------------------------------------------ as a script


def main() -> None:
    """Check the sampled table of every core operator, and large tensors."""
    ran = large() + sum(run(case for case in sampled(operator, 1) if case[1] == CORE[operator]) for operator in CORE)
    summary = {
        "ran": ran,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "normals": raw(torch.randn(5000, generator=torch.Generator().manual_seed(0))).sum().item(),
    }
    sys.stdout.write(json.dumps(summary))


if __name__ == "__main__":
    main()
