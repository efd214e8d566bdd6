"""Compiled programs against the dynamic path, and what must not be compiled."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import (
    DTensor,
    Partial,
    RaggedShard,
    Replicate,
    Shard,
    distribute_tensor,
    parallelize_module,
    static,
)
from vescale_dtensor._comm import record
from vescale_dtensor.errors import DTensorError
from vescale_testing import cached_mesh

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
TRACED = "aot_eager"
"""Traces as inductor does, and runs torch's own kernels: the same bits, and no compiler is needed."""
PLAN = {
    "parameter": {
        r".*up\.(weight|bias)": {"tp": Shard(0)},
        r".*down\.weight": {"tp": Shard(1)},
        "embed.weight": {"tp": Shard(0)},
    },
    "forward": {"input": {"dp": Shard(0)}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Token numbers to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block()])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.embed(tokens) + torch.arange(tokens.size(1)).view(1, -1, 1) * 0.1
        for block in self.blocks:
            x = block(x)
        logits = x @ self.embed.weight.t()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def same(one: Any, two: Any) -> None:
    torch.testing.assert_close(two, one, rtol=0, atol=0)


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def called(function: Callable[..., Any], inputs: list[Tensor], seed: int) -> list[Tensor]:
    """Outputs, gradients, and where the generator stands."""
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(seed)
    made = function(*inputs)
    outputs = [made] if isinstance(made, Tensor) else list(made)
    for y in outputs:
        if y.requires_grad:
            (y * y).sum().backward(retain_graph=True)
    return [*map(local, outputs), *(local(x.grad) for x in inputs if x.grad is not None), torch.rand(1)]


def alike(function: Callable[..., Any], *inputs: Tensor, tolerance: float = 0.0, modules: Any = ()) -> str:
    """Compare a function with its compiled form, bit for bit, and return its code."""
    fixed = static(function, compile=TRACED, modules=modules)
    for seed in range(4):
        expected, found = (called(f, list(inputs), seed) for f in (function, fixed))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    code: str = fixed.static_code()
    assert "def program" in code, code
    return code


@pytest.mark.ranks(4, pool=True, timeout=250)
def test_training_is_that_of_the_dynamic_path_in_one_graph() -> None:
    from torch._dynamo.utils import counters

    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    nets = [parallelize_module(copy.deepcopy(net), mesh, PLAN) for _ in range(3)]
    static(nets[1], passes=("reuse", "bucket"))
    static(nets[2], compile=TRACED)
    counters.clear()
    steps = []
    for net in nets:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        torch.manual_seed(5)
        values: list[Any] = []
        for step in range(4):
            for part in range(2):  # gradients add up
                tokens = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(2 * step + part))
                sent: list[Any] = []
                record.listeners.append(sent.append)
                out = net(tokens)
                out["loss"].backward()
                record.listeners.remove(sent.append)
                values += [local(out["loss"]), local(out["logits"])]
            values += [local(p.grad) for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        values += [local(p) for p in net.parameters()]
        values += [torch.rand(1), int(net.calls)]
        steps.append((values, sent))
    same(steps[0][0], steps[1][0])
    same(steps[0][0], steps[2][0])
    assert steps[1][1] == steps[2][1]
    assert len(steps[2][1]) > 6
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def moved(*placements: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * 2).redistribute(placements=list(placements)).sin()


OPERATORS: dict[str, tuple[Callable[..., Any], list[Any], tuple[int, ...]]] = {
    "gather uneven": (moved(Replicate()), [Shard(0)], (7, 3)),
    "exchange": (moved(Shard(1)), [Shard(0)], (8, 5)),
    "ragged": (moved(Replicate()), [RaggedShard((0,), (1, 2))], (6, 2)),
    "scatter a sum": (lambda x: (x.sum(1).redistribute(placements=[Shard(0)])).sin(), [Shard(1)], (8, 8)),
    "pending sum": (moved(Partial()), [Replicate()], (8, 2)),
    "order in memory": (lambda x: x.t().redistribute(placements=[Replicate()]).t().view(-1).cos(), [Shard(0)], (4, 4)),
    "softmax": (lambda x: torch.softmax(x, 1), [Shard(1)], (3, 8)),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), [Shard(0)], (8, 3)),
    "window": (lambda x: x[1:-1].cos(), [Shard(0)], (8, 3)),
    "ring": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), [Shard(2)], (1, 2, 8, 4)),
    "rand_like": (lambda x: torch.rand_like(x) * x + torch.randn_like(x), [Shard(0)], (8, 3)),
    "bernoulli": (lambda x: torch.bernoulli(x.detach().sigmoid()) * x, [Shard(0)], (8, 3)),
    "dropout": (lambda x: F.dropout(F.dropout(x, 0.5) + 1, 0.2), [Shard(0)], (8, 3)),
}


@pytest.mark.ranks(2, pool=True, timeout=250)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_moves_have_the_bits_of_the_dynamic_path(name: str) -> None:
    function, placements, shape = OPERATORS[name]
    mesh = cached_mesh(2, names=("tp",))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    # A graph adds the gradients of a tensor that is used several times in another order.
    tolerance = 1e-6 if name in ("batch norm", "ring") else 0.0
    alike(function, distribute_tensor(x, mesh, placements).requires_grad_(), tolerance=tolerance)


def test_draws_of_plain_tensors_keep_their_order() -> None:
    def draws(x: Tensor) -> tuple[Tensor, Tensor]:
        a = torch.rand(3)
        y = F.dropout(x * 2, 0.5) + torch.randn_like(x)
        b = torch.empty(3).uniform_(2, 3)
        c = torch.randint(0, 9, (3,)) + torch.bernoulli(a) + torch.normal(b, 0.1)
        return y * torch.empty(3).exponential_(), a - b + c.double() * torch.randperm(3)

    alike(draws, torch.ones(2, 3, requires_grad=True))
    alike(lambda x: F.dropout(x.expand(4, 3), 0.5), torch.ones(3, requires_grad=True))


