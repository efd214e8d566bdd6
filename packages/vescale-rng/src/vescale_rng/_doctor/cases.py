"""What the doctor tries, as tables: operators filled part by part, calls as users write them, and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import laws
from .laws import Law

__all__ = ["CALLS", "FILLS", "LAYOUTS", "Call", "Fill", "Layout"]

_REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_COMPLEX = (torch.complex64, torch.complex128)
_INT = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDE = (torch.int64, torch.int32, torch.float64)
_FLOAT = (torch.float32,)


@dataclass(frozen=True, slots=True)
class Layout:
    """A whole tensor, and how its elements go to three ranks."""

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    """None: contiguous."""
    dim: int
    """Dim that is sharded, into uneven pieces; the last one may be empty."""


LAYOUTS = (
    Layout((37,), None, 0),
    Layout((16,), None, 0),
    Layout((5,), None, 0),
    Layout((0,), None, 0),
    Layout((6, 23), None, 1),
    Layout((7, 4, 6), (24, 1, 4), 0),  # rows transposed
    Layout((2, 3, 4, 5), (60, 1, 15, 3), 1),  # channels last
    Layout((9, 8), (16, 2), 1),  # every other column of a wider tensor
)


@dataclass(frozen=True, slots=True)
class Fill:
    """An operator of closed form: its parts, filled one by one, must be slices of what torch draws whole."""

    name: str
    op: str
    """Name that `fill` takes."""
    dtypes: tuple[torch.dtype, ...]
    run: Callable[[Tensor, tuple[Any, ...]], Tensor]
    """Draw with the default generator as one device would, into a tensor or into a new one like it."""
    law: Law
    args: tuple[Any, ...] = ()
    tensors: tuple[torch.dtype | None, ...] = ()
    """Dtypes of arguments that are tensors of the shape of the result, None for that of the result."""
    strided: bool = True
    """False for what always makes a contiguous tensor."""


def _into(op: str) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    return lambda out, args: getattr(out, op)(*args)


def _factory(function: Callable[..., Tensor]) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    return lambda out, args: function(*args, out.shape, dtype=out.dtype, device=out.device)


def _like(function: Callable[..., Tensor]) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    return lambda out, args: function(out, *args)


def _mask(out: Tensor, args: tuple[Any, ...]) -> Tensor:
    """The keep mask of F.dropout: bernoulli_ on the CPU, a kernel of its own on CUDA."""
    if out.device.type == "cpu":
        return out.bernoulli_(1 - args[0])
    return torch.native_dropout(torch.ones_like(out), args[0], True)[1].to(out.dtype)


def _around(out: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.normal(*args)


FILLS = (
    Fill("rand", "rand", _REAL + _COMPLEX, _factory(torch.rand), laws.per_width, strided=False),
    Fill("randn", "randn", _REAL + _COMPLEX, _factory(torch.randn), laws.normal, strided=False),
    Fill("rand_like", "rand_like", _REAL, _like(torch.rand_like), laws.per_width),
    Fill("randn_like", "randn_like", _REAL, _like(torch.randn_like), laws.normal),
    Fill("uniform_(-3, 5)", "uniform_", _REAL, _into("uniform_"), laws.per_width, (-3.0, 5.0)),
    Fill("normal_(1, 0.02)", "normal_", _REAL, _into("normal_"), laws.normal, (1.0, 0.02)),
    Fill("normal(tensor, tensor)", "normal", _REAL[:2], _around, laws.normal, tensors=(None, None), strided=False),
    Fill("bernoulli_(0.3)", "bernoulli_", _REAL + _INT + (torch.bool,), _into("bernoulli_"), laws.fixed(2), (0.3,)),
    Fill("bernoulli_(float32 tensor)", "bernoulli_", _REAL, _into("bernoulli_"), laws.fixed(1),
         tensors=(torch.float32,)),
    Fill("bernoulli_(float64 tensor)", "bernoulli_", _REAL, _into("bernoulli_"), laws.fixed(2),
         tensors=(torch.float64,)),
    Fill("dropout mask", "dropout", _REAL, _mask, laws.fixed(2), (0.3,)),
    Fill("randint(-3, 100)", "randint", _INT[:4] + _REAL, _factory(torch.randint), laws.fixed(1), (-3, 100),
         strided=False),
    Fill("randint(0, 200)", "randint", _INT[4:], _factory(torch.randint), laws.fixed(1), (0, 200), strided=False),
    Fill("random_()", "random_", _INT + _REAL + (torch.bool,), _into("random_"), laws.integers),
    Fill("random_(0, 2**28 - 1)", "random_", _WIDE, _into("random_"), laws.fixed(1), (0, 2**28 - 1)),
    Fill("random_(0, 2**28)", "random_", _WIDE, _into("random_"), laws.fixed(2), (0, 2**28)),
    Fill("random_(0, 2**28), rounded", "random_", _FLOAT, _into("random_"), laws.fixed(1), (0, 2**28)),
    Fill("random_(-2**63, None)", "random_", _INT[:1], _into("random_"), laws.fixed(2), (-(2**63), None)),
    Fill("exponential_(1.5)", "exponential_", _REAL, _into("exponential_"), laws.fixed(2), (1.5,)),
    Fill("cauchy_(1, 2)", "cauchy_", _REAL, _into("cauchy_"), laws.fixed(2), (1.0, 2.0)),
    Fill("geometric_(0.3)", "geometric_", _REAL + _INT, _into("geometric_"), laws.fixed(2), (0.3,)),
    Fill("log_normal_(1, 2)", "log_normal_", _REAL, _into("log_normal_"), laws.paired),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A call as users write it, on the CPU, with the words that it takes from the default generator."""

    name: str
    run: Callable[[], Any]
    words: int | None
    """None where they depend on the numbers drawn."""
    verdict: Literal["closed form", "drawn whole", "ok"]
    mask: tuple[int, ...] | None = None
    """Shape of the bernoulli_(0.7) draw that decides which of the ones in the input survive."""
    kernels: tuple[str, ...] = ()
    """The only random kernels that it may run, each on the whole tensor."""


