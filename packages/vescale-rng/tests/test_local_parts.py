"""`local_parts` on plain local tensors, against the same program on one device with the whole batch."""

from __future__ import annotations

import contextlib
import copy
import math
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import vescale_rng
from vescale_rng import emulate_cuda, local_parts, portable
from vescale_rng.errors import LayoutError, UnsupportedRandomOperatorError
from vescale_testing import cached_mesh, fake_ranks

G = torch.Generator


def _attend(t):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(t, t, t, dropout_p=0.4)


OPERATORS = {
    "dropout": lambda t: F.dropout(t, 0.3),
    "dropout in place": lambda t: F.dropout(t.clone(), 0.3, inplace=True),
    "dropout 0": lambda t: F.dropout(t, 0.0),
    "dropout 1": lambda t: F.dropout(t, 1.0),
    "dropout eval": lambda t: F.dropout(t, 0.3, training=False),
    "nn.Dropout": nn.Dropout(0.3),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.3, training=True),
    "native_dropout": lambda t: torch.native_dropout(t, 0.3, True)[0],
    "native_dropout mask": lambda t: torch.native_dropout(t, 0.3, True)[1],
    "native_dropout 1": lambda t: torch.native_dropout(t, 1.0, True)[0],
    "native_dropout half": lambda t: torch.native_dropout(t.half(), 0.3, True)[0],
    "rand": lambda t: torch.rand(t.shape),
    "rand out": lambda t: torch.rand(t.shape, out=torch.empty_like(t)),
    "randn": lambda t: torch.randn(t.shape, dtype=torch.float64),
    "randn complex": lambda t: torch.randn(t.shape, dtype=torch.complex64),
    "randint": lambda t: torch.randint(-3, 99, t.shape),
    "rand_like": torch.rand_like,
    "randn_like": lambda t: torch.randn_like(t, dtype=torch.bfloat16),
    "randint_like": lambda t: torch.randint_like(t, 50),
    "uniform_": lambda t: t.clone().uniform_(-1, 2),
    "normal_": lambda t: t.clone().normal_(0.3, 2.0),
    "random_": lambda t: t.clone().random_(3, 90),
    "exponential_": lambda t: t.clone().exponential_(2.0),
    "cauchy_": lambda t: t.clone().cauchy_(),
    "log_normal_": lambda t: t.clone().log_normal_(0.2, 0.7),
    "geometric_": lambda t: t.clone().geometric_(0.3),
    "bernoulli_": lambda t: t.clone().bernoulli_(0.4),
    "bernoulli_ tensor": lambda t: t.clone().bernoulli_(t),
    "bernoulli_ broadcast": lambda t: t.clone().bernoulli_(torch.tensor(0.3)),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda t: torch.bernoulli(t, 0.4),
    "normal tensors": lambda t: torch.normal(t, t + 1),
    "normal mean": lambda t: torch.normal(t, 2.0),
    "normal std": lambda t: torch.normal(0.5, t),
    "normal floats": lambda t: torch.normal(0.5, 2.0, t.shape),
    "functional": lambda t: torch.ops.aten.uniform(t, 0.5, 2.0),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t, dim=-1) > 0,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0].normal_(),
    "last dims swapped": lambda t: t.transpose(-1, -2).clone().normal_(),
    "default generator": lambda t: t.clone().uniform_(generator=torch.default_generator),
    "explicit generator": lambda t: t.clone().normal_(generator=G().manual_seed(9)),
    "rrelu eval": F.rrelu,
}
LAYOUTS = [
    ((2,), [Shard(0)]),
    ((4,), [Shard(-1)]),
    ((2, 2), [Shard(0), Shard(2)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Replicate(), Shard(1)]),
]


def _cut(whole, mesh, placements):
    """This rank's part, without communication."""
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            whole = whole.chunk(mesh.size(axis), placement.dim)[mesh.get_coordinate()[axis]]
    return whole


def _start():
    torch.manual_seed(5)
    torch.randn(3)  # leaves a cached normal number
    return torch.get_rng_state()


START = _start()


def _drawn(function, x):
    torch.set_rng_state(START)
    return function(x), torch.get_rng_state()


