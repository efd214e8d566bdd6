"""Windows, buckets and gradients of one rank: the fake transport divides own sums as if the other ranks held zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm import _hooks
from vescale_comm._gradients import GradientReducer, Lane
from vescale_comm._plan import BufferPlan, Slot
from vescale_comm._transport import FakeTransport
from vescale_comm.errors import CommError, NotFiniteError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))


def reducer_of(module: nn.Module, size: int = 2, **options: Any) -> GradientReducer:
    options.setdefault("wait", True)
    return GradientReducer(list(module.named_parameters()), transport=FakeTransport(size), **options)


def expected(module: nn.Module, loss: Any) -> dict[str, Tensor]:
    """Gradients of one device."""
    names, params = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss(), params, allow_unused=True)
    return dict(zip(names, grads, strict=True))


X = torch.arange(15, dtype=torch.float32).view(5, 3) / 7


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("view", [False, True])
def test_gradients_are_sums_over_ranks(bucket_bytes: int, view: bool) -> None:
    """Ranks that hold zeros halve the gradients; in each way to zero them, and without any, they add up as ever."""
    net = model()
    want = expected(net, lambda: net(X).sum())
    reducer = reducer_of(net, bucket_bytes=bucket_bytes, view=view)
    assert len(reducer.buckets) == (6 if bucket_bytes == 1 else 2 if bucket_bytes == 64 else 1)
    for number, set_to_none in enumerate([True, False, True, False]):
        net.zero_grad(set_to_none=set_to_none)
        reducer.prepare()
        net(X).sum().backward()
        for name, param in net.named_parameters():
            assert torch.equal(param.grad, want[name] / 2), (name, number)
    net(X).sum().backward()
    for name, param in net.named_parameters():  # the fake ranks forgot what was reduced before
        assert torch.equal(param.grad, (want[name] / 2 + want[name]) / 2)
    reducer.close()
    net.zero_grad()
    net(X).sum().backward()
    assert torch.equal(net[0].weight.grad, want["0.weight"])


def test_buckets_are_launched_in_order_while_backward_runs() -> None:
    """From the second window on; the first one learns what backwards inside backwards add to."""
    net = model()
    reducer = reducer_of(net, bucket_bytes=64)
    names = [bucket.names for bucket in reducer.buckets]
    assert names == [["4.bias", "4.weight", "2.bias", "2.weight"], ["0.bias", "0.weight"]]
    seen: list[list[bool]] = []
    net[0].register_full_backward_pre_hook(lambda *_: seen.append([bucket.launched for bucket in reducer.buckets]))
    for _ in range(2):
        net(X.clone().requires_grad_()).sum().backward()
    assert seen[1] == [True, False]
    assert not any(seen[0])


def test_the_order_of_backward_is_learned_once() -> None:
    """Parameters that are registered in the order of use get buckets in the opposite one, and others the right one."""

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    net = Backwards()
    reducer = reducer_of(net, bucket_bytes=80, learn=True)
    x = torch.ones(1, 4)
    want = expected(net, lambda: net(x).sum())
    for step in range(3):
        net.zero_grad()
        net(x).sum().backward()
        for name, param in net.named_parameters():
            if want[name] is None:
                assert param.grad is None
            else:
                assert torch.equal(param.grad, want[name] / 2), (step, name)
        assert {name.split(".")[0] for name in reducer.buckets[0].names} == {"last"}
        assert {name.split(".")[0] for name in reducer.buckets[-1].names} == {"never"}


def test_no_sync_adds_up_and_reduces_once() -> None:
    net = model()
    transport = FakeTransport(2)
    reducer = GradientReducer(list(net.named_parameters()), transport=transport, wait=True)
    parts = [X[:2], X[2:4], X[4:]]
    with reducer.no_sync():
        for part in parts[:2]:
            net(part).sum().backward()
        assert not transport.calls
        for name, grad in expected(net, lambda: net(X[:4]).sum()).items():
            assert torch.allclose(dict(net.named_parameters())[name].grad, grad)
        with pytest.raises(CommError, match="inside no_sync"):
            reducer.finish()
    net(parts[2]).sum().backward()
    assert sum(call.operation == "all_reduce" for call in transport.calls) == 1
    for name, grad in expected(net, lambda: net(X).sum()).items():
        assert torch.allclose(dict(net.named_parameters())[name].grad, grad / 2)


def test_a_parameter_of_an_earlier_backward_is_reduced_with_the_last_one() -> None:
    """pytorch#69031: used under no_sync only."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("a", a), ("b", b)], transport=FakeTransport(2), wait=True)
    for _ in range(2):
        a.grad = b.grad = None
        with reducer.no_sync():
            (a * 4).sum().backward()
        (b * 8).sum().backward()
        assert torch.equal(a.grad, torch.full((2,), 2.0))
        assert torch.equal(b.grad, torch.full((2,), 4.0))


