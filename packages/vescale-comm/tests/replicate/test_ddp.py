"""Data parallelism against one device with the whole batch."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_comm._replicate import DistributedDataParallel, forget_replica, replicate, replicated
from vescale_comm._transport import peer
from vescale_comm.errors import CommError, MismatchError, NotFiniteError

ROWS = 12


class Net(nn.Module):
    """Shared weights, a norm with buffers, a parameter that is never used and one that some rows use."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, dtype=dtype)
        self.again = nn.Linear(6, 6, dtype=dtype)
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.never = nn.Parameter(torch.ones(3, dtype=dtype))
        self.sometimes = nn.Linear(6, 6, dtype=dtype)
        self.last = nn.Linear(6, 4, bias=False, dtype=dtype)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.alias = self.last

    def forward(self, x: Tensor, sometimes: bool = False) -> Tensor:
        y = self.norm(self.again(torch.tanh(self.first(x))))
        y = checkpoint(lambda y: torch.tanh(self.again(y)), y, use_reentrant=True)
        if sometimes:
            y = self.sometimes(y)
        return self.alias(y)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)


def single_device(steps: int, world: int, sometimes: Any) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 4 != 3)
        for rank, part in enumerate(batch(step).chunk(world)):
            ((net(part, sometimes(step, rank)) ** 2).mean() / world).backward()
        optimizer.step()
    return net


def some(step: int, rank: int) -> bool:
    """Which ranks use the layer that is used sometimes: none, all, one."""
    return (step % 3 == 1) or (step % 3 == 2 and rank == step % 2)


