"""The block: what draws in it, and that saving, seeding and replaying mean what they do outside."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vescale_rng import Part, PortableGenerator, part_of_flat, part_of_slices, portable
from vescale_rng._draw.fill import fill
from vescale_rng.errors import UnsupportedRandomOperatorError


def reference(seed: int, call: int, op: str, shape: tuple[int, ...], *args: object, dtype=torch.float32):
    """The draw by its definition: source, seed, number of the call."""
    out = torch.empty(shape, dtype=dtype)
    g = PortableGenerator(seed, counter=call)
    g.source(op, dtype, out.device, shape, out.stride(), args).emit(out.view(-1), 0, args)
    return out


def test_operators_on_plain_tensors():
    with portable(5) as g:
        assert isinstance(g, PortableGenerator)
        assert torch.equal(torch.rand(3, 4), reference(5, 0, "uniform_", (3, 4)))
        assert torch.equal(torch.randn(7), reference(5, 1, "normal_", (7,), 0.0, 1.0))
        x = torch.empty(6, dtype=torch.float64)
        assert torch.equal(x.exponential_(2.0), reference(5, 2, "exponential_", (6,), 2.0, dtype=torch.float64))
        assert torch.equal(torch.randint(3, 9, (5,)), reference(5, 3, "random_", (5,), 3, 9, dtype=torch.int64))
        assert torch.equal(torch.rand_like(x), reference(5, 4, "uniform_", (6,), dtype=torch.float64))
        assert torch.equal(
            torch.bernoulli(torch.full((9,), 0.5)).bool(), reference(5, 5, "uniform_", (9,), dtype=torch.float64) < 0.5
        )
        p = torch.tensor([1.0, 2.0, 3.0])
        assert torch.equal(torch.multinomial(p, 2), PortableGenerator(5, counter=6).whole("multinomial", (p, 2), {}))
        assert torch.equal(torch.randperm(9), PortableGenerator(5, counter=7).whole("randperm", (9,), {}))
        assert torch.randperm(9, dtype=torch.int32).dtype == torch.int32
        out = torch.empty(9, dtype=torch.int64)
        assert torch.randperm(9, out=out) is out
        assert sorted(out.tolist()) == list(range(9))
        assert g.counter == 10
        linear = torch.nn.Linear(3, 4)
        bound = 3**-0.5
        assert torch.equal(linear.weight.data, reference(5, 10, "uniform_", (4, 3), -bound, bound))


def test_an_empty_tensor_is_a_call():
    with portable(5) as g:
        torch.rand(0)
        torch.empty(3, 0).normal_()
        assert g.counter == 2


def test_order_is_that_of_memory():
    with portable(1):
        last = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last).uniform_()
    assert torch.equal(last.permute(0, 2, 3, 1).flatten(), reference(1, 0, "uniform_", (120,)))


def test_complex():
    with portable(2):
        x = torch.randn(5, dtype=torch.complex128)
    parts = reference(2, 0, "normal_", (10,), 0.0, 0.5**0.5, dtype=torch.float64)
    torch.testing.assert_close(torch.view_as_real(x).flatten(), parts, rtol=1e-15, atol=0)


PARTS = [
    part_of_slices((6, 10), (slice(2, 5), slice(None))),
    part_of_slices((6, 10), (slice(None), slice(3, 4))),
    part_of_slices((6, 10), (slice(1, 6), slice(7, 10))),
    part_of_slices((6, 10), (slice(3, 3), slice(None))),
    part_of_flat((6, 10), 7, 31),
    Part.whole((6, 10)),
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("op", "args"), [("rand", ()), ("randn", ()), ("dropout", (0.3,)), ("randint", (0, 7)), ("exponential_", (1.0,))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_part_is_the_part_of_the_whole(part, op, args, dtype):
    whole = torch.empty(6, 10, dtype=dtype)
    with portable(3) as g:
        fill(op, whole, Part.whole((6, 10)), args)
        g.manual_seed(3)
        local = torch.empty(part.local_shape, dtype=dtype)
        fill(op, local, part, args)
        assert g.counter == 1
    generator = PortableGenerator(3)
    again = torch.empty(part.local_shape, dtype=dtype)
    fill(op, again, part, args, {"generator": generator})
    assert generator.counter == 1
    for found in (local, again):
        for view, box in zip(part.views(found), part.boxes, strict=True):
            window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            assert torch.equal(view, whole[window])


def test_what_has_no_portable_form_is_refused():
    with portable(0) as g:
        with pytest.raises(UnsupportedRandomOperatorError, match="poisson"):
            torch.poisson(torch.ones(3))
        with pytest.raises(UnsupportedRandomOperatorError, match="binomial"):
            torch.binomial(torch.ones(3), torch.ones(3))
        assert g.counter == 0


def test_an_explicit_torch_generator_draws_for_itself():
    expected = torch.rand(4, generator=torch.Generator().manual_seed(1))
    with portable(0) as g:
        assert torch.equal(torch.rand(4, generator=torch.Generator().manual_seed(1)), expected)
        assert g.counter == 0


# -- state ------------------------------------------------------------------------------------------------------------


def test_the_default_generator_is_as_before():
    torch.manual_seed(3)
    torch.rand(5)
    before = torch.get_rng_state()
    with portable(0):
        torch.rand(5)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UnsupportedRandomOperatorError), portable(0):
        torch.poisson(torch.rand(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_keeps_its_last_state():
    with portable(4, counter=7) as g:
        torch.rand(5)
    assert (g.initial_seed(), g.counter) == (4, 8)
    with portable(g) as again:
        assert again is g
        assert torch.equal(torch.rand(5), reference(4, 8, "uniform_", (5,)))
    assert g.counter == 9
    with pytest.raises(ValueError, match="counter=2"), portable(g, counter=2):
        pass


def test_saved_and_loaded():
    with portable(4) as g:
        torch.rand(5)
        state = g.get_state()
        expected = torch.rand(5)
    with portable(0) as other:
        other.set_state(state)
        assert torch.equal(torch.rand(5), expected)


def test_seeding_starts_the_stream_of_the_seed():
    with portable(4) as g:
        torch.rand(5)
        torch.manual_seed(9)
        assert torch.equal(torch.rand(5), reference(9, 0, "uniform_", (5,)))
        torch.manual_seed(9)
        assert g.counter == 0
        g.manual_seed(4)
        assert torch.equal(torch.rand(5), reference(4, 0, "uniform_", (5,)))


def test_torch_state_is_our_state():
    with portable(4) as g:
        torch.rand(5)
        state = torch.get_rng_state()
        expected = torch.rand(5)
        torch.set_rng_state(state)
        assert g.counter == 1
        assert torch.equal(torch.rand(5), expected)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            torch.rand(5)
        assert (g.initial_seed(), g.counter) == (4, 2)


def test_numbers_that_pass_us_by_do_not_turn_the_stream_back():
    with portable(4) as g:
        torch.rand(5)
        # What torch draws in C++ without an operator: here, by the generator of the same state.
        with torch._C._DisableTorchDispatch():
            stray = torch.rand(1000)
        assert stray.unique().numel() > 990
        with pytest.warns(RuntimeWarning, match="not portable"):
            assert (g.initial_seed(), g.counter) == (4, 1)
        assert torch.equal(torch.rand(5), reference(4, 1, "uniform_", (5,)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_replays_the_mask(use_reentrant):
    x = torch.ones(500, requires_grad=True)
    with portable(4) as g:
        y = checkpoint(lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), x, use_reentrant=use_reentrant)
        after = torch.rand(3)
        y.sum().backward()
        assert torch.equal(x.grad, y.detach())
        assert g.counter == 3
        g.counter = 2
        assert torch.equal(torch.rand(3), after)


def test_dropout_is_the_keep_mask_over_the_chance():
    x = torch.randn(1000)
    with portable(4):
        y = F.dropout(x, 0.25)
        fused, kept = torch.native_dropout(x, 0.25, True)
    assert torch.equal(y, x * (reference(4, 0, "dropout", (1000,), 0.25) / 0.75))
    assert torch.equal(fused, x * (reference(4, 1, "dropout", (1000,), 0.25) / 0.75))
    assert torch.equal(kept, reference(4, 1, "dropout", (1000,), 0.25).bool())


def test_nested_blocks():
    with portable(1) as outer:
        torch.rand(5)
        with portable(2) as inner:
            assert torch.equal(torch.rand(5), reference(2, 0, "uniform_", (5,)))
            assert (outer.counter, inner.counter) == (1, 1)
            with portable(1):
                assert torch.equal(torch.rand(5), reference(1, 0, "uniform_", (5,)))
            assert torch.equal(torch.rand(5), reference(2, 1, "uniform_", (5,)))
        assert torch.equal(torch.rand(5), reference(1, 1, "uniform_", (5,)))
        assert (outer.counter, inner.counter) == (2, 2)


def test_as_a_decorator():
    @portable(6)
    def numbers():
        return torch.rand(5)

    assert torch.equal(numbers(), reference(6, 0, "uniform_", (5,)))
    assert torch.equal(numbers(), reference(6, 0, "uniform_", (5,)))


def test_a_failing_draw_leaves_the_state():
    with portable(4) as g:
        torch.rand(5)
        with pytest.raises(RuntimeError):
            torch.empty(5).normal_(0.0, -1.0)
        assert g.counter == 1


def test_other_threads_are_reported():
    with portable(4) as g:
        torch.rand(5)
        thread = threading.Thread(target=torch.rand, args=(5,))
        thread.start()
        thread.join()
        with pytest.warns(RuntimeWarning, match="a thread"):
            torch.rand(5)
        assert g.counter == 2
        assert torch.equal(torch.rand(5), reference(4, 2, "uniform_", (5,)))