def test_unused_parameters_keep_what_they_had() -> None:
    """None stays None, a result of before stays to the bit, and a user's own gradient is reduced."""
    a, b, c = (nn.Parameter(torch.ones(3)) for _ in range(3))
    GradientReducer([("a", a), ("b", b), ("c", c)], transport=FakeTransport(3), wait=True, bucket_bytes=1)
    (a * 0.1 + c).sum().backward()
    assert b.grad is None
    was = a.grad.clone()
    c.grad = None
    b.grad = torch.full((3,), 6.0)
    (c * 3).sum().backward()
    assert torch.equal(a.grad, was)
    assert torch.equal(b.grad, torch.full((3,), 2.0))
    assert torch.equal(c.grad, torch.ones(3))


def test_a_sum_is_not_summed_again() -> None:
    """Without a division a gradient that stays for the next window must not grow by the number of ranks."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("a", a), ("b", b)], transport=FakeTransport(4), divisor=1, wait=True)
    for number in range(1, 4):
        (a * 5 + b).sum().backward()
        assert torch.equal(a.grad, torch.full((2,), 5.0 * number))
    b.sum().backward()
    assert torch.equal(a.grad, torch.full((2,), 15.0))
    assert reducer.idle


def test_bfloat16_adds_up_in_float32() -> None:
    """256 + 1 is 256 in bfloat16; in float32 the ones count. Zeroing between the backwards counts, too."""
    a = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    reducer = GradientReducer([("a", a)], transport=FakeTransport(2), accumulate=torch.float32, wait=True)
    for _ in range(2):
        a.grad = None
        with reducer.no_sync():
            (a * 256).sum().backward()
            for _ in range(7):
                a.sum().backward()
        a.sum().backward()
        assert a.grad.dtype == torch.bfloat16
        assert torch.equal(a.grad, torch.full((2,), 132.0, dtype=torch.bfloat16))
    with reducer.no_sync():
        a.sum().backward()
    a.grad = None
    (a * 6).sum().backward()
    assert torch.equal(a.grad, torch.full((2,), 3.0, dtype=torch.bfloat16))
    assert a.grad_dtype == torch.bfloat16


@pytest.mark.parametrize("accumulate", [None, torch.float64])
def test_mixed_dtypes_have_buckets_of_their_own(accumulate: torch.dtype | None) -> None:
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    reducer = GradientReducer(
        [(str(n), param) for n, param in enumerate(params)],
        transport=FakeTransport(2),
        accumulate=accumulate,
        wait=True,
    )
    assert len(reducer.buckets) == 3
    sum((param.double() * 4).sum() for param in params).backward()
    for param in params:
        assert param.grad.dtype == param.dtype
        assert torch.equal(param.grad, torch.full_like(param, 2.0))


def test_a_reentrant_checkpoint_over_a_shared_weight() -> None:
    """pytorch#81296, #109191: the bucket must wait for the last addition, in the first window and in later ones."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("a", a), ("b", b)], transport=FakeTransport(2), wait=True, bucket_bytes=1)
    for _ in range(3):
        a.grad = b.grad = None
        y = torch.ones(2, requires_grad=True) * b
        for _ in range(2):
            y = checkpoint(lambda y: y * a, y, use_reentrant=True)
        y.sum().backward()
        assert torch.equal(a.grad, torch.ones(2))  # d(a * a) / da / 2
        assert torch.equal(b.grad, torch.full((2,), 0.5))
    assert reducer.idle