@pytest.mark.parametrize(("axes", "placements"), LAYOUTS, ids=str)
@pytest.mark.parametrize("inference", [False, True])
def test_operators(axes, placements, inference):
    x = torch.rand(8, 4, 12, generator=G().manual_seed(0))
    world = math.prod(axes)
    for rank in range(world):
        with fake_ranks(world, rank=rank), torch.inference_mode(inference):
            mesh = init_device_mesh("cpu", axes)
            local = _cut(x, mesh, placements).clone()
            for name, function in OPERATORS.items():
                if name == "last dims swapped" and any(p.is_shard() and p.dim != 0 for p in placements):
                    continue  # the placements are those of every tensor that is drawn
                if name == "gumbel_softmax" and placements[-1] in (Shard(-1), Shard(2)):
                    continue  # its softmax runs along that dim
                expected, state = _drawn(function, x)
                with local_parts(mesh, placements):
                    got, got_state = _drawn(function, local)
                assert torch.equal(got, _cut(expected, mesh, placements)), name
                assert torch.equal(got_state, state), name


def test_dropout_of_channels_and_attention():
    x = torch.rand(6, 4, 3, 8, generator=G().manual_seed(0))
    last = x.contiguous(memory_format=torch.channels_last)
    functions = {
        "dropout2d": lambda t: F.dropout2d(t, 0.4),
        "feature_alpha_dropout": lambda t: F.feature_alpha_dropout(t, 0.4, training=True),
        "attention": _attend,
        "dropout": lambda t: F.dropout(t, 0.4),
        "native_dropout": lambda t: torch.native_dropout(t, 0.4, True)[0],
    }
    for rank in range(2):
        for whole, dim in ((x, 0), (x, 1), (last, 0), (last, 1)):
            with fake_ranks(2, rank=rank):
                mesh = init_device_mesh("cpu", (2,))
                local = whole.chunk(2, dim)[rank]
                for name, function in functions.items():
                    expected, state = _drawn(function, whole)
                    with local_parts(mesh, [Shard(dim)]):
                        got, got_state = _drawn(function, local)
                    torch.testing.assert_close(got, expected.chunk(2, dim)[rank], rtol=0, atol=1e-6, msg=name)
                    assert torch.equal(got_state, state), name


# ------------------------------------------------------------------ training


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 32), nn.Linear(32, 12)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.drop(self.down(F.dropout(F.relu(self.up(x)), 0.2)))


def _transformer():
    return nn.TransformerEncoderLayer(12, 2, 24, dropout=0.1, batch_first=True)


def _data(step):
    return torch.randn(8, 5, 12, generator=G().manual_seed(step))


def _train(model, step_of, block, reduce):
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(5):
        x = step_of(step)
        with block():
            loss = (model(x) - x).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(reduce(loss.detach()))
    return torch.stack(losses), torch.get_rng_state()


def _check_data_parallel(rank, world, make, wrap):
    mesh = cached_mesh(world)
    torch.manual_seed(1)
    plain = make()
    model = wrap(copy.deepcopy(plain), mesh)
    expected, state = _train(plain, _data, contextlib.nullcontext, lambda loss: loss)

    def mean(loss):
        dist.all_reduce(loss)
        return loss / world

    got, got_state = _train(model, lambda s: _data(s).chunk(world)[rank], lambda: local_parts(mesh, [Shard(0)]), mean)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(got_state, state)


def _by_hand(model, mesh):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad.div_(mesh.size())))
    return model


def _fsdp(model, mesh):
    for child in model.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _ddp(model, mesh):
    return DistributedDataParallel(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [_by_hand, _fsdp, _ddp])
@pytest.mark.parametrize("make", [MLP, _transformer])
def test_data_parallel_training_on_two_ranks(rank, world, make, wrap):
    _check_data_parallel(rank, world, make, wrap)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [MLP, _transformer])
def test_data_parallel_training_on_four_ranks(rank, world, make):
    _check_data_parallel(rank, world, make, _fsdp)


@pytest.mark.ranks(2)
def test_tensor_parallel_plan_with_local_outputs(world):
    mesh = cached_mesh(world)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(12, 32), nn.Dropout(0.3), nn.Linear(32, 12))
    model = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for step in range(3):
        x = _data(step)
        torch.manual_seed(step)
        expected = plain(x)
        state = torch.get_rng_state()
        torch.manual_seed(step)
        with local_parts(mesh, [Shard(-1)]):
            got = model(x)
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, pool=True)
def test_results_of_collectives_in_flight(rank, world):
    x = torch.rand(4, 6, generator=G().manual_seed(0))
    for function in (lambda t: F.dropout(t, 0.4), torch.rand_like, torch.bernoulli):
        expected, state = _drawn(function, x.expand(2, 4, 6).reshape(8, 6))
        flying = all_gather_tensor(x.chunk(2)[rank], 0, cached_mesh(world))
        assert isinstance(flying, AsyncCollectiveTensor)
        with local_parts(cached_mesh(world), [Shard(0)]):
            got, got_state = _drawn(function, flying)
        assert torch.equal(got, expected.chunk(2)[rank])
        assert torch.equal(got_state, state)


