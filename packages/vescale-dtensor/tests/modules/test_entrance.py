"""Gradients of a parallelized module travel in buckets from its second call on, and are those of one by one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Replicate, Shard, Varying, distribute_tensor, explain, parallelize_module, static
from vescale_dtensor._comm import gradients
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


class Net(nn.Module):
    """Layers, of which a call may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight

    def forward(self, x: Tensor, skip: int = -1, again: bool | None = None) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x) if again is None else checkpoint(layer, x, use_reentrant=again))
        return x.square().sum()


def pair_of(shape: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    mesh = cached_mesh(*shape, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    plan = {"forward": {"input.x": {"dp": Shard(0), "tp": Shard(0)}}}
    return net, parallelize_module(copy.deepcopy(net), mesh, plan)


def batch(number: int = 0) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def same(single: nn.Module, parallel: nn.Module) -> None:
    for (name, a), b in zip(single.named_parameters(), parallel.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-12, atol=1e-12)


@RANKS
@pytest.mark.parametrize(("shape", "size"), [((2, 2), 1 << 20), ((2, 2), 200), ((1, 4), 200), ((1, 4), 1)])
def test_gradients_are_those_of_one_device(shape: tuple[int, int], size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", size)  # one bucket, some, one for each
    pair = pair_of(shape)
    for step in range(4):
        for net in pair:
            net.zero_grad(set_to_none=step % 2 == 0)
            net(batch(step)).backward()
            net(batch(step + 9), skip=1).backward()
            (net(batch(20)) * net(batch(21))).backward()
            for again in (False, True):
                net(batch(22).requires_grad_(), again=again).backward()
            losses = net(batch(23)), net(batch(24), skip=1)
            losses[1].backward()
            losses[0].backward()
            with torch.no_grad():
                net(batch(25))
            net.layers[1].requires_grad_(step % 2 == 1)
        same(*pair)
    for net in pair:
        net.requires_grad_(True)
        net.zero_grad()
        first = torch.autograd.grad(net(batch()), list(net.parameters()), create_graph=True)
        sum(g.square().sum() for g in first).backward()
    same(*pair)


@RANKS
def test_gradients_of_two_ranks_and_of_more_are_one_message() -> None:
    counts = []
    for shape in ((2, 2), (4, 1)):
        torch.manual_seed(0)
        net = parallelize_module(
            Net(), cached_mesh(*shape, names=("dp", "tp")), {"forward": {"input.x": {"dp": Shard(0)}}}
        )
        for _ in range(2):
            with explain() as seen:
                net(batch()).backward()
            sent = [r for r in seen.records if r.phase == "backward"]
            counts.append(len(sent))
        assert sum(r.num_bytes for r in sent) == (2 * 16 + 3 * 4) * 8
        assert {(r.cause, r.op, r.module) for r in sent} == {("gradients", "bucket", "")}
    assert counts == [5, 1, 5, 1]


@RANKS
def test_inputs_that_need_gradients_are_no_members_of_buckets() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(nn.Linear(4, 4, dtype=torch.float64), mesh, {"parameter": {"weight": {"tp": Shard(0)}}})
    for _ in range(3):
        x = distribute_tensor(batch(), mesh, [Shard(0), Replicate()]).requires_grad_()
        net(x).square().sum().backward()
        assert x.grad.placements == x.placements
    root = net._vescale_root
    members = {id(member.parameter()) for member in root.entrance._members.values()}
    assert id(net.weight) in members <= {id(p) for p in net.parameters()}


@RANKS
def test_what_changes_between_calls_is_seen() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    whole = Net()
    nets = [whole, parallelize_module(copy.deepcopy(whole), mesh, {"forward": {"input.x": {"dp": Shard(0)}}})]
    for step in range(6):
        for net in nets:
            net.zero_grad()
            if step == 2:
                fresh = torch.full((4,), 0.5, dtype=torch.float64)
                if net is not whole:
                    fresh = distribute_tensor(fresh, mesh, [Replicate(), Replicate()])
                net.layers[1].bias = nn.Parameter(fresh)
            if step == 4:
                net.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
            if step == 5:
                with pytest.raises(RuntimeError, match=r"mat1 and mat2|reduction dim"):
                    net(torch.ones(8, 3, dtype=torch.float64))
            net(batch(step)).backward()
        same(*nets)
    twin = copy.deepcopy(nets[1])
    for net in (whole, twin):
        net.zero_grad()
        net(batch()).backward()
    same(whole, twin)


PLAN = {
    "parameter": {r"up\.weight": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {
        "input": {"dp": Shard(0), "tp": Shard(1)},
        "up.input": {"tp": Varying()},
        "down.output": {"tp": Shard(1)},
    },
}


class Layer(nn.Module):
    """Its norm's gradients are partial over both axes, those of its products over one: two buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`."""
        return self.down(F.gelu(self.up(self.norm(x))))


@RANKS
def test_a_recorded_function_around_a_module_of_several_buckets_stays_static() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    alone = Layer()
    whole = torch.randn(4, 6, 4)
    alone(whole).square().sum().backward()
    model = Layer()
    model.load_state_dict(alone.state_dict())
    parallelize_module(model, mesh, PLAN)
    loss = static(lambda x: model(x).square().sum(), modules=[model])
    x = DTensor.from_local(whole.chunk(2)[mesh.get_local_rank("dp")], mesh, [Shard(0), Replicate()], run_check=False)
    for _ in range(4):  # a StaticWarning is an error
        model.zero_grad()
        loss(x).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    assert "the gradients of 4 parameters go in 2 buckets" in loss.static_code()


class Rows(nn.Module):
    """Layers cut by rows, whose biases one rank adds to a pending sum; `twice` uses the second one again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: Tensor, twice: bool = False, change: bool = False) -> Tensor:
        x = torch.tanh(self.up(x))
        if change:
            with torch.no_grad():
                self.down.bias.mul_(1.5)
        y = self.down(x)
        return (y + self.down(x * 2) if twice else y).square().sum()


ROWS = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {"input.x": {"dp": Shard(0)}},
}


def rows_of(shape: tuple[int, int]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = Rows()
    return net, parallelize_module(copy.deepcopy(net), cached_mesh(*shape, names=("dp", "tp")), ROWS)


@RANKS
@pytest.mark.parametrize("size", [1 << 20, 100])
def test_biases_of_pending_sums_travel_with_the_others(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "BUCKET_BYTES", size)  # one bucket, or several behind a door
    single, net = rows_of((2, 2))
    counts, bits = [], []
    for _ in range(3):
        net.zero_grad()
        with explain() as seen:
            net(batch()).backward()
        counts.append(sum(r.phase == "backward" and r.axes == ("dp",) for r in seen.records))
        bits.append([p.grad.to_local().clone() for p in net.parameters()])
    assert counts == ([4, 1, 1] if size > 100 else [4, *counts[1:]])
    for later in bits[1:]:
        assert all(map(torch.equal, later, bits[0]))  # the first call casts each by itself
    single(batch()).backward()
    same(single, net)


@RANKS
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_a_moved_cast_serves_one_use(shape: tuple[int, int]) -> None:
    pair = rows_of(shape)
    for _ in range(3):
        for net in pair:
            net.zero_grad()
            net(batch(), twice=True).backward()
            (net(batch(1)) * net(batch(2), twice=True)).backward()
            first, second = net(batch(3), twice=True), net(batch(4))
            second.backward()
            first.backward()
            with torch.no_grad():
                net(batch(5))
            net(batch(6), change=True).backward()
            net.down.bias.requires_grad_(False)
            net(batch(7)).backward()
            net.down.bias.requires_grad_(True)
        same(*pair)
        torch.testing.assert_close(pair[1].down.bias.full_tensor(), pair[0].down.bias, rtol=1e-12, atol=1e-12)
    assert not pair[1]._vescale_root.entrance._ready
    for net in pair:
        net.zero_grad()
        grads = torch.autograd.grad(net(batch(), twice=True), list(net.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()
    same(*pair)


@RANKS
def test_a_program_gives_the_bits_of_moved_casts() -> None:
    for twice in (False, True):
        _, net = rows_of((4, 1))
        _, other = rows_of((4, 1))
        program = static(other)
        for number in range(4):
            for one in (net, program):
                one.zero_grad()
                one(batch(number), twice=twice).backward()
            assert all(
                torch.equal(a.grad.to_local(), b.grad.to_local())
                for a, b in zip(net.parameters(), other.parameters(), strict=True)
            )