def test_a_checkpoint_that_comes_later_is_added() -> None:
    """A weight used outside first, whose bucket is gone by the time a backward inside the backward adds to it again."""
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("b", b), ("a", a)], transport=FakeTransport(2), wait=True, bucket_bytes=1)
    for step in range(4):
        a.grad = b.grad = None
        y = torch.ones(2, requires_grad=True) * b
        y = checkpoint(lambda y: y * a, y, use_reentrant=True) if step > 1 else y * a
        (y + (y * 0 + 3) * a.view(2)).sum().backward()
        assert torch.equal(a.grad, torch.full((2,), 2.0)), step
        assert torch.equal(b.grad, torch.full((2,), 0.5))
    assert reducer.buckets[0].members[0].hold


def test_a_second_backward_before_the_results_are_fetched() -> None:
    """It fetches them, and adds to them as gradients do."""
    for divisor, once, twice in ((None, 2.0, 3.0), (1, 4.0, 8.0)):  # fake ranks hold zeros, and forget results
        a = nn.Parameter(torch.ones(2))
        reducer = GradientReducer([("a", a)], transport=FakeTransport(2), divisor=divisor)
        (a * 4).sum().backward()
        assert a.grad is None
        reducer.finish()
        assert torch.equal(a.grad, torch.full((2,), once))
        a.grad = None
        for _ in range(2):
            (a * 4).sum().backward()
        reducer.finish()
        assert torch.equal(a.grad, torch.full((2,), twice))


def test_shards_are_replaced_or_added_to() -> None:
    for adds in (False, True):
        net = model()
        reducer = reducer_of(net, size=1, mode="reduce_scatter", adds=adds, wait=False)
        (bucket,) = reducer.buckets
        sums = []
        for factor in (1, 2):
            (net(X).sum() * factor).backward()
            reducer.finish()
            assert all(param.grad is None for param in net.parameters())
            sums.append(bucket.shard.clone())
        assert torch.equal(sums[1], sums[0] * (3 if adds else 2))
        reducer.clear()
        net(X).sum().backward()
        reducer.finish()
        assert torch.equal(bucket.shard, sums[0])
        for slot, param in zip(bucket.plan.slots, bucket.parameters, strict=True):
            assert slot.shape == param.shape


def test_plans_may_be_given() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    plan = BufferPlan((Slot("b", (3,), 1), Slot("a", (2,), 6)), world=2, shard=4)
    reducer = GradientReducer([("a", a), ("b", b)], transport=FakeTransport(2), plans=[plan], mode="reduce_scatter")
    (a.sum() * 2 + b.sum() * 4).backward()
    reducer.finish()
    assert reducer.buckets[0].shard.tolist() == [0, 2, 2, 2]
    plan = BufferPlan((Slot("c", (3,), 0),), 2, 2)
    with pytest.raises(CommError, match="a is in 0 buckets"):
        GradientReducer([("a", a), ("c", b)], transport=FakeTransport(2), plans=[plan])


def test_lanes_have_divisors_of_their_own() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer(
        [("a", a)], transport=FakeTransport(4), wait=True, others=[Lane([("b", b)], FakeTransport(2), 4)]
    )
    for _ in range(2):
        a.grad = b.grad = None
        (a.sum() * 8 + b.sum() * 12).backward()
        assert a.grad.tolist() == [2, 2]
        assert b.grad.tolist() == [3, 3]
    (a.sum() * 8 + b.sum() * 12).backward()
    assert b.grad.tolist() == [6, 6]
    assert reducer.idle


def test_gradients_with_other_strides() -> None:
    """Views have the strides of the parameters, so that optimizers run through both alike."""
    net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    turned = nn.Parameter(torch.randn(3, 5).t())
    x = torch.randn(2, 3, 4, 4)

    def loss() -> Tensor:
        return (net(x) ** 2).sum() + (turned**2).sum()

    want = expected(net, loss)
    reducer_of(net)
    GradientReducer([("turned", turned)], transport=FakeTransport(2), wait=True)
    loss().backward()
    assert torch.equal(net.weight.grad, want["weight"] / 2)
    assert torch.equal(turned.grad, turned.detach())
    assert net.weight.grad.stride() == net.weight.stride()
    assert turned.grad.stride() == turned.stride()


