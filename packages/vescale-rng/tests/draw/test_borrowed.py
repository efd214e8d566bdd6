"""The state that a block keeps in torch's default generator: who may put what there, and who notices."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from vescale_rng import PortableGenerator, emulate_cuda, portable
from vescale_rng._draw.borrowed import block_name
from vescale_rng.errors import RandomError

Block = Callable[[], AbstractContextManager[Any]]
BLOCKS: dict[str, Block] = {"portable": lambda: portable(3), "emulate_cuda": lambda: emulate_cuda("A100", seed=3)}


@pytest.fixture(params=BLOCKS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def block(name: str) -> Block:
    return BLOCKS[name]


def mid_stream(seed: int, words: int = 13) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    torch.rand(words, generator=generator)
    return generator.get_state()


# ------------------------------------------------------------------ states that are not the block's


@pytest.mark.parametrize("seed", [3, 77])
@pytest.mark.parametrize("words", [1, 13, 624, 100_000])
def test_a_state_of_torchs_own_stream_is_refused(block: Block, seed: int, words: int) -> None:
    foreign = mid_stream(seed, words)
    with block() as generator:
        first = torch.rand(3)
        ours = torch.get_rng_state()
        torch.set_rng_state(foreign)
        with pytest.raises(RandomError, match=rf"torch's own stream \(seed {seed}\)"):
            torch.rand(3)
        with pytest.raises(RandomError, match="torch's own stream"):
            generator.initial_seed()
        torch.set_rng_state(ours)
        second = torch.rand(3)
    with block():
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)


def test_a_state_of_the_other_kind_is_refused(name: str, block: Block) -> None:
    (other,) = BLOCKS.keys() - {name}
    with BLOCKS[other]():
        state = torch.get_rng_state()
    with block():
        torch.set_rng_state(state)
        with pytest.raises(RandomError, match=f"a state of a block of {other}"):
            torch.rand(3)


def test_a_state_put_together_by_hand_is_refused(block: Block) -> None:
    state = torch.Generator().manual_seed(3).get_state()
    state[32:40] = 1
    with block():
        torch.set_rng_state(state)
        with pytest.raises(RandomError, match="seed 3"):
            torch.rand(3)


def test_the_block_ends_well_with_a_foreign_state(block: Block) -> None:
    before, foreign = torch.get_rng_state(), mid_stream(77)
    with block() as generator:
        torch.rand(3)
        was = generator.get_state()
        torch.set_rng_state(foreign)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(generator.get_state(), was)


def test_a_nested_block_does_not_hide_a_foreign_state(block: Block) -> None:
    foreign = mid_stream(77)
    with block() as generator:
        ours = torch.get_rng_state()
        torch.set_rng_state(foreign)
        with pytest.raises(RandomError, match="torch's own stream"), portable(1):
            pass
        torch.set_rng_state(ours)
        assert generator.initial_seed() == 3
    assert block_name() is None


def test_a_state_of_a_block_that_was_loaded_outside_is_refused_by_the_next_block(name: str, block: Block) -> None:
    before = torch.get_rng_state()
    with block():
        state = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        with pytest.raises(RandomError, match=f"saved within a block of {name}.*outside"), portable(1):
            pass
    finally:
        torch.set_rng_state(before)
    with portable(1):
        pass


def test_numbers_of_torchs_own_are_reported_and_the_stream_goes_on(block: Block) -> None:
    with block():
        torch.rand(3)
        expected = torch.rand(3)
    with block():
        torch.rand(3)
        with torch._C._DisableTorchDispatch():  # code below the dispatcher
            torch.rand(1000)
        with pytest.warns(RuntimeWarning, match="drew from torch's own generator"):
            assert torch.equal(torch.rand(3), expected)


# ------------------------------------------------------------------ checkpoints across the block's edge


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) * x


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [dropped, lambda x: torch.rand_like(x) * x, lambda x: x.exp() + torch.rand(40)])
def test_a_checkpoint_whose_backward_leaves_the_block_is_an_error(
    block: Block, early_stop: bool, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with block():
        x = torch.ones(40, requires_grad=True)
        y = checkpoint(function, x, use_reentrant=False, early_stop=early_stop)
    with pytest.raises(CheckpointError, match="saved"):
        y.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("words", [0, 13])
def test_a_checkpoint_of_torchs_whose_backward_enters_a_block_is_an_error(
    block: Block, early_stop: bool, words: int
) -> None:
    torch.manual_seed(3)
    torch.rand(words)
    x = torch.ones(40, requires_grad=True)
    y = checkpoint(dropped, x, use_reentrant=False, early_stop=early_stop)
    with block(), pytest.raises((CheckpointError, RandomError)):
        y.sum().backward()


def test_a_reentrant_checkpoint_of_torchs_whose_backward_enters_a_block_is_an_error(block: Block) -> None:
    torch.manual_seed(3)
    torch.rand(13)
    x = torch.ones(40, requires_grad=True)
    y = checkpoint(dropped, x, use_reentrant=True)
    with block(), pytest.raises(RandomError, match="torch's own stream"):
        y.sum().backward()


@pytest.mark.parametrize("options", [{}, {"early_stop": False}, {"determinism_check": "none"}])
def test_checkpoints_within_a_block_are_recomputed(block: Block, options: dict[str, Any]) -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        inner = checkpoint(dropped, x + torch.rand_like(x), use_reentrant=False, **options)
        return inner * x + torch.rand(40)  # a draw after the last tensor that is saved

    grads = []
    for checkpointed in (False, True):
        with block():
            x = torch.ones(40, requires_grad=True)
            y = checkpoint(nested, x, use_reentrant=False, **options) if checkpointed else nested(x)
            y.sum().backward()
            grads.append((y.detach(), x.grad, torch.rand(3)))
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


def test_other_hooks_on_saved_tensors_see_what_torch_saves(block: Block) -> None:
    def shapes() -> list[torch.Size]:
        seen: list[torch.Size] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            seen.append(t.shape)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            dropped(torch.ones(40, requires_grad=True))
        return seen

    with block():
        within = shapes()
    assert within
    assert set(within) == {torch.Size([40])}


# ------------------------------------------------------------------ threads, modes, copies


def test_another_thread_cannot_enter_a_block(name: str, block: Block) -> None:
    found: list[BaseException | torch.Tensor] = []

    def enter(kind: str) -> None:
        try:
            with BLOCKS[kind]():
                found.append(torch.rand(3))
        except RandomError as error:
            found.append(error)

    with block():
        first = torch.rand(3)
        for kind in BLOCKS:
            thread = threading.Thread(target=enter, args=(kind,))
            thread.start()
            thread.join()
        second = torch.rand(3)
    for error in found:
        assert isinstance(error, RandomError)
        assert f"another thread is within a block of {name}" in str(error)
    assert len(found) == 2
    with block():
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)
    thread = threading.Thread(target=enter, args=(name,))  # nobody holds it now
    thread.start()
    thread.join()
    assert isinstance(found[2], torch.Tensor)
    assert torch.equal(found[2], first)


def test_threads_that_race_draw_right_or_raise(block: Block) -> None:
    before = torch.get_rng_state()
    with block():
        expected = [torch.rand(10) for _ in range(10)]
    wrong: list[int] = []
    refused: list[int] = []
    gate = threading.Barrier(4)

    def run(k: int) -> None:
        gate.wait()
        try:
            with warnings.catch_warnings(), block():
                if not all(torch.equal(torch.rand(10), e) for e in expected):
                    wrong.append(k)
        except RandomError:
            refused.append(k)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(refused) < 4
    assert torch.equal(torch.get_rng_state(), before)


def test_blocks_of_both_kinds_nest() -> None:
    with portable(3):
        alone = torch.rand(3), torch.rand(3)
    with emulate_cuda("A100", seed=3) as gpu:
        emulated = torch.rand(3), torch.rand(3)
    with emulate_cuda("A100", seed=3) as gpu:
        first = torch.rand(3)
        with portable(3) as generator:
            assert block_name() == "portable"
            assert torch.equal(torch.rand(3), alone[0])
            assert (gpu.initial_seed(), gpu.get_offset()) == (3, 4)
            with emulate_cuda("A100", seed=3):
                assert torch.equal(torch.rand(3), emulated[0])
                assert generator.counter == 1
            assert torch.equal(torch.rand(3), alone[1])
        assert torch.equal(first, emulated[0])
        assert torch.equal(torch.rand(3), emulated[1])
    assert block_name() is None


def test_the_state_is_read_and_written_under_modes_that_fake_tensors(block: Block) -> None:
    with block() as generator:
        expected = [torch.randint(9, (5,)), torch.empty(5).uniform_(1, 2)]
        generator.manual_seed(3)
        with FakeTensorMode():
            assert torch.rand(3).shape == (3,)
            assert generator.initial_seed() == 3
            generator.manual_seed(4)
            for op, args in (("random_", (0, 9)), ("uniform_", (1.0, 2.0))):
                dtype = torch.float16 if op == "random_" else torch.float32
                generator.source(op, dtype, torch.device("cpu"), (5,), (1,), args).finish()
        with torch.device("meta"):
            assert torch.rand(3).is_meta
            generator.manual_seed(3)
        assert torch.equal(torch.randint(9, (5,)), expected[0])
        assert torch.equal(torch.empty(5).uniform_(1, 2), expected[1])


def test_copies_of_a_generator_are_not_in_the_block() -> None:
    with portable(3) as generator:
        torch.rand(3)
        copies: list[PortableGenerator] = [copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))]
        for one in copies:
            assert (one.initial_seed(), one.counter) == (3, 1)
            one.manual_seed(9)
        assert (generator.initial_seed(), generator.counter) == (3, 1)
