"""Passes over programs: what each does to what is sent, and that the bits stay those of the dynamic path."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import Replicate, Shard, Varying, distribute_tensor, explain, parallelize_module, static
from vescale_dtensor._comm import buffers
from vescale_dtensor._comm import gradients as gradient_buckets
from vescale_dtensor._static import passes
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)
ALL = tuple(passes.PASSES)
PLAN = {
    "parameter": {r"up\.\d\.(weight|bias)": {"tp": Shard(0)}, r"down\.\d\.weight": {"tp": Shard(1)}},
    "forward": {"input": {"dp": Shard(0)}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.ModuleList(nn.Linear(8, 12) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(12, 8) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return self.head(x).square().mean()


def nets(number: int) -> list[nn.Module]:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = Net()
    return [parallelize_module(copy.deepcopy(net), mesh, PLAN) for _ in range(number)]


def batch(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.to_local() for p in net.parameters()]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def step(net: nn.Module, number: int = 0) -> None:
    net(batch(number)).backward()


def sent(net: nn.Module) -> explain:
    with explain() as seen:
        step(net)
    return seen


@RANKS
@pytest.mark.parametrize("chosen", [(), ("bucket",), ("bucket", "overlap"), ALL], ids=" ".join)
def test_gradients_in_buckets_have_the_bits_of_the_dynamic_path(
    chosen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_buckets, "BUCKET_BYTES", 600)  # several buckets
    dynamic, fixed = nets(2)
    static(fixed, passes=chosen)
    for number in range(5):
        for net in (dynamic, fixed):
            step(net, number)
            if number == 2:  # gradients add up
                step(net, number + 10)
            if number == 3:  # one backward through two calls: each gradient is summed once
                (net(batch(20)) * net(batch(21))).backward()
            if number == 4:  # each call has its own
                losses = net(batch(22)), net(batch(23))
                losses[1].backward()
                losses[0].backward()
        same(gradients(dynamic), gradients(fixed))
        if number != 1:
            for net in (dynamic, fixed):
                net.zero_grad()
    code = fixed.static_code()
    assert ("= bucket([" in code) == ("bucket" in chosen)
    assert ("= door([" in code) == ("overlap" in chosen)
    assert "overlap" in chosen or "cast(" not in code or not chosen


@RANKS
def test_calls_that_share_a_backward_share_its_messages() -> None:
    dynamic, fixed = nets(2)
    static(fixed)
    for _ in range(3):
        step(fixed)
    counts = []
    for net in (dynamic, fixed):
        net.zero_grad()
        with explain() as seen:
            (net(batch(0)) + net(batch(1))).backward()
        counts.append(sum(r.phase == "backward" and r.axes == ("dp",) for r in seen.records))
    same(gradients(dynamic), gradients(fixed))
    assert counts == [17, 2]  # the first call of a module sends one by one; norm goes over both axes


@RANKS
def test_one_message_instead_of_many_and_what_explain_tells() -> None:
    plain, exact, loose = nets(3)
    static(exact)
    static(loose, exact=False)
    for _ in range(3):
        for net in (plain, exact, loose):
            step(net)
    reports = [sent(net) for net in (plain, exact, loose)]
    grads = [gradients(net) for net in (plain, exact, loose)]
    same(grads[0], grads[1])
    for a, b in zip(grads[0], grads[2], strict=True):
        torch.testing.assert_close(a, b)
    for report in reports[1:]:
        assert sum(r.num_bytes for r in report.records) == sum(r.num_bytes for r in reports[0].records)
        assert {(r.cause, r.op) for r in report.records} >= {("gradients", "bucket"), ("static", "shift")}
        assert all("static program" in r.line for r in report.records if r.cause == "static")
        assert "static program of Net\nbucket: the gradients of 1" in report.table()
    backward = [sum(r.phase == "backward" and r.axes == ("dp",) for r in report.records) for report in reports]
    assert backward == [1, 1, 1]
    assert reports[0].passes == {}


@RANKS
def test_more_than_two_ranks_share_messages_with_the_bits_of_the_dynamic_path() -> None:
    mesh = cached_mesh(4, names=("dp",))
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    nets = [parallelize_module(copy.deepcopy(whole), mesh, {"forward": {"input": {"dp": Shard(0)}}}) for _ in range(3)]
    static(nets[1])
    static(nets[2], exact=False)
    x = batch(0)
    counts, found = [], []
    for net in nets:
        for _ in range(3):
            net(x).square().sum().backward()
            got = gradients(net)
            net.zero_grad()
        found.append(got)
        with explain() as seen:
            net(x).square().sum().backward()
        counts.append(sum(r.phase == "backward" for r in seen.records))
    same(found[0], found[1])
    for a, b in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(a, b)
    assert counts == [1, 1, 1]
    for net in nets[1:]:
        assert "the gradients of 4 parameters go in 1 bucket" in net.static_code()


@RANKS
def test_a_move_that_was_made_before_is_left_out() -> None:
    mesh = cached_mesh(4, names=("tp",))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])

    def uses(x: Tensor) -> Tensor:
        return x.redistribute([Replicate()]) * 2 + x.redistribute([Replicate()])

    def writes(x: Tensor) -> Tensor:
        y = x * 1
        first = y.redistribute([Replicate()]) * 2
        y.add_(1)
        return first + y.redistribute([Replicate()])

    def gathers(function: Callable[[Tensor], Tensor], *args: Tensor, **options: object) -> int:
        fixed = static(function, **options)
        for _ in range(4):
            assert torch.equal(fixed(*args).to_local(), function(*args).to_local())
        with explain() as seen:
            fixed(*args)
        assert seen.passes
        return sum(r.kind == "all_gather" for r in seen.records)

    assert gathers(uses, x) == 1
    assert gathers(uses, x, passes=()) == 2
    assert gathers(writes, x) == 2
    needs = x.clone().requires_grad_()
    assert gathers(uses, needs) == 1

    def uses(x: Tensor) -> Tensor:
        return x.redistribute([Varying()]) * 2 + x.redistribute([Varying()])

    assert gathers(uses, needs) == 2  # its backward would scatter a sum instead of adding what was scattered
    assert gathers(uses, needs, exact=False) == 1
    fixed = static(uses, exact=False)
    for _ in range(4):
        needs.grad = None
        fixed(needs).sum().backward()
        assert needs.grad.full_tensor().tolist() == [3.0] * 8


@RANKS
def test_moves_travel_while_other_steps_run_both_ways() -> None:
    mesh = cached_mesh(4, names=("tp",))
    torch.manual_seed(0)
    w = distribute_tensor(torch.randn(8, 8), mesh, [Replicate()])

    def works(x: Tensor, w: Tensor) -> Tensor:
        whole = x.redistribute([Replicate()])
        beside = torch.tanh(w) @ w
        total = (x * x).sum()
        return (whole @ beside).sum() * 0.1 + total.redistribute([Replicate()])

    fixed = static(works)
    results: list[list[Tensor]] = []
    for number in range(4):
        for function in (works, fixed):
            x = distribute_tensor(batch(number), mesh, [Shard(0)]).requires_grad_()
            v = w.clone().requires_grad_()
            loss = function(x, v)
            (first,) = torch.autograd.grad(loss, [x], create_graph=True)
            first.square().sum().backward(retain_graph=True)
            loss.backward()
            results.append([loss.to_local(), first.to_local(), x.grad.to_local(), v.grad.to_local()])
        same(results[-2], results[-1])
        with torch.no_grad():
            assert torch.equal(works(x, v).to_local(), fixed(x, v).to_local())
    lines = [line.strip() for line in fixed.static_code().splitlines()]
    begun = next(i for i, line in enumerate(lines) if "= begin(x0" in line)
    ended = next(i for i, line in enumerate(lines) if "= end(" in line)
    assert any("matmul" in line for line in lines[begun:ended])
    assert "overlap: " in fixed.static_code()
    assert "begin(" not in _code(works, distribute_tensor(batch(0), mesh, [Shard(0)]), w)


def _code(function: Callable[..., Tensor], *args: Tensor) -> str:
    fixed = static(function, passes=("bucket",))
    for _ in range(3):
        fixed(*args)
    code: str = fixed.static_code()
    assert "def program" in code
    return code


@RANKS
def test_memory_of_messages_is_kept_but_not_from_those_who_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "LEAST_BYTES", 1)
    (net,) = nets(1)
    static(net, exact=False)

    def places() -> set[int]:
        return {p.grad.to_local().untyped_storage().data_ptr() for p in net.parameters()}

    for _ in range(3):
        net.zero_grad()
        step(net)
    used = places()
    net.zero_grad()
    step(net, 1)
    kept = [p.grad for p in net.parameters()]
    before = [g.to_local().clone() for g in kept]
    assert used & places()
    net.zero_grad()
    step(net, 2)
    same([g.to_local() for g in kept], before)
    assert not any(torch.equal(a.to_local(), b) for a, b in zip(kept, gradients(net), strict=True))


@RANKS
def test_frozen_parameters_and_second_derivatives() -> None:
    dynamic, fixed = nets(2)
    static(fixed)
    for number in range(4):
        for net in (dynamic, fixed):
            net.up.requires_grad_(number % 2 == 0)
            net.zero_grad()
            parameters = [p for p in net.parameters() if p.requires_grad]
            first = torch.autograd.grad(net(batch(number)), parameters, create_graph=True)
            sum(g.square().sum() for g in first).backward()
        same(
            [p.grad.to_local() for p in dynamic.parameters() if p.grad is not None],
            [p.grad.to_local() for p in fixed.parameters() if p.grad is not None],
        )


def test_a_pass_that_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"passes: expected some of \('reuse', .*got \['fuse'\]"):
        static(nn.Linear(2, 2), passes=["fuse"])
    with pytest.raises(ValueError, match="got 'bucket'"):
        static(nn.Linear(2, 2), passes="bucket")
