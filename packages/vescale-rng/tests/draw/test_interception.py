"""The mode, with a sampler that runs torch's own kernels on a flat tensor: the results are torch's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_rng._draw.interception import InterceptRandom
from vescale_rng.errors import UnsupportedRandomOperatorError

SEED = 11


class Whole:
    """A source that draws all at once, as torch does."""

    grain = 1
    seek_cost = skip_cost = 0.0

    def __init__(self, sampler: "TorchSampler", op: str, numel: int) -> None:
        self.sampler, self.op, self.numel = sampler, op, numel

    def emit(self, out: torch.Tensor, start: int, params: tuple[Any, ...]) -> None:
        assert out.is_contiguous()
        assert (out.dim(), start, out.numel()) == (1, 0, self.numel)
        assert all(p.shape == out.shape and p.is_contiguous() for p in params if isinstance(p, torch.Tensor))
        if self.op == "dropout":
            out.bernoulli_(1 - params[0], generator=self.sampler.generator)
        else:
            getattr(out, self.op)(*params, generator=self.sampler.generator)
        if self.sampler.fail:
            raise KeyError(self.op)

    def finish(self) -> None:
        self.sampler.finished += 1


class TorchSampler:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(SEED)
        self.calls: list[tuple[Any, ...]] = []
        self.finished = 0
        self.fail = False

    def source(self, op: str, dtype: torch.dtype, device: torch.device, shape: Any, stride: Any, args: Any) -> Whole:
        self.calls.append((op, dtype, device, shape, stride, args))
        return Whole(self, op, torch.Size(shape).numel())

    def save(self) -> object:
        return self.generator.get_state()

    def restore(self, token: Any) -> None:
        self.generator.set_state(token)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0.4, dtype=dtype)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: x(3, 4, 5),
    "scalar": lambda: x(),
    "transposed": lambda: x(4, 6).t(),
    "permuted": lambda: x(3, 4, 5).permute(1, 2, 0),
    "channels_last": lambda: x(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "columns": lambda: x(6, 8)[:, 1:5],
    "steps": lambda: x(6, 8)[::2, ::3],
    "transposed steps": lambda: x(6, 8).t()[::2],
    "ones": lambda: x(1, 4, 1, 3).transpose(1, 3),
    "empty": lambda: x(0, 3),
}
# Kernels of torch that fill any tensor in memory order, an element after the other.
ON_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "uniform_": lambda t: t.uniform_(1, 3),
    "random_": lambda t: t.random_(),
    "random_ to": lambda t: t.random_(7),
    "random_ from": lambda t: t.random_(-7, 7),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "bernoulli_ tensor": lambda t: t.bernoulli_(torch.linspace(0, 1, t.numel()).view(t.shape)),
    "bernoulli_ row": lambda t: t.bernoulli_(torch.linspace(0, 1, t.shape[-1]) if t.dim() else torch.tensor(0.5)),
    "exponential_": lambda t: t.exponential_(2),
    "geometric_": lambda t: t.geometric_(0.5),
    "cauchy_": lambda t: t.cauchy_(1, 2),
    "rand_like": lambda t: torch.rand_like(t),
    "rand_like f64": lambda t: torch.rand_like(t, dtype=torch.float64),
    "rand_like contiguous": lambda t: torch.rand_like(t, memory_format=torch.contiguous_format),
    "randint_like": lambda t: torch.randint_like(t, 9),
    "randint_like low": lambda t: torch.randint_like(t, 3, 9, dtype=torch.int64),
    "randint_like tensor": lambda t: torch.ops.aten.randint_like.Tensor(t, torch.tensor(9)),
    "bernoulli": lambda t: torch.bernoulli(t),
    "bernoulli p": lambda t: torch.bernoulli(t, 0.3),
    "uniform": lambda t: torch.ops.aten.uniform.default(t, 1.0, 2.0),
    "exponential": lambda t: torch.ops.aten.exponential.default(t),
    "random": lambda t: torch.ops.aten.random.to(t, 5),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.5, training=True),
    "dropout": lambda t: F.dropout(t, 0.5),
    "rand out": lambda t: torch.rand(t.shape, out=torch.empty(0)),
    "bernoulli with a tensor": lambda t: torch.ops.aten.bernoulli.Tensor(t, torch.full(t.shape, 0.3)),
    "bernoulli with a tensor, out": lambda t: torch.ops.aten.bernoulli.Tensor_out(
        t, torch.full(t.shape, 0.3), out=torch.empty(0)
    ),
    "bernoulli with a float, out": lambda t: torch.ops.aten.bernoulli.float_out(t, 0.3, out=torch.empty(0)),
    "bernoulli out": lambda t: torch.bernoulli(t, out=torch.empty(0)),
    "uniform out": lambda t: torch.ops.aten.uniform.out(t, 1.0, 2.0, out=torch.empty(0)),
    "rand_like out": lambda t: torch.ops.aten.rand_like.out(t, out=torch.empty(0)),
}
PLAIN: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(3, 5),
    "rand f64": lambda: torch.rand(3, 5, dtype=torch.float64),
    "rand bf16": lambda: torch.rand(3, 5, dtype=torch.bfloat16),
    "rand complex": lambda: torch.rand(3, 5, dtype=torch.complex64),
    "randn": lambda: torch.randn(7, 5),
    "randn small": lambda: torch.randn(3),
    "randn complex": lambda: torch.randn(20, dtype=torch.complex64),
    "randint": lambda: torch.randint(9, (3, 5)),
    "randint low": lambda: torch.randint(3, 9, (3, 5), dtype=torch.int8),
    "normal_": lambda: torch.empty(20).normal_(1, 2),
    "normal_functional": lambda: torch.ops.aten.normal_functional.default(x(20), 1.0, 2.0),
    "normal floats": lambda: torch.normal(1.0, 2.0, (20,)),
    "normal mean": lambda: torch.normal(x(20), 2.0),
    "normal std": lambda: torch.normal(2.0, x(20)),
    "normal both": lambda: torch.normal(x(4, 1), x(6)),
    "normal f64": lambda: torch.normal(x(20, dtype=torch.float64), x(20, dtype=torch.float64)),
    "normal out": lambda: torch.normal(x(4, 1), x(6), out=torch.empty(0)),
    "log_normal_": lambda: torch.empty(20).log_normal_(1, 2),
    "Linear": lambda: torch.nn.Linear(5, 6).weight.detach(),
    "gumbel": lambda: F.gumbel_softmax(x(3, 5)),
    "random_ 64": lambda: torch.empty(9, dtype=torch.int64).random_(-(2**63), None),
    "random_ from None": lambda: torch.empty(9, dtype=torch.int64).random_(4, None),
}


def run(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Result and final state of torch alone, then of the mode."""
    before = torch.get_rng_state()
    torch.manual_seed(SEED)
    expected, end = call(), torch.get_rng_state()
    torch.set_rng_state(before)
    sampler = TorchSampler()
    with InterceptRandom(sampler):
        got = call()
    assert torch.equal(torch.get_rng_state(), before)
    assert sampler.finished == len(sampler.calls)
    return expected, end, got, sampler.generator.get_state()


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ON_LAYOUTS)
def test_results_are_those_of_torch(name: str, layout: str) -> None:
    expected, end, got, state = run(lambda: ON_LAYOUTS[name](LAYOUTS[layout]()))
    assert same(got, expected)
    assert torch.equal(state, end)