@pytest.mark.ranks(2, pool=True)
def test_sharded_tensors_within_the_block_go_their_own_way(world):
    mesh, x = cached_mesh(world), torch.rand(6, 4, generator=G().manual_seed(0))
    functions = [
        lambda t: t.clone().uniform_(),
        lambda t: F.dropout(t, 0.4),
        lambda t: nn.init.trunc_normal_(t.clone(), a=-1.0, b=1.0),
        lambda t: nn.init.orthogonal_(t.clone()),
        torch.poisson,
        lambda t: F.rrelu(t, training=True),
    ]
    with vescale_rng.single_device(), local_parts(mesh, [Shard(0)]), local_parts(mesh, [Shard(1)]):
        for index, function in enumerate(functions):
            sharded = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
            expected, state = _outside(function, x)
            torch.manual_seed(2)
            got = function(sharded).full_tensor()
            assert torch.equal(torch.get_rng_state(), state), index
            assert torch.equal(got, expected), index


def _outside(function, x):
    found = []

    def work():  # modes are of a thread
        torch.manual_seed(2)
        found.extend((function(x), torch.get_rng_state()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


# ------------------------------------------------------------------ the block


@pytest.fixture
def mesh():
    with fake_ranks(2, rank=1):
        yield init_device_mesh("cpu", (2,))


X = torch.rand(6, 4, generator=G().manual_seed(0))
HALF = X[3:].clone()


def _expected(function):
    whole, state = _drawn(function, X)
    return whole[3:], state


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(mesh, reentrant):
    def block(t):
        return (F.dropout(t, 0.5) ** 2 + torch.rand_like(t) * t).exp()

    grads = []
    decorated = local_parts(mesh, [Shard(0)])(block)
    for function, x, around in ((block, X, None), (block, HALF, mesh), (decorated, HALF, None)):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        with local_parts(mesh, [Shard(0)] if around else [Replicate()]):
            checkpoint(function, leaf, use_reentrant=reentrant).sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[1], grads[0][3:])
    assert torch.equal(grads[2], grads[0][3:])


def test_gradients(mesh):
    for name in ("dropout", "alpha_dropout", "native_dropout"):
        grads = []
        for x, placement in ((X, Replicate()), (HALF, Shard(0))):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(3)
            with local_parts(mesh, [placement]):
                OPERATORS[name](leaf).sin().sum().backward()
            grads.append(leaf.grad)
        assert torch.equal(grads[1], grads[0][3:]), name


def test_innermost_block_counts_and_one_object_serves_many_times(mesh):
    outer, inner = local_parts(mesh, [Shard(0)]), local_parts(mesh, [Replicate()])
    expected, _ = _expected(torch.rand_like)
    same, _ = _drawn(torch.rand_like, HALF)
    with outer:
        with inner:
            assert torch.equal(_drawn(torch.rand_like, HALF)[0], same)
            with outer, outer:
                assert torch.equal(_drawn(torch.rand_like, HALF)[0], expected)
        assert torch.equal(_drawn(torch.rand_like, HALF)[0], expected)
    assert torch.equal(_drawn(torch.rand_like, HALF)[0], same)


def test_only_the_thread_of_the_block(mesh):
    with local_parts(mesh, [Shard(0)]):
        got, _ = _outside(torch.rand_like, HALF)
    torch.manual_seed(2)
    assert torch.equal(got, torch.rand_like(HALF))


def test_decorator(mesh):
    @local_parts(mesh, [Shard(0)])
    def step(t, *, p):
        return F.dropout(t, p)

    assert step.__name__ == "step"
    expected, _ = _expected(lambda t: F.dropout(t, 0.4))
    assert torch.equal(_drawn(lambda t: step(t, p=0.4), HALF)[0], expected)


def test_with_a_sampler_around(mesh):
    """Around, or within: the block that sees parts is asked either way, and draws by the sampler."""

    def program(t):
        with torch.inference_mode():
            wide = F.dropout(torch.rand_like(t), 0.4)
        halves = torch.native_dropout(t.bfloat16(), 0.4, True)
        return torch.cat([wide, F.dropout(t, 0.3), torch.randn(t.shape), halves[0], halves[1]], 1)

    for sampler in (lambda: portable(3), lambda: emulate_cuda("H100", seed=3)):
        with sampler():
            whole = program(X)
        with sampler(), local_parts(mesh, [Shard(0)]):
            assert torch.equal(program(HALF), whole[3:])
        with local_parts(mesh, [Shard(0)]), sampler():
            assert torch.equal(program(HALF), whole[3:])


def test_functions_of_this_package_keep_their_parts(mesh):
    part = (slice(2, 4), slice(0, 4))
    calls = [
        lambda: vescale_rng.randn((6, 4), part=part),
        lambda: vescale_rng.randn((6, 4), part=part, generator=G().manual_seed(1)),
        lambda: vescale_rng.randperm(9),
        lambda: vescale_rng.init_(nn.init.kaiming_uniform_, torch.empty(2, 4), (6, 4), part=part),
        lambda: vescale_rng.init_(nn.init.orthogonal_, torch.empty(2, 4), (6, 4), part=part),
    ]
    for index, call in enumerate(calls):
        torch.manual_seed(4)
        expected = call()
        with local_parts(mesh, [Shard(0)]):
            torch.manual_seed(4)
            assert torch.equal(call(), expected), index


def test_meta_and_empty_tensors(mesh):
    before = torch.get_rng_state()
    with local_parts(mesh, [Shard(0)]):
        assert torch.rand(0, 3).shape == (0, 3)
        assert F.dropout(torch.ones(3, 4, device="meta"), 0.5).is_meta
        assert torch.native_dropout(torch.ones(0, 3), 0.5, True)[0].shape == (0, 3)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("poisson", torch.poisson),
        ("multinomial", lambda t: torch.multinomial(t, 2)),
        ("randperm", lambda t: torch.randperm(5)),
        ("rrelu_with_noise", lambda t: F.rrelu(t, training=True)),
        ("binomial", lambda t: torch.binomial(t.round(), t)),
    ],
)
def test_operators_without_a_closed_form_are_named(mesh, name, call):
    before = torch.get_rng_state()
    with local_parts(mesh, [Shard(0)]), pytest.raises(UnsupportedRandomOperatorError, match=f"{name}.*closed form"):
        call(HALF)
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_without_the_sharded_dim(mesh):
    before = torch.get_rng_state()
    with local_parts(mesh, [Shard(1)]):
        for shape in ((), (3,)):
            with pytest.raises(LayoutError, match=r"uniform_ of a tensor.*placements\[0\] = S.*a dim that it has not"):
                torch.rand(shape)
        with pytest.raises(LayoutError, match="a dim that it has not"):
            F.dropout(torch.ones(3), 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_one_row_per_rank(mesh):
    """Strides of dims of size 1 say nothing, so order in memory is asked for."""
    row = torch.rand(1, 3, 4)
    with local_parts(mesh, [Shard(0)]):
        torch.rand(1)
        with pytest.raises(LayoutError, match=r"one row of dim 0.*contiguous=True"):
            F.dropout(row, 0.5)
    expected, state = _drawn(lambda t: F.dropout(t, 0.5), torch.cat([row, row]))
    with local_parts(mesh, [Shard(0)], contiguous=True):
        got, got_state = _drawn(lambda t: F.dropout(t, 0.5), row)
        with pytest.raises(LayoutError, match="is not contiguous"):
            F.dropout(row.transpose(1, 2), 0.5)
    assert torch.equal(got, expected[1:])
    assert torch.equal(got_state, state)


def test_masks_of_feature_dropout_along_sharded_positions(mesh):
    with local_parts(mesh, [Shard(2)]), pytest.raises(LayoutError, match="dropout2d"):
        F.dropout2d(torch.ones(2, 3, 4, 4), 0.5)


def test_wrong_calls_draw_nothing(mesh):
    before = torch.get_rng_state()
    with local_parts(mesh, [Shard(0)]):
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            torch.ones(3, 1).expand(3, 4).uniform_()
        with pytest.raises(RuntimeError, match="from=3 > to=1"):
            HALF.clone().uniform_(3, 1)
        with pytest.raises((RuntimeError, ValueError), match="between 0 and 1"):
            torch.native_dropout(HALF, 1.5, True)
        with pytest.raises(NotImplementedError):
            torch.ones(3, 4, dtype=torch.int64).uniform_()
        with pytest.raises(UnsupportedRandomOperatorError, match="sparse"):
            torch.rand_like(torch.eye(4).to_sparse())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ([], "needs a list of 1"),
        ("S", "needs a list of 1"),
        ([Partial()], "partial"),
        (["S0"], "not a placement"),
    ],
)
def test_wrong_placements(mesh, placements, message):
    with pytest.raises(LayoutError, match=message):
        local_parts(mesh, placements)


def test_outside_of_the_mesh():
    with fake_ranks(4, rank=3):
        mesh = init_device_mesh("cpu", (4,))
        part = DeviceMesh("cpu", [0, 1])
        assert mesh.size() == 4
        with pytest.raises(LayoutError, match="not in the mesh"):
            local_parts(part, [Shard(0)])
