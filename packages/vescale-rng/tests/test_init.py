"""`init_`: the functions of `torch.nn.init`, and others, on part of a tensor; the oracle is the call on the whole."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.nn import init

import vescale_rng
from vescale_rng import DeviceProfile, EmulatedGenerator, PortableGenerator, emulate_cuda, init_, portable
from vescale_rng._streams.mt19937 import cached_normal
from vescale_rng.errors import LayoutError, RandomError
from vescale_testing import fake_ranks

FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "uniform_": (init.uniform_, {"a": -1.0, "b": 2.0}),
    "normal_": (init.normal_, {"mean": 0.5, "std": 0.02}),
    "trunc_normal_": (init.trunc_normal_, {"std": 0.9}),  # most numbers lie inside: normals until none is outside
    "trunc_normal_ of a tail": (init.trunc_normal_, {"a": 1.5, "b": 2.0}),  # few do: uniforms and a test of each
    "xavier_uniform_": (init.xavier_uniform_, {"gain": 0.7}),
    "xavier_normal_": (init.xavier_normal_, {}),
    "kaiming_uniform_": (init.kaiming_uniform_, {"a": math.sqrt(5)}),
    "kaiming_normal_": (init.kaiming_normal_, {"mode": "fan_out", "nonlinearity": "relu"}),
    "orthogonal_": (init.orthogonal_, {"gain": 2.0}),
    "sparse_": (init.sparse_, {"sparsity": 0.3}),
    "constant_": (init.constant_, {"val": 3.0}),
    "ones_": (init.ones_, {}),
    "zeros_": (init.zeros_, {}),
    "eye_": (init.eye_, {}),
    "dirac_": (init.dirac_, {}),
}
RANDOM = [name for name in FUNCTIONS if name not in ("constant_", "ones_", "zeros_", "eye_", "dirac_")]
SLICES: list[Any] = [
    (slice(0, 12), slice(0, 9)),
    (slice(4, 8), slice(0, 9)),
    (slice(0, 12), slice(6, 9)),
    (slice(11, 12), slice(0, 1)),
    (slice(12, 12), slice(0, 9)),
    ([slice(0, 2), slice(6, 8)], slice(3, 6)),
]


def cut(whole: Tensor, slices: Any) -> Tensor:
    for dim, chosen in enumerate(slices):
        pieces = chosen if isinstance(chosen, list) else [chosen]
        whole = torch.cat([whole.narrow(dim, s.start, s.stop - s.start) for s in pieces], dim)
    return whole


def shape_of(name: str) -> tuple[int, ...]:
    return (12, 9, 3) if name == "dirac_" else (12, 9)


def test_every_function_of_torch_is_here() -> None:
    known = {name.split(" ")[0] for name in FUNCTIONS}
    assert known == {name for name in dir(init) if name.endswith("_") and not name.startswith("_")}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_functions_of_torch(name: str, waiting: bool, dtype: torch.dtype) -> None:
    function, kwargs = FUNCTIONS[name]
    shape = shape_of(name)
    torch.manual_seed(3)
    if waiting:
        torch.randn(1)
    before = torch.get_rng_state()
    if name == "orthogonal_" and dtype == torch.bfloat16:  # torch has no qr in it
        for call in (function, lambda t, **k: init_(function, t, shape, **k)):
            with pytest.raises(RuntimeError, match="BFloat16"):
                call(torch.empty(shape, dtype=dtype), **kwargs)
        return
    whole = function(torch.empty(shape, dtype=dtype), **kwargs)
    after = torch.get_rng_state()
    for slices in SLICES:
        slices = (*slices, slice(0, 3))[: len(shape)]
        expected = cut(whole, slices)
        torch.set_rng_state(before)
        local = torch.empty(expected.shape, dtype=dtype)
        assert init_(function, local, shape, part=slices, **kwargs) is local
        assert torch.equal(local, expected)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", RANDOM)
def test_a_generator_of_the_user(name: str) -> None:
    """`sparse_` takes its permutations from the default generator even then: both end as on one device."""
    function, kwargs = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(6)
    torch.manual_seed(8)
    whole = function(torch.empty(12, 9), **kwargs, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    torch.manual_seed(8)
    generator.manual_seed(6)
    local = init_(function, torch.empty(4, 9), (12, 9), part=SLICES[1], generator=generator, **kwargs)
    assert torch.equal(local, whole[4:8])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


@pytest.mark.parametrize("name", ["normal_", "kaiming_uniform_", "trunc_normal_", "orthogonal_"])
def test_strides_of_the_whole(name: str) -> None:
    """A transposed parameter is drawn in the order of its memory."""
    function, kwargs = FUNCTIONS[name]
    torch.manual_seed(3)
    whole = function(torch.empty(9, 12).t(), **kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    local = init_(function, torch.empty(4, 9), (12, 9), part=SLICES[1], stride=(1, 12), **kwargs)
    assert torch.equal(local, whole[4:8])
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", RANDOM)
def test_ranks_of_a_mesh(name: str) -> None:
    function, kwargs = FUNCTIONS[name]
    torch.manual_seed(3)
    whole = function(torch.empty(13, 9), **kwargs)
    after = torch.get_rng_state()
    for rank in range(4):
        with fake_ranks(4, rank=rank):
            mesh = init_device_mesh("cpu", (2, 2))
            for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
                expected = whole
                for axis, placement in enumerate(placements):
                    if isinstance(placement, Shard):
                        expected = expected.chunk(2, placement.dim)[mesh.get_coordinate()[axis]]
                torch.manual_seed(3)
                local = torch.empty(expected.shape)
                init_(function, local, (13, 9), mesh=mesh, placements=placements, **kwargs)
                assert torch.equal(local, expected)
                assert torch.equal(torch.get_rng_state(), after)


def test_a_ragged_part() -> None:
    torch.manual_seed(1)
    whole = init.xavier_normal_(torch.empty(12, 9))
    torch.manual_seed(1)
    assert torch.equal(init_(init.xavier_normal_, torch.empty(60), (12, 9), part=range(20, 80)), whole.view(-1)[20:80])
    torch.manual_seed(1)
    orthogonal = init.orthogonal_(torch.empty(12, 9))
    torch.manual_seed(1)
    assert torch.equal(
        init_(init.orthogonal_, torch.empty(60), (12, 9), part=range(20, 80)), orthogonal.view(-1)[20:80]
    )


def test_parameters_that_need_gradients() -> None:
    parameter = torch.nn.Parameter(torch.empty(4, 9))
    torch.manual_seed(1)
    whole = init.kaiming_normal_(torch.empty(12, 9))
    torch.manual_seed(1)
    init_(init.kaiming_normal_, parameter, (12, 9), part=SLICES[1])
    assert torch.equal(parameter.detach(), whole[4:8])
    assert parameter.grad_fn is None
    assert parameter.requires_grad


def test_nothing_to_initialize() -> None:
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        init_(init.kaiming_uniform_, torch.empty(0, 9), (0, 9))
    assert torch.equal(torch.get_rng_state(), before)


def test_on_the_meta_device_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    for name in RANDOM:
        function, kwargs = FUNCTIONS[name]
        assert init_(function, torch.empty(4, 9, device="meta"), (12, 9), part=SLICES[1], **kwargs).is_meta
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ functions of the user


def test_what_acts_elementwise_costs_the_part() -> None:
    """Never a whole tensor: this one has 10^12 elements."""

    def mine(t: Tensor) -> None:
        t.uniform_(-1, 1).mul_(2).add_(1).clamp_(min=0.5)

    def sizes(t: Tensor) -> None:
        assert t.shape == (10**6, 10**6)
        assert t.numel() == 10**12
        t.fill_(t.shape[0])

    part = (slice(5, 7), slice(999_990, 10**6))
    torch.manual_seed(2)
    local = init_(mine, torch.empty(2, 10), (10**6, 10**6), part=part)
    assert local.min() >= 0.5
    torch.manual_seed(2)
    expected = vescale_rng.uniform((10**6, 10**6), -1, 1, part=part).mul_(2).add_(1).clamp_(min=0.5)
    assert torch.equal(local, expected)
    assert init_(sizes, torch.empty(2, 10), (10**6, 10**6), part=part).eq(10**6).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.normal_().div_(t.norm()),
        lambda t: t.uniform_() if t.uniform_().max() > 0.5 else t.zero_(),
        lambda t: t.copy_(torch.randn(t.shape)),
        lambda t: t.copy_(torch.randn_like(t)),
        lambda t: t.normal_().mul_(torch.arange(9.0)),
        lambda t: t.bernoulli_(torch.full((12, 9), 0.3)),
        lambda t: t.data.normal_().t().mul_(2),
        lambda t: t.copy_(torch.poisson(torch.full((12, 9), 4.0))),
    ],
)
def test_what_reads_values_gets_the_whole(function: Callable[[Tensor], Any]) -> None:
    torch.manual_seed(3)
    torch.randn(1)
    before = torch.get_rng_state()
    whole = torch.zeros(12, 9)
    function(whole)
    after = torch.get_rng_state()
    for slices in SLICES:
        torch.set_rng_state(before)
        local = torch.zeros(cut(whole, slices).shape)
        init_(function, local, (12, 9), part=slices)
        assert torch.equal(local, cut(whole, slices))
        assert torch.equal(torch.get_rng_state(), after)


def swapped(t: Tensor) -> None:
    t.data = torch.randn(t.shape)


def swallowing(t: Tensor) -> None:
    with contextlib.suppress(Exception):
        t.sort()
    t.mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.add_(torch.randn_like(t)),
        lambda t: t[4:].normal_(),
        lambda t: t.mul_(0.5).add_(torch.randn(t.shape)),
        lambda t: t.copy_(t + torch.randn(t.shape)),
        lambda t: t[:, ::2].uniform_(),
        lambda t: t.clamp_(0, 1),
        lambda t: torch.rand_like(t),
        lambda t: t.masked_fill_(t > 1e9, 0.0),
        lambda t: t.copy_(torch.full((12, 9), -1.0).log()),  # NaN of its own
        lambda t: t.numpy().fill(3),
        lambda t: t.tolist(),
        swapped,
        lambda t: (t.normal_(), swapped(t)),
        swallowing,
    ],
)
def test_what_a_tensor_held_before(function: Callable[[Tensor], Any]) -> None:
    old = torch.arange(108.0).view(12, 9)
    torch.manual_seed(3)
    whole = old.clone()
    function(whole)
    after = torch.get_rng_state()
    for slices in SLICES:
        torch.manual_seed(3)
        local = cut(old, slices).contiguous()
        init_(function, local, (12, 9), part=slices)
        assert torch.allclose(local, cut(whole, slices), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize(
    "function", [lambda t: t.add_(t.sum().to(t.dtype)), lambda t: t.copy_(t.cumsum(0).to(t.dtype))], ids=["sum", "scan"]
)
def test_what_others_held_is_not_known(function: Callable[[Tensor], Any], dtype: torch.dtype) -> None:
    """Rather an error than the bits of uninitialized memory."""
    local = torch.ones(4, 9).to(dtype)
    before = torch.get_rng_state()
    with pytest.raises(RandomError, match="depends on what the elements of other ranks held before"):
        init_(lambda t: (torch.rand(3), function(t)), local, (12, 9), part=SLICES[1])
    assert local.eq(1).all()
    assert torch.equal(torch.get_rng_state(), before)
    init_(function, torch.ones(12, 9).to(dtype), (12, 9))  # all are known to a rank that holds the whole


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_types_without_arithmetic_on_the_whole(dtype: torch.dtype) -> None:
    chessboard = (torch.arange(108).view(12, 9) % 2).to(dtype)
    local = init_(lambda t: t.copy_(chessboard), torch.zeros(4, 9).to(dtype), (12, 9), part=SLICES[1])
    assert torch.equal(local.float(), cut(chessboard, SLICES[1]).float())


@pytest.mark.parametrize("function", [lambda t: t.resize_(9, 9), lambda t: setattr(t, "data", torch.ones(3))])
def test_a_function_that_gives_its_tensor_another_shape(function: Callable[[Tensor], Any]) -> None:
    local = torch.zeros(4, 9)
    with pytest.raises(RandomError, match=r"function: it made a torch.float32 tensor of shape"):
        init_(function, local, (12, 9), part=SLICES[1])
    assert local.eq(0).all()


@pytest.mark.parametrize("then", ["part", "whole"])
def test_a_failing_function_leaves_the_local_tensor(then: str) -> None:
    def failing(t: Tensor) -> None:
        t.normal_().mul_(2)
        if then == "whole":
            t.sort()
        raise KeyError("no")

    local = torch.arange(36.0).view(4, 9)
    with pytest.raises(KeyError):
        init_(failing, local, (12, 9), part=SLICES[1])
    assert torch.equal(local, torch.arange(36.0).view(4, 9))


@pytest.mark.parametrize("name", ["normal_", "kaiming_uniform_", "trunc_normal_", "orthogonal_"])
@pytest.mark.parametrize("kind", ["portable", "emulated"])
def test_generators_of_this_package(name: str, kind: str) -> None:
    """They draw what their block draws, also where the function runs on the whole tensor."""
    function, kwargs = FUNCTIONS[name]
    profile = DeviceProfile("tiny", 1, 512)

    def made() -> Any:
        return PortableGenerator(5) if kind == "portable" else EmulatedGenerator(profile, 5)

    reference = made()
    with portable(reference) if kind == "portable" else emulate_cuda(reference):
        whole = function(torch.empty(12, 9), **kwargs)
    before = torch.get_rng_state()
    for slices in SLICES:
        generator, local = made(), torch.empty(cut(whole, slices).shape)
        init_(function, local, (12, 9), part=slices, generator=generator, **kwargs)
        assert torch.equal(local, cut(whole, slices))
        assert torch.equal(generator.get_state(), reference.get_state())
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["normal_", "trunc_normal_"])
def test_the_default_generator_given_within_a_block_is_the_blocks(name: str) -> None:
    function, kwargs = FUNCTIONS[name]
    with portable(5):
        whole = function(torch.empty(12, 9), **kwargs)
    with portable(5):
        local = torch.empty(4, 9)
        init_(function, local, (12, 9), part=SLICES[1], generator=torch.default_generator, **kwargs)
    assert torch.equal(local, whole[4:8])


def test_arguments_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, a PortableGenerator"):
        init_(init.normal_, torch.empty(9), (9,), generator=5)
    with pytest.raises(TypeError, match=r"function: expected one of torch.nn.init"):
        init_(5, torch.empty(9), (9,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"local: expected a torch.Tensor, got"):
        init_(init.normal_, [1.0], (1,))  # type: ignore[arg-type]


def test_a_function_may_draw_a_slice_of_the_whole() -> None:
    torch.manual_seed(3)
    whole = torch.randn(3, 9)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    local = init_(lambda t: t.zero_()[2:5].normal_(), torch.empty(4, 9), (12, 9), part=(slice(1, 5), slice(0, 9)))
    assert torch.equal(local[1:], whole)
    assert local[0].eq(0).all()
    assert torch.equal(torch.get_rng_state(), after)


def test_a_function_may_be_named() -> None:
    def scaled(t: Tensor, factor: float, *, offset: float) -> None:
        init.normal_(t)
        with torch.no_grad():
            t.mul_(factor).add_(offset)

    torch.manual_seed(1)
    whole = torch.randn(12, 9) * 3 + 1
    torch.manual_seed(1)
    assert torch.equal(init_(scaled, torch.empty(4, 9), (12, 9), 3.0, part=SLICES[1], offset=1.0), whole[4:8])


@pytest.mark.parametrize("first", ["normal_", "sort"])
def test_a_failing_function_leaves_the_generators(first: str) -> None:
    """Also if it fails after its first draw, on the part or on the whole."""

    def failing(t: Tensor, generator: torch.Generator) -> None:
        t.normal_(generator=generator)
        torch.rand(3)
        getattr(t, first)()
        raise KeyError("no")

    generator = torch.Generator().manual_seed(2)
    torch.randn(1, generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    with pytest.raises(KeyError, match="no"):
        init_(failing, torch.empty(4, 9), (12, 9), part=SLICES[1], generator=generator)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert cached_normal(generator)


def test_errors_of_the_function_are_its_own() -> None:
    with pytest.raises(ValueError, match="Fan in and fan out can not be computed for tensor with fewer than 2 dim"):
        init_(init.xavier_uniform_, torch.empty(3), (9,), part=range(3))
    with pytest.raises(RuntimeError, match="uniform_ expects to return"):
        init_(init.uniform_, torch.empty(3), (9,), 2.0, 1.0, part=range(3))


def test_a_local_tensor_that_does_not_fit() -> None:
    before = torch.get_rng_state()
    for function in (init.normal_, init.orthogonal_):
        with pytest.raises(LayoutError, match="local shape"):
            init_(function, torch.empty(5, 9), (12, 9), part=SLICES[1])
    with pytest.raises(LayoutError, match="mesh: not given"):
        init_(init.normal_, torch.empty(5, 9), (12, 9), placements=[Shard(0)])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["normal_", "kaiming_uniform_", "trunc_normal_"])
def test_within_a_portable_block(name: str) -> None:
    function, kwargs = FUNCTIONS[name]
    with portable(4) as generator:
        whole = function(torch.empty(12, 9), **kwargs)
        after = generator.save()
    for slices in SLICES:
        with portable(4) as generator:
            local = torch.empty(cut(whole, slices).shape)
            init_(function, local, (12, 9), part=slices, **kwargs)
            assert torch.equal(local, cut(whole, slices))
            assert generator.save() == after
