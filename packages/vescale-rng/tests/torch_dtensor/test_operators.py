"""Every random operator on torch's own DTensor, on real ranks: values and generators are those of plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from vescale_rng._torch_dtensor import single_device
from vescale_testing import cached_mesh

G = torch.Generator


def _rates(t):
    return t.abs() + 0.1


IN_PLACE = {
    "uniform_": lambda t, g: t.uniform_(-1, 2, generator=g),
    "normal_": lambda t, g: t.normal_(0.1, 0.5, generator=g),
    "random_": lambda t, g: t.random_(generator=g),
    "random_ to": lambda t, g: t.random_(10, generator=g),
    "random_ from": lambda t, g: t.random_(-3, 10, generator=g),
    "bernoulli_ float": lambda t, g: t.bernoulli_(0.4, generator=g),
    "bernoulli_ tensor": lambda t, g: t.bernoulli_(torch.sigmoid(t), generator=g),
    "bernoulli_ scalar tensor": lambda t, g: t.bernoulli_(torch.tensor(0.3), generator=g),
    "exponential_": lambda t, g: t.exponential_(2.0, generator=g),
    "cauchy_": lambda t, g: t.cauchy_(0.5, 2.0, generator=g),
    "log_normal_": lambda t, g: t.log_normal_(0.2, 0.7, generator=g),
    "geometric_": lambda t, g: t.geometric_(0.3, generator=g),
}
NEW = {
    "rand_like": lambda t, g: torch.rand_like(t, generator=g),
    "randn_like": lambda t, g: torch.randn_like(t, generator=g),
    "randn_like bfloat16": lambda t, g: torch.randn_like(t, dtype=torch.bfloat16, generator=g),
    "randn_like contiguous": lambda t, g: torch.randn_like(t, memory_format=torch.contiguous_format, generator=g),
    "randint_like": lambda t, g: torch.randint_like(t, 50, generator=g),
    "randint_like low": lambda t, g: torch.randint_like(t, 3, 50, dtype=torch.int32, generator=g),
    "randint_like tensor": lambda t, g: torch.randint_like(t, torch.tensor(9), generator=g),
    "bernoulli": lambda t, g: torch.bernoulli(t.sigmoid(), generator=g),
    "bernoulli p": lambda t, g: torch.bernoulli(t, 0.3, generator=g),
    "normal both": lambda t, g: torch.normal(t, _rates(t), generator=g),
    "normal mean": lambda t, g: torch.normal(t, 2.0, generator=g),
    "normal std": lambda t, g: torch.normal(1.0, _rates(t), generator=g),
    "poisson": lambda t, g: torch.poisson(_rates(t) * 3, generator=g),
    "binomial": lambda t, g: torch.binomial(_rates(t).round(), t.sigmoid(), generator=g),
    "_standard_gamma": lambda t, g: torch._standard_gamma(_rates(t), generator=g),
    "_sample_dirichlet": lambda t, g: torch._sample_dirichlet(_rates(t), generator=g),
    "functional uniform": lambda t, g: torch.ops.aten.uniform(t, 0.5, 2.0, generator=g),
    "functional bernoulli": lambda t, g: torch.ops.aten.bernoulli.Tensor(t, t.sigmoid(), generator=g),
    "rand out": lambda t, g: torch.rand(t.shape, out=t, generator=g),
    "randint out": lambda t, g: torch.randint(2, 9, t.shape, out=t, generator=g),
    "normal out": lambda t, g: torch.normal(0.0, 2.0, t.shape, out=t, generator=g),
    "normal tensors out": lambda t, g: torch.normal(t, _rates(t), out=torch.empty_like(t), generator=g),
    "bernoulli out": lambda t, g: torch.bernoulli(t.sigmoid(), out=torch.empty_like(t), generator=g),
}
DEFAULT_GENERATOR_ONLY = {
    "dropout": lambda t: F.dropout(t, 0.3),
    "dropout 0": lambda t: F.dropout(t, 0.0),
    "dropout 1": lambda t: F.dropout(t, 1.0),
    "dropout eval": lambda t: F.dropout(t, 0.3, training=False),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.3, training=True),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "native_dropout mask": lambda t: torch.native_dropout(t, 0.3, True)[1].to(torch.uint8),
    "native_dropout 1": lambda t: torch.native_dropout(t, 1.0, True)[0],
    "native_dropout half": lambda t: torch.native_dropout(t.half(), 0.3, True)[0],
    "native_dropout bfloat16": lambda t: torch.native_dropout(t.bfloat16(), 0.3, True)[0],
    "native_dropout off": lambda t: torch.native_dropout(t, 0.3, False)[0],
    "rrelu": lambda t: F.rrelu(t, training=True),
    "rrelu_": lambda t: F.rrelu(t, training=True, inplace=True),
    "rrelu eval": lambda t: F.rrelu(t).contiguous(),
}
SPECIAL = {
    "multinomial": ((8, 12), lambda t: torch.multinomial(_rates(t), 3)),
    "multinomial one": ((7, 5), lambda t: torch.multinomial(_rates(t), 1)),
    "multinomial vector": ((9,), lambda t: torch.multinomial(_rates(t), 3)),
    "multinomial replacement": ((7, 5), lambda t: torch.multinomial(_rates(t), 6, replacement=True)),
    "multinomial transposed": ((7, 5), lambda t: torch.multinomial(_rates(t).t(), 3)),
    "gumbel_softmax": ((7, 6), lambda t: F.gumbel_softmax(t, dim=-1)),
    "gumbel_softmax transposed": ((7, 6), lambda t: F.gumbel_softmax(t.t(), dim=-1)),
    "dropout2d": ((2, 6, 3, 3), lambda t: F.dropout2d(t, 0.4)),
    "dropout2d channels_last": ((2, 6, 3, 3), lambda t: F.dropout2d(_channels_last(t), 0.4)),
    "feature_alpha_dropout": ((5, 6), lambda t: F.feature_alpha_dropout(t, 0.4, training=True)),
    "dropout channels_last": ((2, 6, 3, 3), lambda t: F.dropout(_channels_last(t), 0.4)),
    "randn_like channels_last": ((2, 6, 3, 3), lambda t: torch.randn_like(_channels_last(t))),
    "randperm out": ((13,), lambda t: torch.randperm(13, out=t)),
}
SHAPES = [(8, 12), (7, 5), (3, 4, 6), (1, 3), (17,), (2,), (), (0, 4)]


def _channels_last(t):
    return t.contiguous(memory_format=torch.channels_last)


def _layouts(ndim, world):
    line = cached_mesh(world)
    placements = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    if world == 4:
        square = cached_mesh(2, 2)
        pairs = [(0, 1), (1, 0), (0, 0), (None, 1)]
        placements += [(square, [Replicate() if d is None else Shard(d) for d in pair]) for pair in pairs]
    return [(m, p) for m, p in placements if all(s.is_replicate() or s.dim < ndim for s in p)]


def _copy(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _run(function, x, *generators):
    """Run on a fresh stream that a small odd draw has left a cached normal number in."""
    torch.manual_seed(5)
    torch.randn(3)
    for g in generators:
        if g is not None:
            g.manual_seed(11)
    result = function(x)
    return result, torch.get_rng_state(), [g.get_state() for g in generators if g is not None]


def _equal(got, expected):
    return got.shape == expected.shape and got.dtype == expected.dtype and torch.equal(got, expected)


def _check(name, function, x, layouts, generator=None):
    call = function if generator is None and name not in (IN_PLACE | NEW) else lambda t: function(t, generator)
    expected, state, others = _run(call, _copy(x), generator)
    for mesh, placements in layouts:
        sharded = distribute_tensor(_copy(x), mesh, placements, src_data_rank=None)
        got, got_state, got_others = _run(call, sharded, generator)
        where = f"{name} of {tuple(x.shape)}, strides {x.stride()}, on {placements}, generator {generator is not None}"
        assert isinstance(got, DTensor), where
        assert _equal(got.full_tensor(), expected), where
        assert torch.equal(got_state, state), f"default generator: {where}"
        assert all(map(torch.equal, got_others, others)), f"explicit generator: {where}"
        assert got.numel() < 2 or 1 in got.shape or got.stride() == expected.stride(), where


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_table_on_two_ranks(world, shape):
    _table(world, shape)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 4, 6), (1, 3)], ids=str)
def test_table_on_four_ranks(world, shape):
    _table(world, shape)


def _table(world, shape):
    x = torch.randn(shape, generator=G().manual_seed(0))
    layouts = _layouts(x.ndim, world)
    with single_device():
        for name, function in (IN_PLACE | NEW).items():
            _check(name, function, x, layouts)
        for name, function in DEFAULT_GENERATOR_ONLY.items():
            if not (x.numel() == 0 and "mask" in name):  # torch's own mask of nothing is not of bools
                _check(name, function, x, layouts)


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5)], ids=str)
def test_explicit_generators(world, shape):
    x = torch.randn(shape, generator=G().manual_seed(0))
    with single_device():
        for name, function in (IN_PLACE | NEW).items():
            _check(name, function, x, _layouts(x.ndim, world), G())


@pytest.mark.ranks(2, pool=True)
def test_transposed_and_strided_wholes(world):
    base = torch.randn(7, 6, 5, generator=G().manual_seed(0))
    with single_device():
        for x in (base[:, :, 0].t(), base.permute(2, 0, 1)):
            for name, function in IN_PLACE.items():
                _check(name, function, x, _layouts(x.ndim, world))
            for name in ("rand_like", "randn_like", "randn_like contiguous", "bernoulli", "bernoulli p", "normal both"):
                _check(name, NEW[name], x, _layouts(x.ndim, world))
            for name in ("dropout", "native_dropout", "native_dropout mask"):
                _check(name, DEFAULT_GENERATOR_ONLY[name], x, _layouts(x.ndim, world))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", SPECIAL)
def test_operators_that_look_at_dims(world, name):
    shape, function = SPECIAL[name]
    x = torch.randn(shape, generator=G().manual_seed(0))
    x = x.to(torch.int64) if name == "randperm out" else x
    expected, state, _ = _run(function, _copy(x))
    with single_device():
        for mesh, placements in _layouts(x.ndim, world):
            sharded = distribute_tensor(_copy(x), mesh, placements, src_data_rank=None)
            got, got_state, _ = _run(function, sharded)
            assert torch.equal(got_state, state), placements
            assert _equal(got.full_tensor(), expected), placements


@pytest.mark.ranks(2, pool=True)
def test_attention_with_dropout_takes_the_path_of_plain_operators(world):
    x = torch.randn(4, 4, 5, 8, generator=G().manual_seed(0))

    def attend(t):
        return F.scaled_dot_product_attention(t, t, t, dropout_p=0.4)

    expected, state, _ = _run(attend, x)
    with single_device():
        for dim in (0, 1):
            got, got_state, _ = _run(attend, distribute_tensor(x, cached_mesh(world), [Shard(dim)], src_data_rank=None))
            assert torch.equal(got_state, state)
            torch.testing.assert_close(got.full_tensor(), expected, rtol=0, atol=1e-6)


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.complex64], ids=str
)
def test_dtypes(world, dtype):
    """What plain torch draws in a dtype is drawn; what it refuses is refused, and nothing moves."""
    x = torch.ones(5, 7, dtype=dtype)
    names = [
        "uniform_",
        "normal_",
        "random_",
        "bernoulli_ float",
        "exponential_",
        "geometric_",
        "rand_like",
        "randn_like",
    ]
    with single_device():
        for name in names:
            function = (IN_PLACE | NEW)[name]
            try:
                function(_copy(x), None)
            except (RuntimeError, NotImplementedError):
                sharded = distribute_tensor(_copy(x), cached_mesh(world), [Shard(0)], src_data_rank=None)
                torch.manual_seed(5)
                before = torch.get_rng_state()
                with pytest.raises((RuntimeError, NotImplementedError)):
                    function(sharded, None)
                assert torch.equal(torch.get_rng_state(), before), name
            else:
                _check(name, function, x, _layouts(x.ndim, world))


@pytest.mark.ranks(2, pool=True)
def test_parameters_are_brought_to_the_layout_of_the_result(world):
    mesh = cached_mesh(world)
    x = torch.rand(6, 8, generator=G().manual_seed(0))
    row, column = x[:1], x[:, 1:2]
    rows, columns = (
        distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None),
        distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None),
    )
    small = distribute_tensor(row, mesh, [Shard(1)], src_data_rank=None)
    tall = distribute_tensor(column, mesh, [Shard(0)], src_data_rank=None)
    functions = [
        lambda a, b, c, d: a.clone().bernoulli_(b),
        lambda a, b, c, d: a.clone().bernoulli_(c),
        lambda a, b, c, d: torch.normal(a, b),
        lambda a, b, c, d: torch.normal(c, b),
        lambda a, b, c, d: torch.normal(c, d),  # neither has the shape of the result
        lambda a, b, c, d: torch.binomial((a * 9).round(), b),
    ]
    with single_device():
        for index, function in enumerate(functions):
            torch.manual_seed(5)
            expected, state = function(x, x, row, column), torch.get_rng_state()
            torch.manual_seed(5)
            got = function(rows, columns, small, tall)
            assert torch.equal(torch.get_rng_state(), state), index
            assert torch.equal(got.full_tensor(), expected), index


@pytest.mark.ranks(2, pool=True)
def test_plain_parameters_under_implicit_replication(world):
    x = torch.rand(6, 8, generator=G().manual_seed(0))
    sharded = distribute_tensor(x, cached_mesh(world), [Shard(1)], src_data_rank=None)
    with single_device(), implicit_replication():
        for function in (lambda t: torch.normal(t, x), lambda t: torch.binomial((t * 9).round(), x)):
            torch.manual_seed(5)
            expected = function(x)
            torch.manual_seed(5)
            assert torch.equal(function(sharded).full_tensor(), expected)


@pytest.mark.ranks(2, pool=True)
def test_in_place_operators_return_their_argument_and_new_ones_keep_the_placements(world):
    mesh = cached_mesh(world)
    x = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)], src_data_rank=None)
    with single_device():
        assert x.uniform_() is x
        version = x._version
        assert torch.poisson(x).placements == (Shard(1),)
        assert torch.rand_like(x).placements == (Shard(1),)
        assert x.normal_()._version > version
        assert torch.multinomial(x.abs(), 2).placements == (Replicate(),)
        assert torch.multinomial(x.abs().redistribute(placements=[Shard(0)]), 2).placements == (Shard(0),)
        assert torch.rand_like(x, dtype=torch.float64).to_local().dtype == torch.float64


@pytest.mark.ranks(2, pool=True)
def test_gradients_of_dropout_and_rrelu(world):
    x = torch.randn(7, 6, generator=G().manual_seed(0))
    with single_device():
        for name in ("dropout", "native_dropout", "alpha_dropout", "rrelu"):
            plain = x.clone().requires_grad_()
            torch.manual_seed(3)
            DEFAULT_GENERATOR_ONLY[name](plain).sin().sum().backward()
            sharded = distribute_tensor(x, cached_mesh(world), [Shard(1)], src_data_rank=None).requires_grad_()
            torch.manual_seed(3)
            DEFAULT_GENERATOR_ONLY[name](sharded).sin().sum().backward()
            assert torch.equal(sharded.grad.full_tensor(), plain.grad), name


@pytest.mark.ranks(2, pool=True)
def test_inference_mode(world):
    x = torch.randn(7, 6, generator=G().manual_seed(0))
    functions = {
        **{name: DEFAULT_GENERATOR_ONLY[name] for name in ("dropout", "dropout 1", "alpha_dropout", "rrelu")},
        "dropout half": lambda t: F.dropout(t.half(), 0.3),
        "uniform_": lambda t: t.uniform_(),
        "feature": lambda t: F.feature_alpha_dropout(t, 0.4, training=True),
    }
    with single_device(), torch.inference_mode():
        for name, function in functions.items():
            expected, state, _ = _run(function, _copy(x))
            sharded = distribute_tensor(_copy(x), cached_mesh(world), [Shard(0)], src_data_rank=None)
            got, got_state, _ = _run(function, sharded)
            assert torch.equal(got.full_tensor(), expected), name
            assert torch.equal(got_state, state), name


@pytest.mark.ranks(3, pool=True)
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_expanded_tensors_are_refused_alike_on_all_ranks(world, rows):
    """Also where a rank holds one element only, or none, so that its local part does not overlap."""
    message = "more than one element of the written-to tensor refers to a single memory location"
    calls = {**IN_PLACE, "bernoulli out": lambda t, g: torch.bernoulli(t.clone(), out=t)}
    with single_device():
        for name, call in calls.items():
            torch.manual_seed(5)
            before = torch.get_rng_state()
            for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
                x = distribute_tensor(torch.ones(rows, 3), cached_mesh(world), placements, src_data_rank=None)
                if placements == [Shard(1)]:
                    x = x[None].expand(2, rows, 3)
                else:
                    x = x[:, :1].expand(rows, 3)
                if rows > 1 and placements == [Replicate()]:
                    with pytest.raises(RuntimeError, match=message):
                        call(torch.ones(rows, 1).expand(rows, 3), None)
                with pytest.raises(RuntimeError, match=message):
                    call(x, None)
            assert torch.equal(torch.get_rng_state(), before), name
        empty = distribute_tensor(torch.ones(0, 1), cached_mesh(world), [Replicate()], src_data_rank=None)
        assert empty.expand(0, 3).uniform_().shape == (0, 3)


@pytest.mark.ranks(2, pool=True)
def test_dropout_of_integers_fails_as_on_one_device(world):
    x = torch.ones(7, 6, dtype=torch.int64)
    sharded = distribute_tensor(x, cached_mesh(world), [Shard(0)], src_data_rank=None)
    states = []
    with single_device():
        for t in (x, sharded):
            torch.manual_seed(3)
            with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
                F.dropout(t, 0.5)
            states.append(torch.get_rng_state())
    assert torch.equal(*states)
