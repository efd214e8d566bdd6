"""Every path into torch that does not dispatch raises, or does the right thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

from vescale_dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements


def _sharded() -> DTensor:
    return distribute_tensor(torch.arange(8.0), cached_mesh(4), [Shard(0)])


REFUSED: dict[str, Callable[[DTensor], Any]] = {
    "vmap": lambda x: torch.vmap(lambda a: a * 2)(x),
    "func.vmap": lambda x: torch.func.vmap(lambda a: a * 2)(x),
    "vmap-captured": lambda x: torch.vmap(lambda a: a * x.sum())(torch.zeros(5)),
    "func.grad": lambda x: torch.func.grad(lambda a: a.sum())(x),
    "func.vjp": lambda x: torch.func.vjp(lambda a: a.sum(), x),
    "func.jvp": lambda x: torch.func.jvp(lambda a: a.sum(), (x,), (x,)),
    "func.jacrev": lambda x: torch.func.jacrev(lambda a: a * a)(x),
    "func.jacfwd": lambda x: torch.func.jacfwd(lambda a: a * a)(x),
    "func.hessian": lambda x: torch.func.hessian(lambda a: (a * a).sum())(x),
    "functionalize": lambda x: torch.func.functionalize(lambda a: a * 2)(x),
    "tensor": lambda x: torch.tensor(x),
    "tensor-list": lambda x: torch.tensor([x[0], x[1]]),
    "tensor-nested-list": lambda x: torch.tensor([[1.0], [x[1]]]),
    "as_tensor-list": lambda x: torch.as_tensor([x[0], x[1]]),
    "as_tensor-dtype": lambda x: torch.as_tensor(x, dtype=torch.float64),
    "asarray-list": lambda x: torch.asarray([x[0], x[1]]),
    "new_tensor": lambda x: torch.zeros(1).new_tensor(x),
    "Variable": lambda x: torch.autograd.Variable(x),
    "set_": lambda x: torch.zeros(2).set_(x),
    "set_-ours": lambda x: x.set_(torch.zeros(2)),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "__dlpack__": lambda x: x.__dlpack__(),
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "numpy": lambda x: x.numpy(),
    "data_ptr": lambda x: x.data_ptr(),
    "data_ptr-pending": lambda x: x.sum().data_ptr(),
    "safetensors": lambda x: pytest.importorskip("safetensors.torch").save({"x": x}),
    "jit.trace": lambda x: torch.jit.trace(lambda a: a * 2, (x,)),
    "jit.script-module": lambda x: torch.jit.script(_linear(x)),
    "export": lambda x: torch.export.export(_linear(x), (torch.zeros(8),)),
    "make_fx": lambda x: make_fx(lambda a: a + a.sum())(x),
    "jit.trace-module": lambda x: torch.jit.trace(_module(x), (torch.zeros(8),)),
    "to_sparse": lambda x: x.to_sparse(),
    "sparse_coo": lambda x: torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.long), x, (8,)),
    "nested_tensor": lambda x: torch.nested.nested_tensor([x, x]),
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.zeros(2)] * 4, x),
    "all_gather_into": lambda x: dist.all_gather_into_tensor(torch.zeros(8), x),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(torch.zeros(2), x),
    "all_to_all": lambda x: dist.all_to_all_single(torch.zeros(8), x),
    "send": lambda x: dist.send(x, 0),
    "irecv": lambda x: dist.irecv(x, 0),
    "c10d-op": lambda x: torch.ops._c10d_functional.all_reduce(x, "sum", "0"),
    "make_dual": lambda x: _dual(x),
    "func.grad-captured": lambda x: torch.func.grad(lambda a: (x * a).sum().full_tensor())(torch.ones(())),
    "func.jvp-captured": lambda x: torch.func.jvp(lambda a: (x * a).sum(), (torch.ones(()),), (torch.ones(()),)),
    "functionalize-captured": lambda x: torch.func.functionalize(lambda a: (x * a).sum())(torch.ones(())),
    "vmap-moves": lambda x: _moved_in_vmap(x.clone().requires_grad_()),
    "vmap-from_local": lambda x: torch.vmap(lambda a: _from_local(a).sum())(torch.ones(3, 2)),
    "linearize": lambda x: torch.func.linearize(lambda a: a * a, x),
    "dual-captured": lambda x: _tangent_of_product(x),
    "jacobian-forward": lambda x: torch.autograd.functional.jacobian(
        lambda a: a.sum(), x, vectorize=True, strategy="forward-mode"
    ),
    "make_fx-captured": lambda x: make_fx(lambda a: a * x.sum())(torch.ones(())),
    "flex_attention": lambda x: flex_attention(x.view(1, 1, 4, 2), x.view(1, 1, 4, 2), x.view(1, 1, 4, 2)),
}


def _moved_in_vmap(x: DTensor) -> Any:
    return torch.vmap(lambda a: a * x.full_tensor().sum())(torch.ones(3))


def _from_local(a: torch.Tensor) -> DTensor:
    return DTensor.from_local(a, cached_mesh(4), [Shard(0)], run_check=False)


def _tangent_of_product(x: DTensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        a = torch.autograd.forward_ad.make_dual(torch.tensor(2.0), torch.tensor(1.0))
        return torch.autograd.forward_ad.unpack_dual((x * a).sum()).tangent


def _module(x: DTensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(x)
    module.forward = lambda a: a * module.weight  # type: ignore[assignment, operator]
    return module


def _linear(x: DTensor) -> nn.Module:
    module = nn.Linear(8, 1)
    module.bias = nn.Parameter(x[:1])
    return module


def _dual(x: DTensor) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return torch.autograd.forward_ad.make_dual(x, x)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with implicit_communication("allow"), pytest.raises(UnsupportedOperationError):
        REFUSED[name](_sharded())


@pytest.mark.ranks(4, pool=True)
def test_plain_tensors_are_not_affected() -> None:
    x = torch.arange(4.0)
    assert torch.tensor([1, 2]).tolist() == [1, 2]
    assert torch.as_tensor([[1.0], [2.0]]).shape == (2, 1)
    assert torch.asarray([1]).tolist() == [1]
    assert x.new_tensor([3.0]).tolist() == [3.0]
    assert torch.vmap(lambda a: a * 2)(x).tolist() == [0, 2, 4, 6]
    assert torch.func.grad(lambda a: (a * a).sum())(x).tolist() == [0, 2, 4, 6]
    assert type(torch.autograd.Variable(x)) is torch.Tensor
    assert torch.from_dlpack(x).tolist() == x.tolist()
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
        assert torch.as_tensor([1.0]).is_meta


@pytest.mark.ranks(4, pool=True)
def test_conversions_that_keep_the_tensor() -> None:
    x = _sharded()
    assert torch.as_tensor(x) is x
    assert isinstance(x.new_tensor([1.0, 2.0]), DTensor)


def _scripted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0])


@pytest.mark.ranks(4, pool=True)
def test_torchscript_knows_the_wrapped_factory() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.jit.script(_scripted)(torch.zeros(1)).item() == 1.0


@pytest.mark.ranks(4, pool=True)
def test_scripted_function_runs_as_the_python_function_that_it_was() -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_less_its_mean)
    assert scripted(torch.arange(8.0)).tolist() == [i - 3.5 for i in range(8)]
    assert scripted(_sharded()).full_tensor().tolist() == [i - 3.5 for i in range(8)]


def _less_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0", "I", "R", "P"])
def test_gradcheck_is_that_of_the_whole_function(codes: str) -> None:
    value = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    x = distribute_tensor(value, cached_mesh(4), placements(codes)).requires_grad_()
    y = torch.linspace(1, 2, 6, dtype=torch.float64, requires_grad=True)

    def fn(a: Any, b: Any) -> Any:
        return (a * a).cumsum(0), b.exp()

    assert torch.autograd.gradcheck(fn, (x, y))
    assert torch.autograd.gradgradcheck(lambda a: a.pow(3), x)
    assert not torch.autograd.gradcheck(lambda a: a * a.detach(), x, raise_exception=False)


@pytest.mark.ranks(4, pool=True)
def test_undefined_gradients_pass_through_moves_and_hooks() -> None:
    seen = []
    for codes in ("I", "P"):
        x = distribute_tensor(torch.ones(4), cached_mesh(4), placements(codes)).requires_grad_()
        y = x.redistribute(placements("R" if codes == "I" else "I"))
        y.register_hook(seen.append)
        z = _Nothing.apply(y)
        assert torch.autograd.grad(z.sum(), [x], allow_unused=True) == (None,)
    assert seen == [None, None]


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


@pytest.mark.ranks(4, pool=True)
def test_collate_stacks_the_whole_tensors() -> None:
    from torch.utils.data import DataLoader, TensorDataset

    batch = next(iter(DataLoader([_sharded(), _sharded() + 1], batch_size=2)))  # type: ignore[arg-type]
    assert isinstance(batch, DTensor)
    assert batch.full_tensor().tolist() == [list(range(8)), list(range(1, 9))]
    with implicit_communication("allow"):
        (rows,) = next(iter(DataLoader(TensorDataset(_sharded()), batch_size=3)))
    assert rows.full_tensor().tolist() == [0, 1, 2]


@pytest.mark.ranks(4, pool=True)
def test_flops_are_those_of_this_rank() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    mesh = cached_mesh(4)
    x = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    w = distribute_tensor(torch.ones(6, 5), mesh, [Replicate()])
    with FlopCounterMode(display=False) as counter:
        x @ w
    assert counter.get_total_flops() == 2 * 8 * 6 * 5 // 4


@pytest.mark.ranks(4, pool=True)
def test_profiler_sees_the_local_operators() -> None:
    from torch.profiler import ProfilerActivity, profile

    x, w = _sharded().view(4, 2), distribute_tensor(torch.ones(2, 3), cached_mesh(4), [Replicate()])
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        x @ w
    shapes = [e.input_shapes for e in profiler.events() if e.name == "aten::mm"]
    assert [list(map(list, s)) for s in shapes] == [[[1, 2], [2, 3]]]


@pytest.mark.ranks(4, pool=True)
def test_anomaly_mode_finds_the_operator_on_all_ranks() -> None:
    import warnings

    x = distribute_tensor(torch.zeros(8), cached_mesh(4), [Shard(0)]).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError, match="SqrtBackward0"):
            (x.sqrt() * 0).sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo about itself
@pytest.mark.fake_ranks(4, ranks=[0])
def test_compile_runs_dtensors_in_the_interpreter(rank: int) -> None:
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), [Replicate()])
    assert torch.compile(lambda a: (a * 2).sum() + 1, backend="eager")(x).item() == 57.0
    plain = torch.compile(lambda a: a + torch.tensor([1.0, 2.0]), backend="eager", fullgraph=True)
    assert plain(torch.zeros(2)).tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo about itself
@pytest.mark.ranks(2)
def test_compiled_function_communicates() -> None:
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    y = torch.compile(lambda a: a - a.mean(), backend="eager")(x)
    assert y.full_tensor().tolist() == [i - 3.5 for i in range(8)]


@pytest.mark.ranks(4, pool=True)
def test_swap_tensors() -> None:
    mesh = cached_mesh(4)
    a, b = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)]), distribute_tensor(torch.ones(3), mesh, [Replicate()])
    torch.utils.swap_tensors(a, b)
    assert a.shape == (3,)
    assert b.shape == (8,)
    assert b.full_tensor().tolist() == list(range(8))


@pytest.mark.ranks(4, pool=True)
def test_distributed_checkpoint_any_layout_into_any_other(tmp_path: Any) -> None:
    import torch.distributed.checkpoint as dcp
    import torch.distributed.checkpoint.api

    mesh = cached_mesh(2, 2)
    value = torch.arange(35.0).view(7, 5)
    layouts = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()], [Shard(0), Shard(0)]]
    for i, source in enumerate(layouts):
        path = tmp_path / str(i)
        dcp.save({"w": distribute_tensor(value, mesh, source), "n": 3}, checkpoint_id=path)
        for target in layouts:
            state = {"w": distribute_tensor(torch.zeros(7, 5), mesh, target), "n": 0}
            dcp.load(state, checkpoint_id=path)
            assert torch.equal(state["w"].full_tensor(), value)  # type: ignore[attr-defined]
            assert state["n"] == 3
    with pytest.raises(dcp.api.CheckpointException, match="pending sum"):
        dcp.save({"w": distribute_tensor(value, mesh, [Partial(), Replicate()])}, checkpoint_id=tmp_path / "p")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Dynamo about itself
@pytest.mark.ranks(1)
def test_plain_programs_compile_as_without_this_package() -> None:
    def program(x: torch.Tensor) -> Any:
        y = torch.func.grad(lambda a: torch.vmap(lambda b: b * b)(a).sum())(x)
        z = torch.func.jvp(lambda a: a * a, (x,), (x,))[1]
        norm = nn.utils.get_total_norm([x, y])
        picked = torch.cond(x.sum() > 0, lambda a: a.clone(), lambda a: -a, (x,))
        return y, z, norm, picked, torch.tensor([1.0]) + torch.as_tensor([2.0])

    x = torch.tensor([1.0, 2.0])
    y, z, norm, picked, three = torch.compile(program, backend="eager", fullgraph=True)(x)
    assert y.tolist() == z.tolist() == [2, 8] or (y.tolist(), z.tolist()) == ([2, 4], [2, 8])
    assert norm.item() == pytest.approx((1 + 4 + 4 + 16) ** 0.5)
    assert (picked.tolist(), three.item()) == ([1, 2], 3)
    assert torch.func.linearize(lambda a: a * a, x)[1](x).tolist() == [2, 8]


@pytest.mark.ranks(4, pool=True)
def test_control_flow_follows_the_whole_value() -> None:
    x = distribute_tensor(torch.arange(8.0), cached_mesh(4), [Shard(0)])
    assert torch.cond(x.sum() > 27, lambda a: a + 1, lambda a: a - 1, (x,)).full_tensor().tolist() == list(range(1, 9))
    (y,) = torch.while_loop(lambda a: a.sum() < 100, lambda a: (a * 2,), (x,))
    assert y.full_tensor().tolist() == [4.0 * i for i in range(8)]


class _Triangle(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("kind", ["own", "spectral_norm", "weight_norm"])
def test_parametrizations(kind: str) -> None:
    """They keep the parameter object, and give it other memory by `set_`."""
    value = torch.linspace(-1, 2, 24).view(4, 6)
    x = torch.ones(2, 6)
    weights, grads = [], []
    for ours in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(6, 4, bias=False)
        module.weight = nn.Parameter(distribute_tensor(value, cached_mesh(4), [Shard(0)]) if ours else value.clone())
        kept = module.weight
        if kind == "own":
            nn.utils.parametrize.register_parametrization(module, "weight", _Triangle())
            assert module.parametrizations.weight.original is kept
        else:
            getattr(nn.utils.parametrizations, kind)(module)
        with implicit_communication("allow"):
            module(distribute_tensor(x, cached_mesh(4), [Replicate()]) if ours else x).pow(2).sum().backward()
            nn.utils.parametrize.remove_parametrizations(module, "weight")
            weights.append(module.weight.detach())
            grads += [p.grad for p in module.parameters() if p.grad is not None]
    torch.testing.assert_close(weights[1].full_tensor(), weights[0])
    assert module.weight.placements == (Shard(0),)