def test_scalars_empty_and_complex_parameters() -> None:
    one, none = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.empty(0, 4))
    number = nn.Parameter(torch.tensor([1 + 2j, 3j]))
    GradientReducer([("one", one), ("none", none), ("number", number)], transport=FakeTransport(2), wait=True)
    (one**2 + none.sum() + (number.abs() ** 2).sum()).backward()
    assert one.grad == 3
    assert none.grad.shape == (0, 4)
    assert torch.equal(number.grad, number.detach())


def test_gradients_that_no_reduction_can_take() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    GradientReducer([("a", a), ("b", b.weight)], transport=FakeTransport(2), wait=True)
    with pytest.raises(CommError, match=r"a: its gradient has a graph.*no_sync"):
        (a**3).sum().backward(create_graph=True)
    a.grad = None
    with pytest.raises(CommError, match=r"b: its gradient is torch.sparse_coo.*sparse=False"):
        b(torch.tensor([1])).sum().backward()
    b.weight.grad = None
    (slope,) = torch.autograd.grad((a**3).sum(), a, create_graph=True)
    (slope.sum() + a.sum()).backward()
    assert a.grad.tolist() == [3.5, 3.5]


def test_what_is_not_finite_is_named() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    reducer = GradientReducer([("a", a), ("b", b)], transport=FakeTransport(1), wait=True, check_finite=True)
    with pytest.raises(NotFiniteError, match="before they were summed: b on rank 0"):
        (a.sum() + (b * float("inf")).sum()).backward()
    assert a.grad is None
    (a + b).sum().backward()
    assert b.grad.tolist() == [1, 1]
    assert reducer.idle


def test_finish_without_a_backward() -> None:
    """Nothing to do without a forward; after one, a reduction of zeros, which other ranks may wait for."""
    a = nn.Parameter(torch.ones(2))
    transport = FakeTransport(2)
    reducer = GradientReducer([("a", a)], transport=transport)
    before = len(transport.calls)
    reducer.finish()
    assert len(transport.calls) == before
    reducer.prepare()
    reducer.finish()
    assert [call.operation for call in transport.calls[before:]] == ["all_reduce", "all_gather"]
    assert a.grad is None


def test_spans_of_buckets_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.events: list[object] = []

        def begin(self, category: str, name: str) -> object:
            self.events.append((category, name))
            return name

        def end(self, token: object) -> None:
            self.events.append(token)

    recorder = Recorder()
    monkeypatch.setattr(_hooks, "timeline", lambda: recorder)
    net = nn.Linear(2, 1)
    reducer = reducer_of(net, bucket_bytes=1)
    net(torch.ones(1, 2)).sum().backward()
    names = ["bucket of bias", "bucket of weight"]
    assert recorder.events == [*(("comm", name) for name in names), *names]
    assert all(b.launched_at < b.wait_began < b.wait_ended for b in reducer.buckets)


def test_a_gradient_is_reduced_by_one_reducer_only() -> None:
    """Also after the buckets were planned anew; a closed one does not count."""
    net = model()
    first = reducer_of(net, learn=True)
    net(X).sum().backward()
    with pytest.raises(CommError, match=r"0\.weight: its gradient is reduced already.*close\(\) the other"):
        reducer_of(net)
    net.zero_grad()
    net(X).sum().backward()
    assert torch.equal(net[4].bias.grad, torch.full((1,), 2.5))
    first.close()
    reducer_of(net)


def test_wrong_arguments() -> None:
    a = nn.Parameter(torch.ones(2))
    fake = FakeTransport(2)
    with pytest.raises(CommError, match="b and a are one object"):
        GradientReducer([("a", a), ("b", a)], transport=fake)
    with pytest.raises(CommError, match="Two parameters have the name a"):
        GradientReducer([("a", a), ("a", nn.Parameter(torch.ones(2)))], transport=fake)
    with pytest.raises(CommError, match=r"i: only leaf tensors of floating point.*int64"):
        GradientReducer([("i", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))], transport=fake)
    with pytest.raises(ValueError, match="mode is 'both'"):
        GradientReducer([("a", a)], transport=fake, mode="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="learn and view"):
        GradientReducer([("a", a)], transport=fake, mode="reduce_scatter", learn=True)
