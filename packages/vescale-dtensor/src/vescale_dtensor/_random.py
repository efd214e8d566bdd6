"""Random numbers for sharded tensors: how the local part of a global draw is filled.

`fill` is the one place where numbers are drawn. In this order:

* mode ``"whole"``: every rank draws the whole tensor with the generator that one device would use,
  and keeps its part. The numbers are those of one device, at the cost of one device.
* a plugin (`vescale_random`: vescale-rng is one) draws the local part of that stream, at the cost of the part.
* otherwise every shard has a stream of its own: reproducible, different per shard, the same on
  replicas, and *not* the numbers of one device.

In each case all ranks advance the generator alike, so ranks that start with one seed stay in step.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from . import _hooks
from ._bytes import bytes_of
from ._irregular import is_cut
from ._mesh import MeshInfo
from ._order import agreed_stride, ranks_may_differ
from ._pieces import read, write
from ._spec import Spec, contiguous_stride
from ._tap import slot
from .errors import DTensorError, UnsupportedOperationError
from .placements import P

if TYPE_CHECKING:
    from .hookspecs import RandomProvider

__all__ = ["RandomMode", "fill", "random_mode", "set_random_mode"]

RandomMode = Literal["shard", "whole"]

_M32, _M64 = (1 << 32) - 1, (1 << 64) - 1
_NOTHING: dict[str, Any] = {}
_run = torch._C._disabled_torch_function_impl


class _Box(NamedTuple):
    offset: tuple[int, ...]
    """First element of the box in the whole tensor."""
    shape: tuple[int, ...]
    """Number of elements per dim."""


class _State:
    """Process-wide, not per thread: a checkpointed forward is recomputed by autograd's threads."""

    def __init__(self) -> None:
        self.mode: RandomMode = "shard"
        self.provider: RandomProvider | None = None
        self.asked = False
        self.scopes: dict[str, str] = {}
        self.token = object()
        """Marks what was prepared by the present provider."""


state = _State()
_agreed: weakref.WeakSet[MeshInfo] = weakref.WeakSet()


def set_random_mode(mode: RandomMode) -> None:
    """Say which numbers random operators on DTensors draw.

    Args:
        mode: ``"shard"`` (default): as the installed plugin draws, else one stream per shard.
            ``"whole"``: every rank draws the whole tensor and keeps its part, so that the numbers
            are bit for bit those of one device, at the time and memory of one device.
    """
    if mode not in get_args(RandomMode):
        raise ValueError(f'mode = {mode!r}: expected "shard" or "whole"')
    state.mode = mode


@contextlib.contextmanager
def random_mode(mode: RandomMode) -> Iterator[None]:
    """`set_random_mode` within a ``with`` block.

    A checkpointed forward is recomputed in the backward pass: keep the backward inside the block too.
    """
    before = state.mode
    set_random_mode(mode)
    try:
        yield
    finally:
        state.mode = before


def provider() -> RandomProvider | None:
    """The plugin's object that draws, asked for once."""
    if not state.asked:
        use_provider(_hooks.random_provider())
    return state.provider


def use_provider(new: RandomProvider | None) -> None:
    """Draw with `new` from now on, None for one stream per shard, whatever plugins are installed."""
    state.provider, state.asked = new, True
    state.scopes.clear()
    state.token = object()


def forget_provider() -> None:
    """Ask the plugins anew at the next draw."""
    use_provider(None)
    state.asked = False


# ------------------------------------------------------------------ filling