@pytest.mark.parametrize("name", PLAIN)
def test_factories_and_normals(name: str) -> None:
    expected, end, got, state = run(PLAIN[name])
    assert same(got, expected)
    assert torch.equal(state, end)


def test_in_place_keeps_the_object_and_reaches_views() -> None:
    base = torch.zeros(4, 6)
    with InterceptRandom(TorchSampler()):
        view = base[:, 2:4]
        assert view.uniform_(1, 2) is view
    assert int((base != 0).sum()) == 8
    assert base._version > 0


def test_native_dropout() -> None:
    data = torch.linspace(1, 2, 64).requires_grad_()
    sampler = TorchSampler()
    with InterceptRandom(sampler):
        out, mask = torch.native_dropout(data, 0.25, True)
        out.sum().backward()
        still, all_kept = torch.native_dropout(data, 0.25, False)
        gone, none_kept = torch.native_dropout(data, 1.0, True)
    assert sampler.calls == [("dropout", torch.float32, torch.device("cpu"), (64,), (1,), (0.25,))]
    assert torch.equal(out, torch.where(mask, data * (1 / 0.75), torch.zeros(())))
    assert data.grad is not None
    assert torch.equal(data.grad != 0, mask)
    assert torch.equal(still, data)
    assert all_kept.all()
    assert not gone.any()
    assert not none_kept.any()


def test_the_sampler_is_told_the_layout() -> None:
    sampler = TorchSampler()
    with InterceptRandom(sampler):
        torch.empty(4, 6, dtype=torch.float64).t().uniform_(1, 2)
        torch.rand(2, dtype=torch.complex64)
    cpu = torch.device("cpu")
    assert sampler.calls == [
        ("uniform_", torch.float64, cpu, (6, 4), (1, 6), (1, 2)),
        ("uniform_", torch.float32, cpu, (2, 2), (2, 1), ()),
    ]


