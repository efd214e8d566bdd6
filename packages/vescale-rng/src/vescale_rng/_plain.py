"""Random tensors for people without a DTensor: tell which elements you hold, get what one device would have there.

Every function takes the shape of the whole tensor and a part of it, and returns the local tensor. All ranks must call
it, also those that hold nothing: the generators move together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._choose import PartLike, check_local, choose_part
from ._cuda.generator import EmulatedGenerator
from ._cuda.laws import dropout_scale
from ._draw.fill import take
from ._draw.keep import keep
from ._draw.prepared import fill_again
from ._draw.who import who_draws
from ._draw.whole import run_whole

__all__ = [
    "bernoulli",
    "binomial",
    "cauchy",
    "draw",
    "dropout",
    "dropout_mask",
    "exponential",
    "fill_",
    "geometric",
    "log_normal",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "randint",
    "randn",
    "randperm",
    "uniform",
]


def draw(
    op: str,
    shape: Sequence[int],
    *args: Any,
    part: PartLike = None,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    device: Any = None,
    generator: Any = None,
) -> Tensor:
    """Draw this rank's elements of a random tensor.

    Args:
        op: aten base name of a closed-form operator: "rand", "randn", "randint", "exponential_", ...
        shape: of the whole tensor.
        *args: parameters of the distribution, as torch's operator takes them; tensors among them are local parts.
        part: which elements: a tuple with a slice per dim (or a list of slices per dim: the local tensor holds them one
            after the other), a `range` over the flattened tensor, a `Part`, or None for all of it.
        mesh: in place of `part`: a `DeviceMesh`.
        placements: with `mesh`: one placement per mesh axis (`Replicate`, `Shard`, ...; no `Partial`).
        stride: strides of the whole tensor on one device, in elements; contiguous by default. They decide the order of
            the draws.
        dtype: of the result; torch's default dtype by default (int64 for "randint", for "normal" that of the first
            tensor among `args`).
        device: of the result; torch's default device, or that of `mesh`, by default.
        generator: a `torch.Generator`, or what `portable` or `emulate_cuda` gave; the default generator by default.

    Returns:
        The local tensor: contiguous, of the shape of the part.

    Raises:
        LayoutError: for a part that does not fit the shape, or a pending sum among the placements.
        UnsupportedRandomOperatorError: for an operator without a closed form.
        TypeError: for arguments that the operator does not take, or a generator that is none.

    >>> g = torch.Generator().manual_seed(0)
    >>> whole = torch.randn(6, 4, generator=g)
    >>> mine = draw("randn", (6, 4), part=(slice(2, 4), slice(0, 3)), generator=g.manual_seed(0))
    >>> torch.equal(mine, whole[2:4, 0:3])
    True
    """
    held = choose_part(shape, part, mesh, placements, stride)
    if dtype is None:
        dtype = _dtype(op, args)
    if device is None and mesh is not None:
        device = mesh.device_type
    local = torch.empty(held.local_shape, dtype=dtype, device=device)
    fill_again(op, local, held, args, {} if generator is None else {"generator": generator})
    return local


def _dtype(op: str, args: tuple[Any, ...]) -> torch.dtype:
    if op.startswith("randint"):
        return torch.int64
    tensors = [a for a in args if isinstance(a, Tensor)] if op == "normal" else []
    return tensors[0].dtype if tensors else torch.get_default_dtype()


def fill_(
    op: str,
    local: Tensor,
    shape: Sequence[int],
    *args: Any,
    part: PartLike = None,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
    generator: Any = None,
) -> Tensor:
    """Fill a local tensor in place with this rank's elements of a draw; the arguments are those of `draw`.

    Args:
        op: as for `draw`.
        local: overwritten, of any strides; without gradients.
        shape: of the whole tensor.
        *args: as for `draw`.
        part: as for `draw`.
        mesh: as for `draw`.
        placements: as for `draw`.
        stride: as for `draw`.
        generator: as for `draw`.

    Returns:
        `local`.

    Raises:
        ValueError: if gradients are recorded and `local` needs them.

    >>> g = torch.Generator().manual_seed(3)
    >>> row = fill_("uniform_", torch.empty(4), (3, 4), -1.0, 1.0, part=range(4, 8), generator=g)
    >>> torch.equal(row, torch.empty(3, 4).uniform_(-1, 1, generator=g.manual_seed(3))[1])
    True
    """
    check_local(local)
    held = choose_part(shape, part, mesh, placements, stride)
    if local.requires_grad and torch.is_grad_enabled():
        raise ValueError("local: needs gradients; fill `local.detach()`, or call within torch.no_grad()")
    fill_again(op, local, held, args, {} if generator is None else {"generator": generator})
    return local


# ------------------------------------------------------------------ by name

_WHERE = ("part", "mesh", "placements", "stride", "dtype", "device", "generator")


def _draw(name: str, op: str, shape: Sequence[int], *args: Any, where: dict[str, Any]) -> Tensor:
    """`draw` for a function of another name, which is to stand in its errors."""
    _check_names(name, where, _WHERE)
    return draw(op, shape, *args, **where)


def _check_names(name: str, where: dict[str, Any], known: tuple[str, ...]) -> None:
    for given in where:
        if given not in known:
            raise TypeError(f"{name}() got an unexpected keyword argument {given!r}; it takes {', '.join(known)}")


def rand(shape: Sequence[int], **where: Any) -> Tensor:
    """Draw from [0, 1), as `torch.rand(shape)`; keyword arguments as for `draw`."""
    return _draw("rand", "rand", shape, where=where)


def randn(shape: Sequence[int], **where: Any) -> Tensor:
    """Draw standard normal numbers, as `torch.randn(shape)`; keyword arguments as for `draw`."""
    return _draw("randn", "randn", shape, where=where)


def randint(low: int, high: int, shape: Sequence[int], **where: Any) -> Tensor:
    """Draw integers from [low, high), as `torch.randint(low, high, shape)`; keyword arguments as for `draw`."""
    return _draw("randint", "randint", shape, low, high, where=where)


def uniform(shape: Sequence[int], low: float = 0.0, high: float = 1.0, **where: Any) -> Tensor:
    """Draw from [low, high), as `Tensor.uniform_`; keyword arguments as for `draw`."""
    return _draw("uniform", "uniform_", shape, low, high, where=where)


def normal(shape: Sequence[int], mean: Any = 0.0, std: Any = 1.0, **where: Any) -> Tensor:
    """Draw normal numbers, as `torch.normal`; `mean` and `std` may be local parts; keyword arguments as for `draw`."""
    return _draw("normal", "normal", shape, mean, std, where=where)


def bernoulli(shape: Sequence[int], p: Any = 0.5, **where: Any) -> Tensor:
    """Draw ones with chance `p` (a number or a local part), as `Tensor.bernoulli_`; keyword arguments as for `draw`."""
    return _draw("bernoulli", "bernoulli_", shape, p, where=where)


def exponential(shape: Sequence[int], lambd: float = 1.0, **where: Any) -> Tensor:
    """Draw from the exponential distribution, as `Tensor.exponential_`; keyword arguments as for `draw`."""
    return _draw("exponential", "exponential_", shape, lambd, where=where)


def cauchy(shape: Sequence[int], median: float = 0.0, sigma: float = 1.0, **where: Any) -> Tensor:
    """Draw from the Cauchy distribution, as `Tensor.cauchy_`; keyword arguments as for `draw`."""
    return _draw("cauchy", "cauchy_", shape, median, sigma, where=where)


def log_normal(shape: Sequence[int], mean: float = 1.0, std: float = 2.0, **where: Any) -> Tensor:
    """Draw log-normal numbers, as `Tensor.log_normal_`; keyword arguments as for `draw`."""
    return _draw("log_normal", "log_normal_", shape, mean, std, where=where)


def geometric(shape: Sequence[int], p: float, **where: Any) -> Tensor:
    """Draw from the geometric distribution, as `Tensor.geometric_`; keyword arguments as for `draw`."""
    return _draw("geometric", "geometric_", shape, p, where=where)


# ------------------------------------------------------------------ dropout


def dropout_mask(shape: Sequence[int], p: float = 0.5, **where: Any) -> Tensor:
    """Draw the keep mask of a dropout: ones with chance `1 - p`, else zeros; keyword arguments as for `draw`."""
    return _draw("dropout_mask", "dropout", shape, p, where=where)


def dropout(
    local: Tensor,
    shape: Sequence[int],
    p: float = 0.5,
    training: bool = True,
    *,
    part: PartLike = None,
    mesh: Any = None,
    placements: Sequence[Any] | None = None,
    stride: Sequence[int] | None = None,
    generator: Any = None,
) -> Tensor:
    """Drop elements of a sharded activation as `torch.nn.functional.dropout` would those of the whole; differentiable.

    On CUDA the mask is that of torch's fused dropout kernel.

    Args:
        local: local part.
        shape: of the whole tensor.
        p: chance of a zero.
        training: without it, `local` is returned.
        part: as for `draw`.
        mesh: as for `draw`.
        placements: as for `draw`.
        stride: as for `draw`.
        generator: as for `draw`.

    Raises:
        ValueError: unless 0 <= p <= 1.

    >>> x = torch.arange(12.0).view(3, 4)
    >>> _ = torch.manual_seed(0)
    >>> mine = dropout(x[:, :2], (3, 4), 0.5, part=(slice(0, 3), slice(0, 2)))
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(mine, torch.nn.functional.dropout(x, 0.5)[:, :2])
    True
    """
    check_local(local)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p = {p}: a dropout probability lies between 0 and 1")
    held = choose_part(shape, part, mesh, placements, stride)
    if p == 0.0 or not training or not held.numel:
        return local
    if p == 1.0:
        return local * local.new_zeros(())
    noise = torch.empty_like(local, requires_grad=False)
    fill_again("dropout", noise, held, (p,), {} if generator is None else {"generator": generator})
    if local.device.type == "cpu" and not _emulated(generator):
        return local * noise.div_(1 - p)
    return local * noise * dropout_scale(p, local.dtype)  # the products of the fused kernel


def _emulated(generator: Any) -> bool:
    return isinstance(who_draws(generator), EmulatedGenerator)


# ------------------------------------------------------------------ drawn whole


def _whole(op: str, args: tuple[Any, ...], generator: Any, where: dict[str, Any], **options: Any) -> Tensor:
    _check_names(op, where, ("part", "mesh", "placements", "stride", "generator", *options))
    first = args[0]
    go_back = keep(first.device if isinstance(first, Tensor) else torch.device(options["device"]), generator)
    if generator is not None:
        options["generator"] = generator
    try:
        result = run_whole(op, args, options)
        held = choose_part(result.shape, **{"part": None, **where})
        local = result.new_empty(held.local_shape)
        take(result, local, held)
    except BaseException:  # only the result tells whether the part fits
        go_back()
        raise
    return local


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, device: Any = None, generator: Any = None, **where: Any
) -> Tensor:
    """Return a part of `torch.randperm(n)`, which is drawn whole; keyword arguments as for `draw`."""
    if device is None:
        mesh = where.get("mesh")
        device = torch.get_default_device() if mesh is None else mesh.device_type
    return _whole("randperm", (n,), generator, where, dtype=dtype, device=device)


def poisson(rates: Tensor, *, generator: Any = None, **where: Any) -> Tensor:
    """Return a part of `torch.poisson(rates)`; `rates` is the whole tensor, since its values decide the stream."""
    return _whole("poisson", (rates,), generator, where)


def binomial(count: Tensor, prob: Tensor, *, generator: Any = None, **where: Any) -> Tensor:
    """Return a part of `torch.binomial(count, prob)`; both are whole tensors, since their values decide the stream."""
    return _whole("binomial", (count, prob), generator, where)


def multinomial(
    probs: Tensor, num_samples: int, replacement: bool = False, *, generator: Any = None, **where: Any
) -> Tensor:
    """Return a part of `torch.multinomial(probs, num_samples, replacement)`; `probs` is the whole tensor."""
    return _whole("multinomial", (probs, num_samples, replacement), generator, where)
