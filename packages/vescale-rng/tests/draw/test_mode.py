"""The stack of samplers: the innermost draws, in every thread, and errors do not leave one behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from vescale_rng._draw.mode import active_sampler, is_default, use_sampler
from vescale_rng._draw.source import Source


class Nothing:
    """A sampler that is only looked at."""

    def source(self, op: str, dtype: Any, device: Any, shape: Any, stride: Any, args: Any) -> Source:
        raise AssertionError(op)

    def save(self) -> object:
        return None

    def restore(self, token: object) -> None:
        assert token is None


def test_the_innermost_is_active() -> None:
    outer, inner = Nothing(), Nothing()
    assert active_sampler() is None
    with use_sampler(outer):
        assert active_sampler() is outer
        with use_sampler(inner):
            assert active_sampler() is inner
        assert active_sampler() is outer
        with use_sampler(outer):  # the same one again
            assert active_sampler() is outer
        assert active_sampler() is outer
    assert active_sampler() is None


def test_an_error_ends_the_block() -> None:
    with pytest.raises(KeyError), use_sampler(Nothing()):
        raise KeyError
    assert active_sampler() is None


def test_blocks_may_end_in_another_order() -> None:
    first, second = Nothing(), Nothing()
    one, two = use_sampler(first), use_sampler(second)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert active_sampler() is second
    two.__exit__(None, None, None)
    assert active_sampler() is None


def test_threads_see_it() -> None:
    """Autograd recomputes a checkpointed forward in a thread of its own."""
    sampler = Nothing()
    seen: list[Any] = []
    with use_sampler(sampler):
        thread = threading.Thread(target=lambda: seen.append(active_sampler()))
        thread.start()
        thread.join()
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: seen.append(active_sampler()))
        y.sum().backward()
    assert seen == [sampler, sampler]


def test_which_generators_are_the_default_one() -> None:
    assert is_default(torch.default_generator)
    copy = torch.Generator()
    copy.set_state(torch.default_generator.get_state())
    for other in (copy, None, 3, "cpu"):
        assert not is_default(other)
