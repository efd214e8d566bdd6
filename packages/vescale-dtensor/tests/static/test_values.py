"""A record holds descriptions: memory is free as early as without one, and a later tensor is never taken for one."""

from __future__ import annotations

import gc
import itertools
import random
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from vescale_dtensor import Shard, distribute_tensor, static
from vescale_dtensor._static.values import Value, Values, described, values_of
from vescale_dtensor.errors import StaticWarning
from vescale_testing import cached_mesh

Pair = namedtuple("Pair", "a b")


@contextmanager
def no_collector() -> Iterator[None]:
    """Memory must be free without the collector of cycles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaticWarning)
        static(lambda x: x.sum().item())(torch.ones(2))  # imports parts of torch, in which frames hold each other
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Watched:
    """Counts how many of the tensors that it was shown still have their memory."""

    __slots__ = ("most", "storages")

    def __init__(self) -> None:
        self.storages: list[StorageWeakRef] = []
        self.most = 0

    def show(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        self.most = max(self.most, self.alive())
        return tensor

    def alive(self) -> int:
        return sum(not storage.expired() for storage in self.storages)


def test_short_lived_tensors_are_told_apart() -> None:
    values, rng = Values(), random.Random(0)
    alive: list[tuple[Tensor, Value]] = []
    seen: set[Value] = set()
    places, ids = set(), set()
    for _ in range(20_000):
        source, view = rng.choice(alive) if alive and rng.random() < 0.3 else None, None
        tensor = torch.empty(rng.choice([1, 4])) if source is None else source[0].view(-1)
        assert values.find(tensor) is None
        value = values.look(tensor)
        assert value not in seen
        if source is None:
            assert value.memory not in places
        else:
            assert value.memory == source[1].memory
        seen.add(value)
        places.add(value.memory)
        ids.add(id(tensor))
        alive.append((tensor, value))
        if len(alive) > 5:
            del alive[rng.randrange(5)]
        assert all(values.look(t) is v for t, v in alive)
        del tensor, source, view
    assert len(ids) < len(seen) / 10  # addresses were given again


def test_an_object_that_only_autograd_holds_is_still_the_same() -> None:
    values = Values()
    base = torch.arange(6.0).mul(1)
    first = values.look(base)
    view = base.view(2, 3)
    del base
    gc.collect()
    assert values.find(view._base) is first


def test_descriptions_of_containers() -> None:
    values = Values()
    x, y = torch.ones(2), torch.ones(2, requires_grad=True) * 1
    items = [x, (y, slice(None, x))]
    copy = described([items, {"pair": Pair(x, y), "x": x}], values)
    items.append(y)
    first, second = values.find(x), values.find(y)
    assert values_of(copy) == [first, second, first, first]
    assert copy[1]["pair"].a is x
    assert first is not None
    assert second is not None
    assert (first.has_graph, second.has_graph) == (False, True)
    assert first.memory != second.memory


def _chain(x: Tensor, watched: Watched) -> Tensor:
    for _ in range(50):
        x = watched.show(torch.tanh(x * 1.5 + 0.5))
    return x


@pytest.mark.ranks(2, pool=True)
def test_a_recorded_call_holds_no_more_at_once_than_a_dynamic_one() -> None:
    whole = torch.ones(64, 64)
    local = distribute_tensor(whole, cached_mesh(2, names=("tp",)), [Shard(0)])
    for x in (whole, local):
        seen: list[int] = []

        def chain(x: Tensor, seen: list[int] = seen) -> Tensor:
            watched = Watched()
            y = _chain(x, watched)
            seen.append(watched.most)
            return y

        fixed = static(chain)
        with torch.no_grad(), no_collector():
            chain(x)
            for _ in range(3):
                fixed(x)
        assert seen == [seen[0]] * 3  # dynamic, and two records
        assert seen[0] <= 3
        assert "def program" in fixed.static_code()


def _steps(function: Callable[..., Tensor], x: Tensor, watched: Watched, steps: int) -> None:
    for _ in range(steps):
        loss = function(x)
        loss.backward()
        del loss
        x.grad = None
        assert watched.alive() == 0


@pytest.mark.ranks(2, pool=True)
def test_nothing_of_a_call_lives_after_it() -> None:
    watched = Watched()

    def loss(x: Tensor) -> Tensor:
        y = watched.show(x * 2)
        with torch.no_grad():
            scale = watched.show(torch.ones_like(y) * y.detach())
        y = watched.show(torch.tanh(y * scale))
        return watched.show(y.square().sum())

    mesh = cached_mesh(2, names=("tp",))
    with no_collector():
        for x in (torch.ones(3, 4), distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])[:3]):
            fixed = static(loss)
            _steps(fixed, x.detach().requires_grad_(), watched, 4)
            assert "def program" in fixed.static_code()
            watched.storages.clear()


def test_nothing_of_a_call_lives_where_there_is_no_program() -> None:
    watched = Watched()
    calls = itertools.count()

    def reads(x: Tensor) -> Tensor:
        y = watched.show(x * 2)
        return watched.show(y * y.sum().item()).sum()

    def differs(x: Tensor) -> Tensor:
        return watched.show(watched.show(x * 2) * next(calls)).sum()

    def hooked(x: Tensor) -> Tensor:
        y, factor = watched.show(x * 2), watched.show(x.detach() * 3)
        y.register_hook(lambda grad: grad * factor)
        return y.sum()

    with no_collector():
        for function, reason in ((reads, "item hands"), (differs, "different things"), (hooked, "another object")):
            fixed = static(function)
            x = torch.ones(3, 4, requires_grad=True)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for number in range(4):
                    fixed(x).backward()
                    assert watched.alive() == 0 or (number == 0 and function is hooked)  # its hook is to be compared
            assert any(reason in str(warning.message) for warning in caught)
            watched.storages.clear()


def test_results_that_others_keep_are_theirs_alone() -> None:
    fixed = static(lambda x: (x * 2, [x + 1]))
    with no_collector():
        for _ in range(4):
            out = fixed(torch.ones(3))
            references = [weakref.ref(out[0]), weakref.ref(out[1][0])]
            del out
            assert all(reference() is None for reference in references)


def test_memory_that_is_used_again_is_no_alias() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            short = x * 2
            short.add_(1)
            del short
        return x + torch.arange(4.0) * 2  # may lie where something was written to before

    fixed = static(function)
    x = torch.ones(4)
    for _ in range(4):
        assert torch.equal(fixed(x), function(x))
    assert "add(x0, k0)" in fixed.static_code()


def test_what_a_write_to_a_view_changes_is_seen() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(2, 3)
        row, flat = total[0], total.view(-1)
        with torch.no_grad():
            second = x.view_as(x)
        row.add_(w * x.sum())
        return (flat * 2).sum() + total.sum() + second.sum()

    fixed = static(function)
    for number in range(4):
        found = []
        for run in (function, fixed):
            x, w = torch.full((3,), float(number), requires_grad=True), torch.ones(3, requires_grad=True)
            y = run(x, w)
            y.backward()
            found.append((y, x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert "def program" in fixed.static_code()


def test_tensors_in_containers_of_other_types_are_not_taken_for_constants() -> None:
    fixed: Any = static(lambda x: torch.stack(Pair(x * 2, x + 1)))
    x = torch.ones(2)
    with pytest.warns(StaticWarning, match="an argument of type Pair that holds tensors"):
        fixed(x)
    for number in range(3):
        x = torch.full((2,), float(number))
        assert torch.equal(fixed(x), torch.stack([x * 2, x + 1]))


def test_sparse_tensors_are_told_apart() -> None:
    def function(x: Tensor) -> Tensor:
        total = x.to_dense()
        for _ in range(5):
            total = total + (x * 2).to_dense()
        return total

    fixed = static(function)
    x = torch.eye(3).to_sparse()
    for _ in range(4):
        assert torch.equal(fixed(x), torch.eye(3) * 11)
