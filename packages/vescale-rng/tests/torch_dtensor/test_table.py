"""Every random operator of this torch has a handler of its own kind, or is refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from vescale_rng._torch_dtensor import single_device
from vescale_rng._torch_dtensor.pass_on import decompose, pass_on, refuse, unless_it_draws
from vescale_rng._torch_dtensor.table import DRAWS_NOTHING, handlers, how, random_operators
from vescale_rng._torch_dtensor.whole import draw_whole
from vescale_rng.errors import LayoutError, RandomError, UnsupportedRandomOperatorError

aten = torch.ops.aten


def test_random_operators_are_those_that_torch_tags():
    found = random_operators()
    assert found["uniform_"] is aten.uniform_.default
    assert found["random_.from"] is getattr(aten.random_, "from")
    assert "add.Tensor" not in found
    assert all(torch.Tag.nondeterministic_seeded in op.tags for op in found.values())


def test_every_random_operator_has_a_handler_but_those_that_draw_nothing():
    table = handlers()
    without = {name for name, op in random_operators().items() if op not in table}
    assert without == DRAWS_NOTHING & set(random_operators())


def test_kinds_of_handlers():
    kinds = {name: how(name, op) for name, op in random_operators().items() if name not in DRAWS_NOTHING}
    assert kinds["poisson"] is draw_whole
    assert kinds["dropout"] is decompose
    assert kinds["_scaled_dot_product_flash_attention_for_cpu"] is unless_it_draws
    # Factories without a tensor argument never reach a DTensor; what is refused must be one of those, or fused.
    refused = {name.partition(".")[0] for name, handler in kinds.items() if handler is refuse}
    assert refused == {
        "rand", "randn", "randint", "randperm", "normal", "_cudnn_init_dropout_state", "_fill_mem_eff_dropout_mask_",
        "_nested_tensor_softmax_with_shape", "_cudnn_rnn", "_lstm_mps", "miopen_rnn", "_triton_scaled_dot_attention",
        "randint_like",
    }  # fmt: skip


def test_an_unknown_random_operator_is_refused_by_name():
    with torch.library._scoped_library("vescale_rng_test", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        op = torch.ops.vescale_rng_test.noise.default
        handler = how("noise", op)
        with pytest.raises(UnsupportedRandomOperatorError, match=r"vescale_rng_test\.noise"):
            handler(op, (), {})


@pytest.fixture
def mesh(fake_world):
    return init_device_mesh("cpu", (4,))


@pytest.fixture
def fake_world():
    from vescale_testing import fake_ranks

    with fake_ranks(4, rank=1):
        yield


@pytest.fixture
def sharded(mesh):
    return distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)], src_data_rank=None)


def test_fused_kernels_with_dropout_are_refused_and_draw_nothing(mesh):
    q = distribute_tensor(torch.rand(4, 4, 5, 8), mesh, [Shard(0)], src_data_rank=None)
    before = torch.get_rng_state()
    with single_device(), pytest.raises(UnsupportedRandomOperatorError, match=r"flash_attention.*0\.5.*MATH"):
        aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
    assert torch.equal(torch.get_rng_state(), before)


def test_fused_kernels_without_dropout_are_passed_on(mesh, monkeypatch):
    q = distribute_tensor(torch.rand(4, 4, 5, 8), mesh, [Shard(0)], src_data_rank=None)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    calls = []

    def theirs(op, args, kwargs):
        calls.append((op, args, kwargs))
        return q, q

    monkeypatch.setitem(DTensor._op_dispatcher._custom_op_handlers, op, theirs)
    with single_device():
        assert op(q, q, q, 0.0, True)[0] is q
        with pytest.raises(UnsupportedRandomOperatorError):
            op(q, q, q, 0.1, True)
    assert [call[0] for call in calls] == [op]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (2.0,)),
        (aten.sum.dim_IntList, ([1],)),
        (aten.topk.default, (2, 1)),
        (aten.dropout.default, (0.5, False)),
    ],
    ids=str,
)
def test_passing_on_is_what_torch_would_do(sharded, op, args):
    with torch.inference_mode():  # where composite operators are dispatched too
        expected, got = op(sharded, *args), pass_on(op, (sharded, *args), {})
    for a, b in zip(*(x if isinstance(x, tuple | list) else [x] for x in (expected, got)), strict=True):
        assert a._spec == b._spec
        assert torch.equal(a._local_tensor, b._local_tensor)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.uniform_(),
        torch.rand_like,
        torch.bernoulli,
        torch.poisson,
        lambda t: torch.native_dropout(t, 0.5, True),
        lambda t: torch.normal(t, 1.0),
        lambda t: torch.nn.init.orthogonal_(t),
        lambda t: torch.nn.init.trunc_normal_(t),
    ],
    ids="uniform_ rand_like bernoulli poisson native_dropout normal orthogonal_ trunc_normal_".split(),
)
def test_partial_tensors_are_an_error(mesh, function):
    partial = DTensor.from_local(torch.rand(6, 4), mesh, [Partial()], run_check=False)
    before = torch.get_rng_state()
    with single_device(), pytest.raises(LayoutError, match="Redistribute"):
        function(partial)
    assert torch.equal(torch.get_rng_state(), before)


def test_plain_tensors_among_dtensors_are_refused_as_in_torch(sharded):
    plain = torch.rand(6, 4)
    with single_device():
        for function in (
            lambda: sharded.bernoulli_(plain),
            lambda: torch.normal(sharded, plain),
            lambda: torch.binomial(sharded, plain),
        ):
            with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
                function()


def test_a_draw_that_fails_moves_no_generator(sharded):
    own = torch.Generator().manual_seed(3)
    negative = distribute_tensor(-torch.ones(6, 4), sharded.device_mesh, [Shard(0)], src_data_rank=None)
    before, own_before = torch.get_rng_state(), own.get_state()
    with single_device():
        for function in (
            lambda: sharded.uniform_(2.0, 1.0),
            lambda: sharded.normal_(0.0, -1.0),
            lambda: sharded.bernoulli_(1.5),
            lambda: sharded.exponential_(-1.0),
            lambda: torch.rand_like(sharded, dtype=torch.int64),
            lambda: torch.multinomial(sharded, 5),
            lambda: torch.multinomial(sharded, 5, generator=own),
            lambda: torch.poisson(negative, generator=own),
            lambda: torch.randint(0, 5, (3, 4), out=sharded),
            lambda: torch.nn.init.sparse_(sharded, float("nan"), generator=own),
        ):
            with pytest.raises((RuntimeError, ValueError, NotImplementedError)):
                function()
            assert torch.equal(torch.get_rng_state(), before)
            assert torch.equal(own.get_state(), own_before)


def test_leaves_that_require_grad_are_refused_by_autograd(sharded):
    sharded.requires_grad_()
    with single_device():
        with pytest.raises(RuntimeError, match="leaf Variable"):
            sharded.uniform_()
        with torch.no_grad():
            assert sharded.uniform_() is sharded


def test_meta_tensors_draw_nothing_and_have_results_of_the_right_kind(mesh):
    meta = distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [Shard(0)], src_data_rank=None)
    before = torch.get_rng_state()
    with single_device():
        for function in (
            lambda t: t.uniform_(),
            torch.randn_like,
            torch.poisson,
            lambda t: F.dropout(t, 0.5),
            lambda t: torch.multinomial(t, 2),
            lambda t: torch.normal(t, t),
            lambda t: F.rrelu(t, training=True),
            torch.nn.init.orthogonal_,
            torch.nn.init.trunc_normal_,
            lambda t: torch.nn.init.sparse_(t, 0.5),
        ):
            result = function(meta)
            assert result.is_meta
            assert result.shape == function(torch.empty(6, 4, device="meta")).shape
    assert torch.equal(torch.get_rng_state(), before)


def test_fake_tensors_outside_of_tracing_draw_nothing(mesh):
    before = torch.get_rng_state()
    with torch._subclasses.FakeTensorMode(), single_device():
        fake = distribute_tensor(torch.empty(6, 4), mesh, [Shard(0)], src_data_rank=None)
        for result in (fake.uniform_(), torch.rand_like(fake), F.dropout(fake, 0.5), torch.poisson(fake)):
            assert result.shape == (6, 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_outside_of_the_mesh_draw_nothing(fake_world):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [0, 2, 3])
    outside = distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)], src_data_rank=None)
    before = torch.get_rng_state()
    with single_device():
        assert outside.uniform_() is outside
        for result in (torch.rand_like(outside), torch.bernoulli(outside), *torch.native_dropout(outside, 0.5, True)):
            assert result.shape == (6, 4)
            assert result.to_local().numel() == 0
        assert torch.multinomial(outside, 2).shape == (6, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_local_tensors_of_foreign_classes_are_refused(mesh):
    class Strange(torch.Tensor):
        pass

    local = torch.rand(2, 4).as_subclass(Strange)
    spec = distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)], src_data_rank=None)._spec
    strange = DTensor(local, spec, requires_grad=False)
    with single_device(), pytest.raises(UnsupportedRandomOperatorError, match="Strange"):
        strange.uniform_()


def test_resizing_out_is_refused(sharded):
    with single_device(), pytest.raises(UnsupportedRandomOperatorError, match="resized"):
        torch.randn(3, 3, out=sharded)


def test_samplers_refuse_what_has_no_closed_form(sharded):
    from vescale_rng._draw.mode import use_sampler

    class Emulated:
        pass

    with single_device(check=False), use_sampler(Emulated()), pytest.raises(RandomError, match=r"poisson.*Emulated"):
        torch.poisson(sharded)