def test_what_draws_or_reads_unseen_is_an_error() -> None:
    x = torch.ones(1, 2, 4, 4, requires_grad=True)

    def attends(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    def into(x: Tensor) -> Tensor:
        return x * torch.rand(4, out=torch.empty(4))

    for function, operator in ((attends, "bernoulli|dropout|attention"), (into, "rand")):
        fixed = static(function, compile=TRACED)
        for _ in range(2):
            fixed(x)
        with pytest.raises(DTensorError, match=rf"cannot be compiled: aten.*({operator}).* draws random numbers"):
            fixed(x)
    alike(lambda x: F.scaled_dot_product_attention(x, x, x), x, tolerance=1e-6)


class Reads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * float(x.sum())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def test_errors_of_the_program_stay_what_they_are_and_those_of_the_compiler_are_explained() -> None:
    roots = static(lambda x: torch.linalg.cholesky(x) + 1, compile=TRACED)
    for _ in range(2):
        roots(torch.eye(2))
    with pytest.raises(torch.linalg.LinAlgError):
        roots(-torch.eye(2))
    same(roots(torch.eye(2)), torch.eye(2) + 1)
    reads = static(lambda x: Reads.apply(x), compile=TRACED)
    for _ in range(2):
        reads(torch.ones(2))
    with pytest.raises(DTensorError, match=r"<lambda> cannot be compiled: .*Leave out compile"):
        reads(torch.ones(2))
    with pytest.raises(ValueError, match=r"compile: expected True or one of \[.*'inductor'.*, got 'nvcc'"):
        static(nn.Linear(2, 2), compile="nvcc")


def test_inputs_results_and_views_are_those_of_the_program() -> None:
    buffer = torch.zeros(3)

    def mixed(x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        out.add_(x.detach()[0])
        y = x * 2
        return x, y, y, x.view(3, 2), y[1], out, x.detach() + 1

    fixed = static(mixed, compile=TRACED)
    for step in range(4):
        x = torch.full((2, 3), step + 1.0, requires_grad=True)
        found = fixed(x, buffer)
        assert found[0] is x
        assert found[1] is found[2]
        assert found[5] is buffer
        assert found[3].data_ptr() == x.data_ptr()
        (found[1].sum() + found[3].sum() * 3 + found[4].sum()).backward()
        assert x.grad is not None
        assert x.grad.tolist() == [[5.0] * 3, [7.0] * 3]
    assert buffer.tolist() == [10.0] * 3
    filled = torch.zeros(2)
    fill = static(lambda out: out.add_(1), compile=TRACED)  # nothing to compile
    for _ in range(4):
        assert fill(filled) is filled
    assert filled.tolist() == [4.0] * 2


def test_many_programs_of_one_region_and_modes_of_autograd() -> None:
    layer = nn.Linear(3, 3)
    calls = static(copy.deepcopy(layer), compile=TRACED, limit=24)
    for size in range(1, 11):  # Dynamo compiles one code object 8 times at most
        for _ in range(3):
            same(layer(torch.ones(size, 3)), calls(torch.ones(size, 3)))
    for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
        for _ in range(4):
            with context:
                same(layer(torch.ones(2, 3)), calls(torch.ones(2, 3)))
    for reentrant in (False, True):
        gradients = []
        for one in (layer, calls):
            x = torch.ones(4, 3, requires_grad=True)
            checkpoint(one, x, use_reentrant=reentrant).sum().backward()
            gradients.append((x.grad, one.weight.grad))
        same(*gradients)
    (grad,) = torch.autograd.grad((calls(x) ** 2).sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        grad.sum().backward()


def test_no_compiler_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fixed = static(lambda x: x.sin() + 1, compile=True)
    for _ in range(2):
        fixed(torch.ones(3))
    with (
        config.patch({"cpp.cxx": ("/nonexistent",), "force_disable_caches": True}),
        pytest.raises(DTensorError, match=r"needs a compiler that this machine lacks .*nonexistent.* CXX"),
    ):
        fixed(torch.ones(3))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler")
@pytest.mark.fake_ranks(2, ranks=[1])
def test_inductor_gives_one_graph_with_its_collectives_in_order(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    for owner, name, value in (  # what takes less time to compile
        (config, "compile_threads", 1),
        (config, "cpp_cache_precompile_headers", False),
        (config.cpp, "vec_isa_ok", True),
    ):
        monkeypatch.setattr(owner, name, value)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8), nn.Dropout(0.25))
    plan = {"parameter": {r"0\.(weight|bias)": {"tp": Shard(0)}, r"2\.weight": {"tp": Shard(1)}}}
    one, two = (parallelize_module(copy.deepcopy(net), mesh, plan) for _ in range(2))
    static(two, compile=True)
    counters.clear()
    sent: list[Any] = []
    record.listeners.append(sent.append)
    for step in range(4):
        outputs = []
        for module in (one, two):
            sent.clear()
            torch.manual_seed(step)
            x = torch.randn(4, 8, requires_grad=True)
            y = module(x)
            (y * y).sum().backward()
            outputs.append((local(y), x.grad, torch.rand(1), [(c.name, c.num_bytes) for c in sent]))
        for a, b in zip(outputs[0][:3], outputs[1][:3], strict=True):
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)
        assert outputs[0][3] == outputs[1][3]
        assert len(sent) == 2  # of the output, and of the gradient of the input
    record.listeners.remove(sent.append)
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(local(b.grad), local(a.grad), rtol=1e-4, atol=1e-5, msg=name)
    assert "def program" in two.static_code()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