@pytest.mark.parametrize("world", [pytest.param(n, marks=pytest.mark.ranks(n, pool=True)) for n in (2, 3, 4)])
def test_twenty_steps_are_those_of_one_device(rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding; and to the bit the same whatever the buckets, the transport and the way to accumulate."""
    beside, small = peer.BESIDE, peer.SMALL
    want = dict(single_device(20, world, some).named_parameters())
    found: list[dict[str, Tensor]] = []
    for options in (
        {"transport": "p2p"},
        {"transport": "p2p", "bucket_mb": 1e-5, "view": True},
        {"transport": "shared", "bucket_mb": 3e-4},
        {"transport": "native", "order": "canonical"},
        {"transport": "p2p", "manual": True},
    ):
        # Buckets of one parameter go by threads in two rounds, as large ones do; all others by the calling thread.
        monkeypatch.setattr(peer, "BESIDE", 0 if options.get("view") else beside)
        monkeypatch.setattr(peer, "SMALL", 0 if options.get("view") else small)
        torch.manual_seed(rank)  # the first rank's parameters are taken
        net = Net()
        if rank == 0:
            torch.manual_seed(0)
            net = Net()
        model = DistributedDataParallel(net, **options)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(20):
            optimizer.zero_grad(set_to_none=step % 4 != 3)
            (model(batch(step).chunk(world)[rank], some(step, rank)) ** 2).mean().backward()
            model.finish_grad_sync()
            optimizer.step()
            if step == 5:
                memory = [bucket.buffer for bucket in model.replica.reducer.buckets]
        # Nobody kept gradients, so buckets stayed where they were.
        assert options["transport"] == "native" or all(
            bucket.buffer is before for bucket, before in zip(model.replica.reducer.buckets, memory, strict=True)
        )
        assert net.never.grad is None or not net.never.grad.any()
        found.append({name: param.detach().clone() for name, param in net.named_parameters()})
        theirs = [thread for thread in threading.enumerate() if thread.name.startswith("vescale-comm")]
        assert len(theirs) == (2 if options.get("view") else 0)
        model.close()
        for thread in theirs:
            thread.join(20)
            assert not thread.is_alive()
    for name, value in want.items():
        assert (found[0][name] - value).abs().max() < 1e-10, name
        for other in found[1:]:
            assert torch.equal(other[name], found[0][name]), name


@pytest.mark.ranks(3, pool=True)
@pytest.mark.parametrize("transport", ["p2p", "shared"])
def test_sums_add_the_ranks_in_order(rank: int, transport: str) -> None:
    """To the bit: ((g[0] + g[1]) + g[2]) / 3 of what each rank has after its own additions, in float32."""
    for dtype, accumulate in ((torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, None)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
        solo = copy.deepcopy(net)
        model = DistributedDataParallel(net, transport=transport, bucket_mb=1e-4, accumulate_dtype=accumulate)
        torch.manual_seed(rank)
        data = torch.randn(2, 4, 5, dtype=dtype)
        sums = [torch.zeros_like(param, dtype=accumulate or dtype) for param in solo.parameters()]
        for part in data:
            for total, grad in zip(sums, torch.autograd.grad(solo(part).sum(), list(solo.parameters())), strict=True):
                total += grad.to(total.dtype)
        theirs: list[Any] = [None] * 3
        dist.all_gather_object(theirs, sums)
        with model.no_sync():
            model(data[0]).sum().backward()
        model(data[1]).sum().backward()
        for param, a, b, c in zip(net.parameters(), *theirs, strict=True):
            assert torch.equal(param.grad, ((a.float() + b.float() + c.float()) / 3).to(dtype))
        model.close()
    # pytorch#57410: sums in fp16 became infinite where means are not.
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    replicate(nn.ParameterList([weight]), transport=transport)
    (weight * 40000).sum().backward()
    assert weight.grad.tolist() == [40000, 40000]


@pytest.mark.ranks(2, pool=True)
def test_reported_failures_of_torch(rank: int) -> None:
    """Small cases of the reports in which torch's wrapper is wrong, stops, or cannot be used."""

    def pair(**options: Any) -> tuple[nn.Linear, DistributedDataParallel]:
        torch.manual_seed(0)
        net = nn.Linear(2, 1, bias=False)
        return net, DistributedDataParallel(net, transport="p2p", **options)

    x = torch.tensor([[1.0, 2.0]]) * (rank + 1)
    mean = torch.tensor([[1.5, 3.0]])

    # pytorch#69031: a parameter that only a backward under no_sync uses; #187732: no_sync from the first step on.
    torch.manual_seed(0)
    two = nn.ModuleDict({"a": nn.Linear(2, 1, bias=False), "b": nn.Linear(2, 1, bias=False)})
    replicate(two, transport="p2p")
    for _ in range(3):
        two.zero_grad()
        with replicated(two).no_sync():
            two["a"](x).sum().backward()
        two["b"](x).sum().backward()
        assert torch.equal(two["a"].weight.grad, mean)
        assert torch.equal(two["b"].weight.grad, mean)
    replicated(two).close()

    # pytorch#81296, #109191: a reentrant checkpoint over a shared weight.
    scale = nn.Parameter(torch.ones(2))
    shared = nn.ParameterList([scale])
    replicate(shared, transport="p2p", bucket_mb=1e-6)
    for _ in range(3):
        shared.zero_grad()
        y = x.clone().requires_grad_()
        for _ in range(2):
            y = checkpoint(lambda y: y * scale, y, use_reentrant=True)
        y.sum().backward()
        assert torch.equal(scale.grad, 2 * mean[0])
    replicated(shared).close()

    # pytorch#58111, #97030: two forwards and one backward, and an output that is not used.
    net, model = pair()
    for _ in range(3):
        net.zero_grad()
        first, _unused = model(x), model(5 * x)
        (first + model(x)).sum().backward()
        assert torch.equal(net.weight.grad, 2 * mean)
    # Two backwards after two forwards, each a window of its own.
    net.zero_grad()
    first, second = model(x), model(3 * x)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(net.weight.grad, 4 * mean)
    model.close()

    # Layers that one rank uses only, and a rank whose loss depends on no parameter.
    net, model = pair()
    for step in range(3):
        net.zero_grad()
        y = model(x)
        if rank == step % 2:
            y.sum().backward()
        model.finish_grad_sync()
        assert torch.equal(net.weight.grad, torch.tensor([[1.0, 2.0]]) * (step % 2 + 1) / 2)
    model.close()

    # Gradients that the user replaces, and backwards of gradients.
    net, model = pair()
    model(x).sum().backward()
    net.weight.grad = net.weight.grad * 10
    assert torch.equal(net.weight.grad, 10 * mean)
    model(x).sum().backward()
    assert torch.allclose(net.weight.grad, 11 * mean)
    net.zero_grad()
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum() ** 2, x, create_graph=True)
    (slope**2).sum().backward()
    solo = copy.deepcopy(net)
    forget_replica(solo)
    total = torch.zeros(1, 2)
    for factor in (1, 2):
        z = (torch.tensor([[1.0, 2.0]]) * factor).requires_grad_()
        (slope,) = torch.autograd.grad(solo(z).sum() ** 2, z, create_graph=True)
        total = total + torch.autograd.grad((slope**2).sum(), solo.weight)[0]
    assert torch.allclose(net.weight.grad, total / 2)
    model.close()