_IMAGES, _LINES, _VOLUMES = (4, 20, 30, 30), (4, 20, 900), (4, 20, 9, 10, 10)
_N, _CHANNELS = math.prod(_IMAGES), 4 * 20


def _ones(shape: tuple[int, ...]) -> Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _chances(*shape: int) -> Tensor:
    return torch.linspace(0.1, 0.9, math.prod(shape), dtype=torch.float32, device="cpu").view(shape)


def _drop(function: Callable[..., Any], shape: tuple[int, ...], p: float = 0.3) -> Callable[[], Any]:
    return lambda: function(_ones(shape), p, True)


def _native_dropout() -> Tensor:
    """The mask if the values are the input times the scaled mask, rounded in that order; nothing is kept else."""
    x = _chances(*_IMAGES).to(torch.float16)
    out, mask = torch.native_dropout(x, 0.3, True)
    expected = mask.to(torch.float16).mul_(1 / (1 - 0.3)).mul_(x)
    return mask * float(torch.equal(out, expected))


def _attention() -> Tensor:
    """Attention whose output shows the dropped weights: equal scores, and the unit matrix as values."""
    zeros = torch.zeros_like(_ones((2, 3, 16, 16)))
    eye = torch.eye(16, dtype=torch.float32, device="cpu").expand(2, 3, 16, 16)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(zeros, zeros, eye, dropout_p=0.3)


def _init(function: Callable[..., Any], *args: float) -> Callable[[], Tensor]:
    return lambda: function(_empty(150, 230), *args)


def _iterate() -> None:
    iter(DataLoader(list(range(4))))  # type: ignore[arg-type]


def _linear() -> Tensor:
    return nn.Linear(300, 200, device="cpu", dtype=torch.float32).weight.detach()


def _rrelu() -> Tensor:
    return F.rrelu(_chances(200, 200) - 0.5, training=True)


_W = 150 * 230
_NORMAL_W = laws.normal(_W, torch.float32, True, False)[0]