def fill(
    op: str,
    local: Tensor,
    spec: Spec,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    contiguous: bool = False,
) -> Tensor:
    """Fill the local part of a tensor with this rank's elements of a global draw, in place.

    Every rank of the mesh calls it, also where its part is empty, because the generator moves.

    Args:
        op: aten base name of the operator that one device would run: ``rand``, ``randn``, ``randint``,
            ``uniform_``, ``normal_``, ``bernoulli_``, ... and their ``_like`` forms; ``dropout`` asks for
            the keep mask, with ``args == (p,)``.
        local: plain tensor of `spec.local_shape`, overwritten; without gradients. On the meta device nothing is drawn.
        spec: where the elements stand. Along a pending sum the first rank gets the draw, the others zeros.
        args: parameters of the distribution; tensors among them are local parts of the same shape.
        kwargs: named ones, and `generator`.
        contiguous: say that one device would lay out the whole in the usual order, whatever `local` tells.

    Returns:
        `local`.
    """
    if slot.active and slot.recorder is not None:
        slot.recorder.atomic(fill, (op, local, spec, args, kwargs or {}), {"contiguous": contiguous}, writes=True)
        return local
    return _run(_fill, (), (op, local, spec, args, kwargs or {}, contiguous), {})  # type: ignore[no-any-return]


def _fill(
    op: str, local: Tensor, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any], contiguous: bool = False
) -> Tensor:
    if state.mode == "shard":
        prepared = spec.cache.get((op, local.dtype, local.device, local.stride()))
        if prepared is not None and prepared[0] is state.token:
            prepared[1](local, args, kwargs)
            return local
    if local.device.type == "meta":
        return local
    generator = kwargs.get("generator") or default_generator(local.device)
    if spec.mesh not in _agreed:
        check_agreement(spec.mesh, generator)
    if state.mode == "whole":
        _fill_whole(op, local, spec, args, kwargs, contiguous)
    elif provider() is not None:
        _fill_by_provider(op, local, spec, args, kwargs, contiguous)
    else:
        own = shard_generator(spec, generator, local.device)
        apply(op, local, args, {**kwargs, "generator": own})
    if P in spec.types and any(t == P and c for t, c in zip(spec.types, spec.mesh.coordinate, strict=True)):
        local.zero_()
    return local


def keep_mask(noise: Tensor, spec: Spec, p: float) -> Tensor:
    """`fill("dropout", noise, spec, (p,))` with dispatch off, by the shortest way."""
    if slot.active and slot.recorder is not None:
        slot.recorder.atomic(keep_mask, (noise, spec, p), {}, writes=True)
        return noise
    if state.mode == "shard":
        device = noise.device
        prepared = spec.cache.get(("dropout", noise.dtype, device, noise.stride()))
        if prepared is not None and prepared[0] is state.token:
            prepared[1](noise, (p,), _NOTHING)
            return noise
        plain = state.provider is None and state.asked and device.type != "meta"
        if plain and shard_generator in spec.cache and P not in spec.types:
            return noise.bernoulli_(1 - p, generator=shard_generator(spec, default_generator(device), device))
    return _fill("dropout", noise, spec, (p,), {})


def _fill_whole(
    op: str, local: Tensor, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any], contiguous: bool
) -> None:
    """Draw all of the tensor as one device would; tensor arguments stand among zeros, which draw as much."""
    stride = contiguous_stride(spec.shape) if contiguous else agreed_stride(spec, local.stride())
    if tuple(spec.local_shape) == tuple(spec.shape):
        apply(op, local, args, kwargs)
        return
    whole = torch.empty_strided(tuple(spec.shape), stride, dtype=local.dtype, device=local.device)
    args = tuple(_among_zeros(a, spec) if isinstance(a, Tensor) and a.ndim else a for a in args)
    apply(op, whole, args, kwargs)
    local.copy_(window(whole, spec))


def _among_zeros(part: Tensor, spec: Spec) -> Tensor:
    whole = part.new_zeros(tuple(spec.shape))
    write(whole, spec.pieces_of(spec.mesh.coordinate), part)
    return whole