def test_a_failing_draw_leaves_the_sampler_as_it_was() -> None:
    sampler = TorchSampler()
    sampler.fail = True
    with InterceptRandom(sampler):
        with pytest.raises(KeyError):
            torch.rand(5)
        sampler.fail = False
        got = torch.rand(5)
    assert torch.equal(got, torch.rand(5, generator=torch.Generator().manual_seed(SEED)))


def test_what_is_left_to_torch() -> None:
    sampler = TorchSampler()
    explicit = torch.Generator().manual_seed(3)
    with InterceptRandom(sampler):
        got = torch.rand(5, generator=explicit)
        assert torch.rand(5, device="meta").is_meta
        assert torch.empty(5, device="meta").uniform_().is_meta
        F.rrelu(x(3))
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3)
    assert torch.equal(got, torch.rand(5, generator=torch.Generator().manual_seed(3)))
    assert not sampler.calls


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.randperm(5),
        lambda: torch.poisson(x(3)),
        lambda: torch.binomial(x(3), x(3)),
        lambda: torch.multinomial(x(3), 2),
        lambda: torch._sample_dirichlet(x(3)),
        lambda: F.rrelu(x(3), training=True),
    ],
)
def test_unknown_operators_raise_and_draw_nothing(call: Callable[[], Any]) -> None:
    before, sampler = torch.get_rng_state(), TorchSampler()
    with (
        InterceptRandom(sampler),
        pytest.raises(UnsupportedRandomOperatorError, match="TorchSampler does not know how"),
    ):
        call()
    assert not sampler.calls
    assert torch.equal(torch.get_rng_state(), before)


def test_inference_mode_is_seen_through() -> None:
    with torch.inference_mode():
        expected, end, got, state = run(lambda: F.alpha_dropout(x(30), 0.5, training=True))
    assert same(got, expected)
    assert torch.equal(state, end)


def test_overlapping_memory_is_an_error() -> None:
    with InterceptRandom(TorchSampler()), pytest.raises(RuntimeError, match="single memory location"):
        torch.empty(1).expand(3).uniform_()


class Wrapped(torch.Tensor):
    """A subclass with a dispatch of its own, which runs operators on what it wraps."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, Wrapped) else a for a in args), **(kwargs or {}))


def test_subclasses_come_first_and_their_inner_calls_are_seen() -> None:
    sampler = TorchSampler()
    with InterceptRandom(sampler):
        got = Wrapped(torch.empty(4)).uniform_()
    assert torch.equal(got, torch.rand(4, generator=torch.Generator().manual_seed(SEED)))
    assert len(sampler.calls) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda g: torch.rand(5, generator=g),
        lambda g: torch.randint(9, (5,), generator=g),
        lambda g: torch.empty(5).uniform_(generator=g),
        lambda g: torch.bernoulli(x(5), generator=g),
        lambda g: torch.normal(x(5), 1.0, generator=g),
    ],
)
def test_the_default_generator_given_is_none_given(call: Callable[[Any], torch.Tensor]) -> None:
    before, results = torch.get_rng_state(), []
    for given in (None, torch.default_generator):
        sampler = TorchSampler()
        with InterceptRandom(sampler):
            results.append(call(given))
        assert len(sampler.calls) == 1
    assert torch.equal(*results)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("call", [F.dropout, torch.rand_like, torch.bernoulli, lambda t: t.uniform_()])
def test_tensors_without_strides_are_refused_by_name(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    sampler = TorchSampler()
    nested = torch.nested.nested_tensor([x(5), x(3)], layout=torch.strided)
    with InterceptRandom(sampler):
        with pytest.raises(UnsupportedRandomOperatorError, match="is a nested tensor and has no strides"):
            call(nested)
        with pytest.raises(UnsupportedRandomOperatorError, match=r"is a tensor of layout torch.sparse_coo"):
            call(torch.eye(3).to_sparse())
    assert not sampler.calls


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_jagged_tensors_draw_for_their_values() -> None:
    sampler = TorchSampler()
    jagged = torch.nested.nested_tensor([x(5), x(3)], layout=torch.jagged)
    with InterceptRandom(sampler):
        got = F.dropout(jagged).values()
    assert len(sampler.calls) == 1
    assert torch.equal(got != 0, torch.empty(8).bernoulli_(0.5, generator=torch.Generator().manual_seed(SEED)) != 0)