CALLS = (
    Call("F.dropout", _drop(F.dropout, _IMAGES), 2 * _N, "closed form", mask=_IMAGES),
    Call("F.dropout, p = 0", _drop(F.dropout, _IMAGES, 0.0), 0, "closed form"),
    Call("F.dropout, p = 1", _drop(F.dropout, _IMAGES, 1.0), 0, "closed form"),
    Call("F.alpha_dropout", _drop(F.alpha_dropout, _IMAGES), 2 * _N, "closed form", mask=_IMAGES),
    Call("native_dropout", _native_dropout, 2 * _N, "closed form", mask=_IMAGES),
    Call("native_dropout, p = 0", _drop(torch.native_dropout, _IMAGES, 0.0), 2 * _N, "closed form"),
    Call("native_dropout, p = 1", _drop(torch.native_dropout, _IMAGES, 1.0), 2 * _N, "closed form"),
    Call("F.dropout1d", _drop(F.dropout1d, _LINES), 2 * _CHANNELS, "closed form", mask=(4, 20, 1)),
    Call("F.dropout2d", _drop(F.dropout2d, _IMAGES), 2 * _CHANNELS, "closed form", mask=(4, 20, 1, 1)),
    Call("F.dropout3d", _drop(F.dropout3d, _VOLUMES), 2 * _CHANNELS, "closed form", mask=(4, 20, 1, 1, 1)),
    Call("F.feature_alpha_dropout", _drop(F.feature_alpha_dropout, _IMAGES), 2 * _CHANNELS, "closed form",
         mask=(4, 20, 1, 1)),
    Call("scaled_dot_product_attention(dropout_p)", _attention, 2 * 2 * 3 * 16 * 16, "closed form",
         mask=(2, 3, 16, 16)),
    Call("F.gumbel_softmax", lambda: F.gumbel_softmax(_ones((200, 300))), 2 * 60_000, "closed form",
         kernels=("exponential_",)),
    Call("kaiming_uniform_", _init(nn.init.kaiming_uniform_), _W, "closed form", kernels=("uniform_",)),
    Call("xavier_uniform_", _init(nn.init.xavier_uniform_), _W, "closed form", kernels=("uniform_",)),
    Call("kaiming_normal_", _init(nn.init.kaiming_normal_), _NORMAL_W, "closed form", kernels=("normal_",)),
    Call("xavier_normal_", _init(nn.init.xavier_normal_), _NORMAL_W, "closed form", kernels=("normal_",)),
    Call("trunc_normal_", _init(nn.init.trunc_normal_), None, "closed form", kernels=("normal_", "uniform_")),
    # So far out in the tail that its other branch is taken.
    Call("trunc_normal_(0, 1, 1.5, 3)", _init(nn.init.trunc_normal_, 0.0, 1.0, 1.5, 3.0), None, "closed form",
         kernels=("normal_", "uniform_")),
    Call("nn.Linear(300, 200)", _linear, 300 * 200 + 200, "closed form"),
    Call("orthogonal_", lambda: nn.init.orthogonal_(_empty(40, 30)), 1200, "drawn whole"),
    Call("sparse_", lambda: nn.init.sparse_(_empty(40, 30), 0.1), 30 * 39 + 1200, "drawn whole"),
    Call("poisson, rate 0", lambda: torch.poisson(_chances(500) * 0), 0, "drawn whole"),
    Call("poisson", lambda: torch.poisson(_chances(200, 200) * 30), None, "drawn whole"),
    Call("binomial", lambda: torch.binomial(_ones((200, 200)) * 20, _chances(200, 200)), None, "drawn whole"),
    Call("_standard_gamma", lambda: torch._standard_gamma(_chances(200, 200)), None, "drawn whole"),
    Call("_sample_dirichlet", lambda: torch._sample_dirichlet(_chances(200, 20)), None, "drawn whole"),
    Call("multinomial", lambda: torch.multinomial(_chances(100, 50), 10), 2 * 100 * 50, "drawn whole"),
    Call("multinomial, one sample", lambda: torch.multinomial(_chances(100, 50), 1, replacement=True), 2 * 100 * 50,
         "drawn whole"),
    Call("multinomial with replacement", lambda: torch.multinomial(_chances(100, 50), 10, replacement=True),
         2 * 100 * 10, "drawn whole"),
    Call("randperm", lambda: torch.randperm(1001, device="cpu"), 1000, "drawn whole"),
    Call("rrelu", _rrelu, 2 * 20_000, "drawn whole"),
    Call("fractional_max_pool2d", lambda: F.fractional_max_pool2d(_chances(2, 3, 12, 12), 2, output_size=5), 2 * 2 * 3,
         "drawn whole"),
    Call("an iterator of DataLoader", _iterate, 2, "ok"),
)  # fmt: skip