@pytest.mark.ranks(3, pool=True)
def test_ranks_with_unequal_data(rank: int) -> None:
    """pytorch#67253, #38174, transformers#34242: averages are over samples, or over the ranks that have data."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    twin = copy.deepcopy(net)
    rows = torch.randn(2 + 3 + 4, 2, dtype=torch.float64)
    mine = rows.split([2, 3, 4])[rank]
    net[1].eval()
    twin[1].eval()
    model = DistributedDataParallel(net, transport="p2p")
    model.set_weight(len(mine))
    (model(mine) ** 2).mean().backward()
    (twin(rows) ** 2).mean().backward()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)
    model.set_weight(None)

    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    reference = torch.optim.Adam(twin.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    counts = [1, 4, 2]
    for _ in range(2):
        optimizer.zero_grad()
        with model.join(step):
            for number in range(counts[rank]):
                (model(rows[number + rank :][:2]) ** 2).mean().backward()
                step()
        for number in range(max(counts)):
            reference.zero_grad()
            active = [r for r in range(3) if number < counts[r]]
            for r in active:
                ((twin(rows[number + r :][:2]) ** 2).mean() / len(active)).backward()
            reference.step()
        for a, b in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-12)
    caught: Any
    for trouble in ("error", "no_sync"):
        with pytest.raises((KeyError, MismatchError)) as caught, model.join(step):  # noqa: PT012
            if rank == 1 and trouble == "error":
                raise KeyError("lost")
            with model.no_sync() if rank == 1 else contextlib.nullcontext():
                model(mine)
        if trouble == "error":
            assert "lost" in str(caught.value) if rank == 1 else "Ranks [1] left join()" in str(caught.value)
        else:
            assert "ranks [0, 2] are about to reduce, but ranks [1] are under no_sync" in str(caught.value)
    with pytest.raises(ValueError, match="weight is -1"):
        model.set_weight(-1)
    model.set_weight(2 if rank == 1 else None)
    with pytest.raises(MismatchError, match=r"weighted on rank 1, but not on ranks 0, 2"):
        (model(mine) ** 2).mean().backward()
    model.set_weight(None)
    (model(mine) ** 2).mean().backward()
    model.close()


@pytest.mark.ranks(2, pool=True)
def test_errors_end_all_ranks_with_the_cause(rank: int) -> None:
    # Other parameters, in number, shape or name.
    for module, text in (
        (
            nn.Linear(2, 1, bias=rank == 0),
            r"at number 1, rank 0 has bias \(1,\) float32.*but rank 1 has the parameters",
        ),
        (nn.Linear(2 + rank, 1), r"at number 0, rank 0 has weight \(1, 2\).*rank 1 has weight \(1, 3\)"),
        (
            nn.ModuleDict({"ab"[rank]: nn.Linear(2, 1)}),
            r"rank 0 has a\.weight.*rank 1 has b\.weight.*wrap the same model",
        ),
    ):
        with pytest.raises(MismatchError, match=text):
            DistributedDataParallel(module, transport="p2p")

    # A backward that fails on one rank, after buckets have gone; then all go on.
    class Stumble(torch.autograd.Function):
        stumbles = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            if Stumble.stumbles:
                raise ValueError("stumbled")
            return grads[0]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(Stumble.apply(self.a(x)))
            return y

    torch.manual_seed(0)
    model = DistributedDataParallel(Two(), transport="p2p", bucket_mb=1e-6)
    x = torch.ones(3, 2) * (1 + rank)
    model(x).sum().backward()
    good = [param.grad.clone() for param in model.parameters()]
    for both in (False, True):
        model.zero_grad()
        Stumble.stumbles = rank == 0 or both
        with pytest.raises((ValueError, MismatchError)) as caught:
            model(x).sum().backward()
        if Stumble.stumbles:
            assert "stumbled" in str(caught.value)
        else:
            assert "The backward of rank 0 raised an error" in str(caught.value)
        Stumble.stumbles = False
        model.zero_grad()
        model(x).sum().backward()
        for param, want in zip(model.parameters(), good, strict=True):
            assert torch.equal(param.grad, want)
        if not both:  # the other rank waits in the reduction of the step that failed, or has left it
            dist.barrier()
    model.close()

    # Gradients that are not finite.
    model = DistributedDataParallel(nn.Linear(2, 1), transport="p2p", check_finite=True)
    with pytest.raises(NotFiniteError, match=r"weight on rank 1"):
        model(torch.full((1, 2), float("inf") if rank == 1 else 1.0)).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.isfinite(model.module.weight.grad).all()

    # Parameters that change on one rank only.
    if rank == 0:
        model.module.more = nn.Linear(2, 1)
    with pytest.raises(MismatchError, match=r"rank 0 has more\.weight.*Add, remove, freeze"):
        model(x).sum().backward()
    model.close()


@pytest.mark.ranks(2, pool=True)
def test_parameters_that_come_freeze_and_unfreeze(rank: int) -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.layers[1].bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    net, twin = Growing(), Growing()
    twin.load_state_dict(net.state_dict())
    replicate(net, transport="p2p", bucket_mb=1e-6)
    for step in range(7):
        for module in (net, twin):
            torch.manual_seed(step)
            module.zero_grad()
            if step == 1:
                module.layers.append(nn.Linear(2, 2))
            if step == 2:
                module.layers[0].weight.requires_grad_(False)
                module.layers[1].bias.requires_grad_(True)
            if step == 4:
                module.layers[0].weight.requires_grad_(True)
                module.layers[2] = nn.Linear(2, 2)
            if step == 5:
                del module.layers[2]
            if step == 6:
                module.layers.insert(0, nn.Linear(2, 2))
        x = torch.randn(4, 2)
        net(x[rank::2]).sum().backward()
        (twin(x).sum() / 2).backward()
        for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
            if b.grad is None:
                assert a.grad is None, (step, name)
            else:
                assert torch.allclose(a.grad, b.grad, atol=1e-6), (step, name)
    replicated(net).close()


@pytest.mark.ranks(2, pool=True)
def test_buffers_state_dicts_copies_and_groups(rank: int) -> None:
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model = DistributedDataParallel(net, transport="p2p")
    model(torch.randn(4, 2)).sum().backward()
    model(torch.randn(4, 2))
    theirs: list[Any] = [None, None]
    dist.all_gather_object(theirs, net[1].running_mean.tolist())
    assert theirs[0] != theirs[1]  # each has seen its own data since
    model.zero_grad()
    model.replica.sync_buffers()
    dist.all_gather_object(theirs, [net[1].running_mean.tolist(), int(net[1].num_batches_tracked)])
    assert theirs[0] == theirs[1]

    assert set(model.state_dict()) == set(net.state_dict())
    outer = nn.ModuleDict({"inner": model})
    assert set(outer.state_dict()) == {f"inner.{name}" for name in net.state_dict()}
    state = {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    for prefix, module in (("", model), ("module.", model), ("inner.", outer), ("inner.module.", outer)):
        nn.init.ones_(net[0].weight)
        module.load_state_dict({prefix + name: value for name, value in state.items()})
        assert not net[0].weight.any()
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.bias"):
        model.load_state_dict({name: value for name, value in state.items() if name != "0.bias"})
    with pytest.raises(CommError, match=r"take its \.module"):
        copy.deepcopy(model)
    model.close()

    replicate(net, transport="p2p")
    with pytest.raises(CommError, match="replicated already"):
        replicate(net)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin(torch.ones(2, 2))
    with pytest.raises(CommError, match="copy of a replicated one"):
        twin(torch.ones(2, 2))
    forget_replica(twin)
    twin(torch.ones(2, 2))
    with pytest.raises(CommError, match="is not replicated"):
        replicated(twin)
    replicated(net).close()
    with pytest.raises(CommError, match="no parameter that requires a gradient"):
        replicate(nn.ReLU())
    with pytest.raises(TypeError, match="needs a ProcessGroup"):
        replicate(net, 3)

    alone = dist.new_group([rank], use_local_synchronization=True)
    parts = nn.ModuleDict({"dense": nn.Linear(2, 1), "expert": nn.Linear(2, 1), "own": nn.Linear(2, 1)})
    replicate(parts, transport="p2p", groups={r"expert\..*": alone, r"own\..*": None}, average=True)
    for _ in range(2):
        parts.zero_grad()
        x = torch.tensor([[1.0, 1.0]]) * (rank + 1)
        sum(layer(x).sum() for layer in parts.values()).backward()
        assert torch.equal(parts["dense"].weight.grad, torch.tensor([[1.5, 1.5]]))
        assert torch.equal(parts["expert"].weight.grad, x / 2)  # two ranks see different data
        assert torch.equal(parts["own"].weight.grad, x)
    replicated(parts).close()

    torch.manual_seed(0)
    layer = nn.Linear(2, 1, dtype=torch.bfloat16)
    model = DistributedDataParallel(layer, transport="p2p", accumulate_dtype=torch.float32, average=False)
    with model.no_sync():
        model(torch.full((1, 2), 1.0, dtype=torch.bfloat16)).sum().backward()
        model(torch.full((1, 2), 256.0, dtype=torch.bfloat16)).sum().backward()
    model(torch.full((1, 2), 1.0, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad.tolist() == [[516, 516]]  # in bfloat16, 256 + 1 is 256
    model.close()
