"""Named plans: the registry, and the nanoGPT plan on a small GPT against one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import DTensor, Replicate, Shard, distribute_tensor, implicit_communication
from vescale_dtensor._explain import explain
from vescale_dtensor._modules import parallelize_module, register_plan, registry
from vescale_dtensor.errors import PlanError
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)
VOCAB, WIDTH, HEADS, LENGTH = 21, 16, 4, 8


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))
        self.resid_dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.size()
        q, k, v = (p(x).view(b, t, HEADS, d // HEADS).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.o_proj(y.transpose(1, 2).contiguous().view(b, t, d)))


class Fused(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias), nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.size()
        q, k, v = (p.view(b, t, HEADS, d // HEADS).transpose(1, 2) for p in self.c_attn(x).split(d, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, d))


class MLP(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias), nn.Linear(4 * WIDTH, WIDTH, bias)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, bias: bool, fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, bias=bias), nn.LayerNorm(WIDTH, bias=bias)
        self.attn = Fused(bias) if fused else Attention(bias)
        self.mlp = MLP(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, *, bias: bool = True, tied: bool = False, fused: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList(Block(bias, fused) for _ in range(2))
        self.ln_f = nn.LayerNorm(WIDTH, bias=bias)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        for block in self.h:
            x = block(x)
        logits = self.head(self.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def reference(**kwargs: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**kwargs).double()


def batch(rows: int = 4, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    data = torch.randint(VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def steps(model: nn.Module, idx: Tensor, targets: Tensor) -> list[Tensor]:
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        _, loss = model(idx, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


MESHES = {
    "dp4": ((4,), ("dp",)),
    "tp4": ((4,), ("tp",)),
    "2x2": ((2, 2), ("dp", "tp")),
    "4x1": ((4, 1), ("dp", "tp")),
    "1x4": ((1, 4), ("dp", "tp")),
}
MODELS: dict[str, dict[str, bool]] = {
    "plain": {},
    "no-bias": {"bias": False},
    "tied": {"tied": True},
    "fused": {"fused": True},
}


CASES = [("plain", mesh, "plain") for mesh in MESHES]
CASES += [(kind, mesh, "plain") for kind in ("no-bias", "tied", "fused") for mesh in ("2x2", "tp4")]
CASES += [("plain", "dp4", "sharded"), ("tied", "2x2", "sharded")]


@RANKS
@pytest.mark.parametrize(("kind", "mesh", "inputs"), CASES)
def test_nanogpt_equals_one_device(kind: str, mesh: str, inputs: str) -> None:
    shape, names = MESHES[mesh]
    device_mesh = cached_mesh(*shape, names=names)
    model, single = reference(**MODELS[kind]), reference(**MODELS[kind])
    parallelize_module(model, device_mesh, "nanogpt")
    idx, targets = batch()
    expected = steps(single, idx, targets)
    if inputs == "sharded":
        placements = [Shard(0) if n == "dp" else Replicate() for n in names]
        idx, targets = (distribute_tensor(t, device_mesh, placements) for t in (idx, targets))
    with implicit_communication("error"):
        got = steps(model, idx, targets)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-10)
    for (name, p), (_, q) in zip(model.named_parameters(), single.named_parameters(), strict=True):
        assert isinstance(p, DTensor), name
        torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-8, atol=1e-10, msg=name)
    if kind == "tied":
        assert model.head.weight is model.wte.weight


@RANKS
@pytest.mark.parametrize(("rows", "length"), [(5, 7), (3, 5), (1, 8)])
def test_nanogpt_with_uneven_batches_and_sequences(rows: int, length: int) -> None:
    model, single = reference(), reference()
    parallelize_module(model, cached_mesh(2, 2, names=("dp", "tp")), "nanogpt")
    idx, targets = batch(rows, length)
    expected, got = steps(single, idx, targets), steps(model, idx, targets)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-10)


@RANKS
def test_nanogpt_cuts_what_it_says() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    model = parallelize_module(reference(), mesh, "nanogpt")
    placed = {n: p.placements[1] for n, p in model.named_parameters()}
    assert all(p.placements[0] == Replicate() for p in model.parameters())
    for name in ("wte.weight", "head.weight", "h.1.attn.q_proj.weight", "h.0.attn.v_proj.bias", "h.0.mlp.up.weight"):
        assert placed[name] == Shard(0), name
    assert placed["h.1.mlp.down.weight"] == placed["h.0.attn.o_proj.weight"] == Shard(1)
    assert placed["wpe.weight"] == placed["h.0.ln_1.weight"] == placed["h.0.mlp.down.bias"] == Replicate()
    seen: list[Any] = []
    model.h[0].ln_1.register_forward_hook(lambda m, a, out: seen.append(out.placements))
    idx, targets = batch()
    with explain() as trace:
        logits, loss = model(idx, targets)
        loss.backward()
    assert seen == [(Shard(0), Shard(1))], "norms work on their share of the sequence"
    assert logits.placements == (Shard(0), Shard(2))
    assert not trace.implicit
    by_plan = [r.kind for r in trace.records if r.phase == "forward" and r.cause == "plan"]
    # the embedding, attention and mlp of each block, each scattered after it was gathered, and the head
    assert (by_plan.count("reduce_scatter"), by_plan.count("all_gather")) == (5, 5)


@RANKS
def test_nanogpt_with_a_plan_of_ones_own() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    own = {"parameter": {"wpe.weight": {"tp": Shard(1)}}, "forward": {"wpe.output": [Replicate(), Replicate()]}}
    model, single = reference(), reference()
    parallelize_module(model, mesh, ["nanogpt", own])
    assert model.wpe.weight.placements == (Replicate(), Shard(1))
    assert model.head.weight.placements == (Replicate(), Shard(0))
    idx, targets = batch()
    for mine, theirs in zip(steps(model, idx, targets), steps(single, idx, targets), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs, rtol=1e-10, atol=1e-10)


@RANKS
def test_copies_of_a_gpt() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    model = parallelize_module(reference(), mesh, "nanogpt")
    twin = copy.deepcopy(model)
    idx, targets = batch()
    assert torch.equal(model(idx, targets)[1].full_tensor(), twin(idx, targets)[1].full_tensor())


@RANKS
def test_models_that_are_no_gpt() -> None:
    with pytest.raises(PlanError, match=r'the plan "nanogpt" found no module \'wte\' in Linear'):
        parallelize_module(nn.Linear(2, 2), cached_mesh(4, names=("tp",)), "nanogpt")


def test_names_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_plans", dict(registry._plans))
    register_plan("mine", {"parameter": {}})
    with pytest.raises(ValueError, match="name = 'mine' is taken"):
        register_plan("mine", {})
    with pytest.raises(ValueError, match="name = 'auto' is taken"):
        register_plan("auto", {})
    with pytest.raises(TypeError, match="must be a mapping or a function"):
        register_plan("other", [])  # type: ignore[arg-type]


@RANKS
def test_plugins_and_users_name_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    monkeypatch.setattr(registry, "_plans", dict(registry._plans))
    monkeypatch.setattr(registry, "_plugins_asked", False)
    lenient = {"parameter": {"weight": {"tp": Shard(0), "pp": Shard(1)}, "no such": {"tp": Shard(0)}}}
    monkeypatch.setattr("vescale_dtensor._hooks.register_plans", lambda registry: registry.register("plugged", lenient))
    model = parallelize_module(nn.Linear(4, 4), mesh, "plugged", src_data_rank=0)
    assert model.weight.placements == (Replicate(), Shard(0))