def _fill_by_provider(
    op: str, local: Tensor, spec: Spec, args: tuple[Any, ...], kwargs: dict[str, Any], contiguous: bool
) -> None:
    asked = provider()
    assert asked is not None
    scope = state.scopes.get(op)
    if scope is None:
        scope = state.scopes[op] = asked.scope(op)
    shape = tuple(spec.shape)
    stride = contiguous_stride(shape) if contiguous else agreed_stride(spec, local.stride())
    if scope == "local":
        boxes: tuple[_Box, ...]
        if spec.irregular:
            boxes = tuple(_Box(*b) for b in spec.boxes_of(spec.mesh.coordinate))
        else:
            boxes = (_Box(spec.local_offset, spec.local_shape),)
        prepare = getattr(asked, "prepare", None)
        if prepare is not None and not spec.irregular and not ranks_may_differ(spec) and P not in spec.types:
            draw = prepare(op, local, shape, stride, boxes)
            spec.cache[op, local.dtype, local.device, local.stride()] = state.token, draw
            draw(local, args, kwargs)
            return
        target = local if local.is_contiguous() else torch.empty_like(local, memory_format=torch.contiguous_format)
        drawn = target
        if spec.irregular:  # of the shape of the one box, or the elements of several boxes in a row
            part = boxes[0].shape if len(boxes) == 1 else (-1,)
            drawn = target.view(part)
            args = tuple(a.reshape(part) if isinstance(a, Tensor) and a.ndim else a for a in args)
        asked.fill(op, drawn, shape, stride, boxes, args, kwargs)
        if target is not local:
            local.copy_(target)
        return
    if any(isinstance(a, Tensor) for a in args):
        raise UnsupportedOperationError(
            f"{op}: the random plugin can draw it only for the whole tensor, which needs its tensor arguments whole; "
            f"redistribute them to Replicate() first (the result is laid out as {spec!r})"
        )
    whole = local.new_empty(shape)
    asked.fill(op, whole, shape, stride, [_Box((0,) * spec.ndim, shape)], args, kwargs)
    local.copy_(window(whole, spec))


def window(whole: Tensor, spec: Spec) -> Tensor:
    """This rank's part of a whole tensor: a view where it is one block, else a copy."""
    if spec.irregular:
        return read(whole, spec.pieces_of(spec.mesh.coordinate))
    for dim in spec.sharded:
        whole = whole.narrow(dim, spec.local_offset[dim], spec.local_shape[dim])
    return whole


# ------------------------------------------------------------------ the operators, on plain tensors


