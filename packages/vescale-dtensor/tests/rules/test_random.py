"""Random operators: equal to one device in mode "whole", one stream per shard otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import (
    DTensor,
    InterleavedShard,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    Varying,
    _random,
    distribute_tensor,
)
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_dtensor._mesh import mesh_info
from vescale_dtensor._random import fill, mix, random_mode, set_random_mode
from vescale_dtensor._spec import spec_of
from vescale_dtensor.errors import DTensorError, UnsupportedOperationError
from vescale_dtensor.placements import I, P
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, compare, placements

MESHES = [(4,), (2, 2)]
X = torch.linspace(-2, 2, 5 * 3 * 4, dtype=torch.float64).view(5, 3, 4)
UNIT = torch.linspace(0.05, 0.95, 60, dtype=torch.float64).view(5, 3, 4)


@contextlib.contextmanager
def _provider(provider: Any) -> Iterator[None]:
    """Draw with `provider`, None for one stream per shard, whatever plugins are installed."""
    _random.use_provider(provider)
    try:
        yield
    finally:
        _random.forget_provider()


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), X),
    "dropout-inplace": (lambda x: F.dropout(x.clone(), 0.3, True, True), X),
    "dropout-eval": (lambda x: F.dropout(x, 0.3, False), X),
    "dropout-all": (lambda x: F.dropout(x, 1.0), X),
    "dropout-transposed": (lambda x: F.dropout(x.transpose(0, 2), 0.3), X),
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), X),
    "torch.dropout_": (lambda x: torch.dropout_(x.clone(), 0.3, True), X),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.3, True)[0], X),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, True), X),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5), X),
    "dropout2d": (lambda x: F.dropout2d(x.unsqueeze(-1), 0.5), X),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, True), X),
    "bernoulli": (lambda x: torch.bernoulli(x.detach()), UNIT),
    "bernoulli-p": (lambda x: torch.bernoulli(x.detach(), 0.3), UNIT),
    "bernoulli_": (lambda x: x.detach().clone().bernoulli_(0.3), X),
    "bernoulli_-tensor": (lambda x: torch.zeros_like(x.detach()).bernoulli_(x.detach()), UNIT),
    "normal_": (lambda x: x.detach().clone().normal_(1.0, 2.0), X),
    "normal_-graph": (lambda x: (x * 2).normal_(), X),
    "uniform_": (lambda x: x.detach().clone().uniform_(-1, 3), X),
    "random_": (lambda x: x.detach().clone().random_(1, 7), X),
    "exponential_": (lambda x: x.detach().clone().exponential_(2.0), X),
    "cauchy_": (lambda x: x.detach().clone().cauchy_(), X),
    "log_normal_": (lambda x: x.detach().clone().log_normal_(), X),
    "geometric_": (lambda x: x.detach().clone().geometric_(0.3), X),
    "rand_like": (lambda x: torch.rand_like(x), X),
    "randn_like": (lambda x: torch.randn_like(x, dtype=torch.float32), X),
    "randint_like": (lambda x: torch.randint_like(x, 3, 9), X),
    "randint_like-high": (lambda x: torch.randint_like(x, high=9), X),
    "normal": (lambda x: torch.normal(x.detach(), 2.0), X),
    "normal-std": (lambda x: torch.normal(0.5, x.detach()), UNIT),
    "normal-both": (lambda x: torch.normal(x.detach(), x.detach()), UNIT),
    "poisson": (lambda x: torch.poisson(x.detach()), UNIT),
    "multinomial": (lambda x: torch.multinomial(x.detach()[:, 0], 2), UNIT),
    "multinomial-1d": (lambda x: torch.multinomial(x.detach()[0, 0], 2), UNIT),
    "rrelu": (lambda x: F.rrelu(x, training=True), X),
    "rrelu-eval": (lambda x: F.rrelu(x), X),
    "kaiming_uniform_": (lambda x: torch.nn.init.kaiming_uniform_(x.detach().clone()), X),
    "xavier_normal_": (lambda x: torch.nn.init.xavier_normal_(x.detach().clone()), X),
    "init.normal_": (lambda x: torch.nn.init.normal_(x.detach().clone(), 1.0, 0.02), X),
    "init.uniform_": (lambda x: torch.nn.init.uniform_(x.detach().clone()), X),
    "trunc_normal_": (lambda x: torch.nn.init.trunc_normal_(x.detach().clone(), std=1.5), X),
    "trunc_normal_-tail": (lambda x: torch.nn.init.trunc_normal_(x.detach().clone(), mean=5.0, a=2.0, b=3.0), X),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, dim=-1), X),
    "gumbel_softmax-hard": (lambda x: F.gumbel_softmax(x, hard=True, dim=1), X),
}
NOT_BITWISE = {"gumbel_softmax", "gumbel_softmax-hard", "kaiming_uniform_", "native_dropout"}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whole_mode_equals_one_device(name: str, mesh_shape: tuple[int, ...]) -> None:
    fn, value = FUNCTIONS[name]
    mesh = cached_mesh(*mesh_shape)
    codes = all_codes(3, len(mesh_shape), partial=True)
    for code in codes[:: 1 if len(mesh_shape) == 1 else 7]:
        plain = value.clone().requires_grad_()
        ours = distribute_tensor(value, mesh, placements(code)).requires_grad_()
        torch.manual_seed(5)
        expected = fn(plain)
        state = torch.get_rng_state()
        torch.manual_seed(5)
        with random_mode("whole"), implicit_communication("allow"):
            actual = fn(ours)
            assert torch.equal(torch.get_rng_state(), state)
            exact = 0.0 if name not in NOT_BITWISE and "P" not in code else 1e-12
            compare(actual, expected, rtol=exact, atol=exact)
            if expected.requires_grad:
                seed = torch.cos(torch.arange(expected.numel(), dtype=torch.float64)).view(expected.shape)
                (want,) = torch.autograd.grad(expected, plain, seed)
                (got,) = torch.autograd.grad(actual, ours, seed)
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", ["feature_dropout", "feature_alpha_dropout", "dropout"])
def test_interleaved_parts_get_the_numbers_of_one_device(name: str) -> None:
    """A mask per channel does not see how positions are cut."""
    function = getattr(torch, name)
    mesh = cached_mesh(4, names=("tp",))
    value = torch.randn(4, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for placement in (InterleavedShard(2, 3), InterleavedShard(1, 2), InterleavedShard(0, 2)):
        torch.manual_seed(5)
        expected = function(value, 0.4, True)
        torch.manual_seed(5)
        with random_mode("whole"):
            actual = function(distribute_tensor(value, mesh, [placement]), 0.4, True)
        assert actual.placements == (placement,)
        assert torch.equal(actual.full_tensor(), expected)
    ragged = distribute_tensor(value, mesh, [RaggedShard((0,), (1, 1, 1, 1))])
    if name != "dropout":
        with pytest.raises(UnsupportedOperationError, match="not cut by channels"):
            function(ragged, 0.4, True)


def _everywhere(local: torch.Tensor) -> list[torch.Tensor]:
    """This tensor of every rank; all have one shape."""
    parts = [torch.empty_like(local) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, local.contiguous())
    return parts


SHARDED = {
    "dropout": lambda x: F.dropout(x.abs() + 1, 0.5),
    "uniform_": lambda x: x.clone().uniform_(),
    "normal_": lambda x: x.clone().normal_(),
    "randn_like": torch.randn_like,
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "poisson": lambda x: torch.poisson(torch.full_like(x, 50.0)),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", SHARDED)
@_provider(None)
def test_shards_differ_and_replicas_agree(name: str) -> None:
    mesh = cached_mesh(2, 2)
    x = distribute_tensor(torch.zeros(8, 16), mesh, [Shard(0), Replicate()])
    torch.manual_seed(1)
    first, second = SHARDED[name](x), SHARDED[name](x)
    state = torch.get_rng_state()
    parts = _everywhere(first.to_local())
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[2], parts[3])
    assert not torch.equal(parts[0], parts[2])
    assert not torch.equal(first.to_local(), second.to_local())
    assert first.placements == (Shard(0), Replicate())
    assert all(torch.equal(s, state) for s in _everywhere(state))
    torch.manual_seed(1)
    assert torch.equal(SHARDED[name](x).to_local(), first.to_local())


@pytest.mark.ranks(4, pool=True)
@_provider(None)
def test_dropout_statistics_and_backward_in_shard_mode() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(torch.ones(4000, dtype=torch.float64), mesh, [Shard(0)]).requires_grad_()
    y = F.dropout(x, 0.25)
    y.sum().backward()
    whole = y.detach().full_tensor()
    assert set(whole.tolist()) == {0.0, 1 / 0.75}
    assert abs((whole == 0).double().mean().item() - 0.25) < 0.04
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), whole)


@pytest.mark.ranks(4, pool=True)
@_provider(None)
def test_checkpoint_draws_the_same_again() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(torch.ones(40, 4), mesh, [Shard(0)]).requires_grad_()
    y = checkpoint(lambda x: F.dropout(x * 2, 0.5), x, use_reentrant=False)
    torch.rand(3)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.to_local(), y.detach().to_local())


@pytest.mark.ranks(4, pool=True)
def test_own_generator_is_used_and_moved() -> None:
    mesh = cached_mesh(4)
    for mode in ("shard", "whole"):
        with random_mode(mode):  # type: ignore[arg-type]
            results = []
            for _ in range(2):
                generator = torch.Generator().manual_seed(3)
                x = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
                x.normal_(generator=generator)
                after = x.clone().normal_(generator=generator)
                results.append((x.to_local(), after.to_local()))
            assert torch.equal(results[0][0], results[1][0])
            assert not torch.equal(*results[0])


@pytest.mark.ranks(4, pool=True)
@_provider(None)
def test_no_gradient_type_is_lost() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(torch.ones(8), mesh, [Varying()]).requires_grad_()
    y = F.dropout(x, 0.5)
    assert repr(y.placements[0]) == "Varying()"
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.placements == (Partial(),)
    p = distribute_tensor(torch.ones(8), mesh, [Partial()])
    assert p.normal_().placements == (Partial(),)  # views of it, if there are any, hold pending sums as well
    assert F.dropout(distribute_tensor(torch.ones(8), mesh, [Partial()]), 0.5).placements == (Replicate(),)


@pytest.mark.ranks(4, pool=True)
def test_leaf_that_requires_gradients_raises_as_torch_does() -> None:
    x = distribute_tensor(torch.ones(8), cached_mesh(4), [Shard(0)]).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        x.normal_()
    with torch.no_grad():
        x.normal_()
    assert x.is_leaf


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mode", ["shard", "whole"])
@_provider(None)
def test_fill_for_factories(mode: Any) -> None:
    info = mesh_info(cached_mesh(2, 2))
    cases: list[tuple[str, tuple[Any, ...], Callable[[], torch.Tensor]]] = [
        ("rand", (), lambda: torch.rand(5, 6)),
        ("randn", (), lambda: torch.randn(5, 6)),
        ("randint", (2, 9), lambda: torch.randint(2, 9, (5, 6), dtype=torch.float32)),
        ("normal_", (1.0, 0.5), lambda: torch.empty(5, 6).normal_(1.0, 0.5)),
    ]
    for op, args, single in cases:
        spec = spec_of(info, (5, 6), (1, I))
        torch.manual_seed(2)
        expected = single()
        torch.manual_seed(2)
        with random_mode(mode):
            local = torch.full(spec.local_shape, -77.0)
            assert fill(op, local, spec, args, {}) is local
        assert not (local == -77).any()
        if mode == "whole":
            assert torch.equal(local, expected[:, spec.local_offset[1] :][:, : spec.local_shape[1]])
    partial = fill("rand", torch.empty(4), spec_of(info, (4,), (P, I)), (), {})
    assert bool(partial.any()) == (info.coordinate[0] == 0)
    meta = torch.empty(4, device="meta")
    assert fill("rand", meta, spec_of(info, (4,), (I, I)), (), {}) is meta
    with pytest.raises(UnsupportedOperationError, match="randperm"):
        fill("randperm", torch.empty(4), spec_of(info, (4,), (I, I)), (), {})


class _Recorder:
    """A provider that fills with ones and notes what it was asked."""

    def __init__(self, scope: str) -> None:
        self.answer, self.calls = scope, []  # type: ignore[var-annotated]

    def scope(self, op: str) -> Any:
        return self.answer

    def fill(
        self, op: str, local: torch.Tensor, global_shape: tuple[int, ...], global_stride: tuple[int, ...],
        boxes: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any],
    ) -> None:  # fmt: skip
        assert local.is_contiguous()
        local.fill_(1)
        self.calls.append((op, global_shape, global_stride, [(b.offset, b.shape) for b in boxes], args, dict(kwargs)))


class _PreparingRecorder(_Recorder):
    """One that is asked once for every layout."""

    def __init__(self) -> None:
        super().__init__("local")
        self.prepared: list[tuple[Any, ...]] = []

    def prepare(
        self, op: str, local: torch.Tensor, global_shape: tuple[int, ...], global_stride: tuple[int, ...],
        boxes: Sequence[Any],
    ) -> Callable[[torch.Tensor, tuple[Any, ...], Mapping[str, Any]], None]:  # fmt: skip
        self.prepared.append((op, tuple(local.shape), local.stride(), global_shape, global_stride))

        def draw(local: torch.Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            local.fill_(1)
            self.calls.append((op, args, dict(kwargs)))

        return draw


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("scope", ["local", "global"])
def test_provider_is_asked(scope: str) -> None:
    mesh = cached_mesh(4)
    recorder = _Recorder(scope)
    with _provider(recorder):
        x = distribute_tensor(torch.full((6, 3), 2.0), mesh, [Shard(0)])
        y = F.dropout(x, 0.5)
        assert (y.to_local() == 4).all()
        x.normal_(0.0, 2.0)
        x.t().uniform_()
        torch.rand_like(x)
    box = (x._spec.local_offset, x._spec.local_shape) if scope == "local" else ((0, 0), (6, 3))
    assert recorder.calls[0] == ("dropout", (6, 3), (3, 1), [box], (0.5,), {})
    assert recorder.calls[1] == ("normal_", (6, 3), (3, 1), [box], (0.0, 2.0), {})
    assert recorder.calls[2][:2] == ("uniform_", (3, 6))
    assert recorder.calls[3][0] == "rand_like"
    assert recorder.calls[2][2] == (1, 3)


@pytest.mark.ranks(4, pool=True)
def test_provider_prepares_once() -> None:
    mesh = cached_mesh(4)
    recorder = _PreparingRecorder()
    with _provider(recorder):
        x = distribute_tensor(torch.full((8, 6), 2.0), mesh, [Shard(0)])
        for p in (0.5, 0.5, 0.75):
            y = F.dropout(x, p)
            assert (y.to_local() == 2 / (1 - p)).all()
        generator = torch.Generator()
        x.normal_(0.0, 2.0, generator=generator)
        x.t().normal_()
        with random_mode("whole"):
            F.dropout(x, 0.5)
        assert recorder.calls == [
            ("dropout", (0.5,), {}),
            ("dropout", (0.5,), {}),
            ("dropout", (0.75,), {}),
            ("normal_", (0.0, 2.0), {"generator": generator}),
            ("normal_", (), {}),
        ]
        assert recorder.prepared == [
            ("dropout", (2, 6), (6, 1), (8, 6), (6, 1)),
            ("normal_", (2, 6), (6, 1), (8, 6), (6, 1)),
            ("normal_", (6, 2), (1, 6), (6, 8), (1, 6)),
        ]
    other = _PreparingRecorder()
    with _provider(other):
        F.dropout(x, 0.5)
    assert len(other.calls) == 1
    assert len(recorder.calls) == 5


@pytest.mark.ranks(4)
@_provider(None)
def test_ranks_out_of_step_raise(rank: int) -> None:
    mesh = cached_mesh(4)
    torch.manual_seed(rank == 2)
    x = distribute_tensor(torch.zeros(4), mesh)
    with pytest.raises(DTensorError, match="manual_seed"):
        x.normal_()
    torch.manual_seed(0)
    x.normal_()
    assert isinstance(x, DTensor)


def test_mode_is_checked_and_restored() -> None:
    with pytest.raises(ValueError, match="shard"):
        set_random_mode("device")  # type: ignore[arg-type]
    with random_mode("whole"):
        assert _random.state.mode == "whole"
    assert _random.state.mode == "shard"


def test_seeds_of_shards_are_distinct_in_the_bits_that_the_cpu_generator_reads() -> None:
    seeds = {mix(12345, i) & 0xFFFFFFFF for i in range(100_000)}
    assert len(seeds) == 100_000