def apply(op: str, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run operator `op` into a plain tensor."""
    special = _INTO.get(op)
    if special is not None:
        special(out, *args, **kwargs)
    elif op.endswith("_") and hasattr(Tensor, op):
        getattr(out, op)(*args, **kwargs)
    else:
        raise UnsupportedOperationError(
            f"{op} has no form that fills a sharded tensor; draw it on a plain tensor and distribute that"
        )


def _uniform(out: Tensor, generator: Any = None) -> None:
    out.uniform_(generator=generator)


def _normal(out: Tensor, generator: Any = None) -> None:
    out.normal_(generator=generator)


def _integers(out: Tensor, low: int, high: int | None = None, generator: Any = None) -> None:
    if high is None:
        low, high = 0, low
    out.random_(low, high, generator=generator)


def _keep(out: Tensor, p: float, generator: Any = None) -> None:
    out.bernoulli_(1 - p, generator=generator)


def _bernoulli(out: Tensor, p: Any, generator: Any = None) -> None:
    torch.bernoulli(p, generator=generator, out=out)


def _normal_around(out: Tensor, mean: Any, std: Any, generator: Any = None) -> None:
    torch.normal(mean, std, generator=generator, out=out)


_INTO: dict[str, Callable[..., None]] = {
    "rand": _uniform, "rand_like": _uniform, "randn": _normal, "randn_like": _normal, "randint": _integers,
    "randint_like": _integers, "dropout": _keep, "bernoulli": _bernoulli, "normal": _normal_around,
}  # fmt: skip


# ------------------------------------------------------------------ one stream per shard


def default_generator(device: torch.device) -> torch.Generator:
    """Generator that torch itself would use on `device`."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]  # type: ignore[no-any-return]


class _Streams(threading.local):
    """What each thread draws with: ranks may be threads."""

    def __init__(self) -> None:
        self.generators: dict[torch.device, torch.Generator] = {}
        self.seed = torch.empty((), dtype=torch.int64)


_streams = _Streams()


def shard_generator(spec: Spec, source: torch.Generator, device: torch.device) -> torch.Generator:
    """Generator of this rank's shard for one operator; advances `source` by the same amount on every rank."""
    index = spec.cache.get(shard_generator)
    if index is None:
        index = 0
        for axis, kind in enumerate(spec.types):
            if is_cut(kind):
                index = index * spec.mesh.sizes[axis] + spec.mesh.coordinate[axis]
        spec.cache[shard_generator] = index
    own = _streams.generators.get(device)
    if own is None:
        own = _streams.generators[device] = torch.Generator(device)
    return own.manual_seed(mix(draw_seed(source), index))


def draw_seed(source: torch.Generator) -> int:
    """Take 63 bits from a generator; on an accelerator without waiting for it."""
    if source.device.type == "cpu":
        return _streams.seed.random_(generator=source).item()  # type: ignore[return-value]
    offset = source.get_offset()
    source.set_offset(offset + 4)
    return (source.initial_seed() + 0x9E3779B97F4A7C15 * (offset + 1)) & (_M64 >> 1)


def mix(seed: int, index: int) -> int:
    """Seed of shard `index`.

    The CPU generator looks at 32 bits only. For one `seed` they are a bijection of the index, so
    that no two shards of one operator can share a stream.

    >>> len({mix(7, i) & 0xFFFFFFFF for i in range(10000)})
    10000
    """
    high = _scramble64(seed ^ (index * 0x9E3779B97F4A7C15 & _M64))
    low = (_scramble64(seed) + index * 0x9E3779B1) & _M32
    low = ((low ^ (low >> 16)) * 0x85EBCA6B) & _M32
    low = ((low ^ (low >> 13)) * 0xC2B2AE35) & _M32
    return ((high >> 33) << 32) | (low ^ (low >> 16))


def _scramble64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


# ------------------------------------------------------------------ ranks must be in step


def check_agreement(mesh: MeshInfo, generator: torch.Generator) -> None:
    """Raise unless the generator is in the same state on all ranks of a mesh; done once per mesh.

    Raises:
        DTensorError: replicas would draw different numbers.
    """
    _agreed.add(mesh)
    if mesh.size == 1 or dist.get_backend() == "fake":
        return
    mine = hash_state(generator)
    said = torch.empty(mesh.size, dtype=torch.int64, device=mesh.device_type)
    group = mesh.group(tuple(range(mesh.ndim)))
    parts = list(said.unbind(0))
    dist.all_gather(parts, torch.tensor(mine, dtype=torch.int64, device=mesh.device_type), group=group)
    states = [int(p) for p in parts]
    if len(set(states)) > 1:
        _agreed.discard(mesh)
        members = mesh.members(tuple(range(mesh.ndim)))
        odd = [c for c, s in zip(members, states, strict=True) if s != states[0]]
        raise DTensorError(
            f"the random generator of {generator.device} is not in the same state on all ranks of {mesh!r}: "
            f"the ranks at {odd[:8]} differ from the one at {members[0]}, so replicas would draw different numbers. "
            "Call torch.manual_seed(seed) with one seed on all ranks, and let no rank draw more than the others; "
            "for numbers that only one rank draws, use a torch.Generator of its own"
        )


def hash_state(generator: torch.Generator) -> int:
    """63 bits that stand for a generator's state."""
    import hashlib

    digest = hashlib.blake2b(bytes_of(generator.get_state()), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
