"""`emulate_cuda`: numbers that were printed on real GPUs, and what the block does to torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vescale_rng._cuda.emulate import emulate_cuda
from vescale_rng._cuda.generator import EmulatedGenerator
from vescale_rng._cuda.profile import DeviceProfile
from vescale_rng._draw.fill import fill
from vescale_rng._draw.mode import active_sampler
from vescale_rng._layout import Part, part_of_slices
from vescale_rng.errors import RandomError, UnsupportedRandomOperatorError


def printed(values: torch.Tensor, text: str, digits: int = 4) -> bool:
    """Whether values print as a text of numbers."""
    return [f"{v:.{digits}f}" for v in values.reshape(-1).tolist()] == text.split()


# ------------------------------------------------------------------ outputs of real GPUs, from public pages


def test_rand_seed_0() -> None:
    with emulate_cuda("A100") as generator:
        first = torch.rand(10)
        assert generator.get_offset() == 4
        second = torch.rand(10)
    assert printed(first, "0.3990 0.5167 0.0249 0.9401 0.9459 0.7967 0.4150 0.8203 0.2290 0.9096")
    assert printed(second, "0.9722 0.7910 0.4690 0.3300 0.3345 0.3783 0.7640 0.6405 0.1103 0.3594")


def test_exact_uniforms_of_the_first_threads() -> None:
    with emulate_cuda("A100", seed=42):
        assert torch.rand(4).tolist() == pytest.approx([0.612959862, 0.0100588445, 0.398413688, 0.0403083973], rel=1e-8)
    with emulate_cuda("A100", seed=0):
        assert torch.rand(4).tolist() == pytest.approx([0.399046481, 0.516679168, 0.0249303859, 0.940079391], rel=1e-8)


def test_randn() -> None:
    with emulate_cuda("H100", seed=42):
        assert printed(torch.randn(10), "0.1940 2.1614 -0.1721 0.8491 -1.9244 0.6530 -0.6494 -0.8175 0.5280 -1.2753")
    with emulate_cuda("H100", seed=0):
        assert printed(
            torch.randn(10), "-0.9247 -0.4253 -2.6438 0.1452 -0.1209 -0.5797 -0.6229 -0.3284 -1.0745 -0.3631"
        )
        torch.manual_seed(0)
        wide = torch.randn(8, dtype=torch.float64)
        assert printed(wide, "-0.3104 -0.0343 0.1756 -2.2804 0.5039 0.5596 -0.0750 0.9691")


def test_randint() -> None:
    with emulate_cuda("V100"):
        assert torch.randint(0, 100, (8,)).tolist() == [41, 97, 91, 72, 53, 4, 3, 33]


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("H100", "0.6724 1.2141 0.9733"),
        ("A100", "0.6724 1.2141 0.9733"),
        ("RTX 2080 Ti", "1.1495 0.9265 1.1323"),
        ("RTX 3060", "1.3374 1.4960 0.9115"),
    ],
)
def test_vector_addition_of_the_triton_tutorial(model: str, end: str) -> None:
    with emulate_cuda(model, seed=0):
        x, y = torch.rand(98432), torch.rand(98432)
    assert printed((x + y)[-3:], end)


@pytest.mark.parametrize(
    ("model", "corners"),
    [
        ("A100", [(-10.9531, -4.7109, 15.6953), (26.8438, 10.0469, -5.4297), (-28.4062, 4.3320, -26.4219)]),
        ("H100 PCIe", [(-18.1719, -3.2539, 9.3984), (17.2188, 0.6802, -18.7656), (-16.6719, 24.2031, -27.8438)]),
    ],
)
def test_matmul_of_the_triton_tutorial(model: str, corners: list[tuple[float, ...]]) -> None:
    with emulate_cuda(model, seed=0):
        a, b = (torch.randn(512, 512, dtype=torch.float16).double() for _ in range(2))
    product = a[:2] @ b
    got = torch.stack((product[0, :3], product[1, :3], product[0, -3:]))
    # 512 products of halves, which a GPU adds in another order.
    assert float((got - torch.tensor(corners, dtype=torch.float64)).abs().max()) < 0.05


# ------------------------------------------------------------------ operators on plain tensors

DRAWS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3, 5),
    "rand complex": lambda: torch.rand(3, dtype=torch.complex64),
    "rand_like": lambda: torch.rand_like(torch.ones(4, 5)),
    "randn": lambda: torch.randn(3, 5, dtype=torch.bfloat16),
    "randn complex": lambda: torch.randn(3, dtype=torch.complex128),
    "randn_like": lambda: torch.randn_like(torch.ones(4, 5)),
    "randint": lambda: torch.randint(7, (3, 5)),
    "randint_like": lambda: torch.randint_like(torch.ones(5), 2, 9),
    "uniform_": lambda: torch.empty(5).uniform_(1, 2),
    "normal_": lambda: torch.empty(5).normal_(1, 2),
    "normal of tensors": lambda: torch.normal(torch.ones(3, 1), torch.ones(5)),
    "normal of a mean": lambda: torch.normal(torch.ones(3), 2.0),
    "normal of a std": lambda: torch.normal(1.0, torch.ones(3)),
    "normal of floats": lambda: torch.normal(1.0, 2.0, (3,)),
    "random_": lambda: torch.empty(5).random_(),
    "random_ to": lambda: torch.empty(5).random_(9),
    "random_ from to": lambda: torch.empty(5).random_(-3, 9),
    "random_ 64 bits": lambda: torch.empty(5, dtype=torch.int64).random_(-(2**63), None),
    "bernoulli": lambda: torch.bernoulli(torch.full((5,), 0.5)),
    "bernoulli p": lambda: torch.bernoulli(torch.ones(5), 0.5),
    "bernoulli_": lambda: torch.empty(5, dtype=torch.bool).bernoulli_(0.5),
    "bernoulli_ tensor": lambda: torch.empty(5).bernoulli_(torch.full((5,), 0.5)),
    "exponential_": lambda: torch.empty(5).exponential_(2),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "geometric_": lambda: torch.empty(5).geometric_(0.5),
    "native_dropout": lambda: torch.native_dropout(torch.ones(8), 0.5, True)[0],
    "dropout": lambda: F.dropout(torch.ones(8)),
    "dropout in place": lambda: F.dropout(torch.ones(8), inplace=True),
    "alpha_dropout": lambda: F.alpha_dropout(torch.ones(8), training=True),
    "dropout2d": lambda: F.dropout2d(torch.ones(2, 3, 4, 4)),
    "gumbel_softmax": lambda: F.gumbel_softmax(torch.ones(5)),
    "out": lambda: torch.rand(3, out=torch.empty(3)),
    "functional": lambda: torch.ops.aten.uniform.default(torch.ones(3)),
    "kaiming": lambda: torch.nn.init.kaiming_uniform_(torch.empty(4, 5)),
    "trunc_normal": lambda: torch.nn.init.trunc_normal_(torch.empty(4, 5)),
    "Linear": lambda: torch.nn.Linear(3, 5).weight,
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_repeat_and_leave_torch_alone(name: str) -> None:
    before = torch.get_rng_state()
    with emulate_cuda("A100", seed=5) as generator:
        first = DRAWS[name]()
        offset = generator.get_offset()
        second = DRAWS[name]()
        torch.manual_seed(5)
        again = DRAWS[name]()
        assert generator.get_offset() == offset > 0
        generator.set_offset(offset)
        assert torch.equal(DRAWS[name](), second)
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    plain = DRAWS[name]()
    torch.set_rng_state(before)
    assert first.shape == plain.shape
    assert first.dtype == plain.dtype
    assert first.stride() == plain.stride()


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.randperm(5),
        lambda: torch.poisson(torch.ones(3)),
        lambda: torch.multinomial(torch.ones(3), 1),
        lambda: torch.binomial(torch.ones(3), torch.full((3,), 0.5)),
        lambda: torch._standard_gamma(torch.ones(3)),
        lambda: torch._sample_dirichlet(torch.ones(3)),
        lambda: F.rrelu(torch.ones(3), training=True),
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3, dropout_p=0.5),
        lambda: torch.rand(3, generator=torch.Generator()),
        lambda: torch.empty(3).uniform_(generator=torch.Generator()),
    ],
)
def test_operators_without_a_model_raise(call: Callable[[], Any]) -> None:
    with emulate_cuda("A100") as generator:
        with pytest.raises(UnsupportedRandomOperatorError):
            call()
        assert generator.get_offset() == 0


def test_recurrent_dropout_raises_and_the_rest_passes() -> None:
    x = torch.ones(4, 2, 3)
    with emulate_cuda("A100") as generator:
        deep, flat = torch.nn.LSTM(3, 3, num_layers=2, dropout=0.5), torch.nn.LSTM(3, 3)
        offset = generator.get_offset()
        with pytest.raises(UnsupportedRandomOperatorError, match=r"lstm with dropout=0.5 between layers"):
            deep(x)
        flat(x)
        deep.eval()(x)
        F.rrelu(torch.ones(3))
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3)
        torch.rand(3, device="meta")
        F.dropout(torch.ones(4), 0.0)
        F.dropout(torch.ones(4), 1.0)
        F.dropout(torch.ones(4), training=False)
        torch.rand(0)
        assert generator.get_offset() == offset


def test_bad_arguments_raise_as_in_torch_and_draw_nothing() -> None:
    with emulate_cuda("A100") as generator:
        for call in (
            lambda: torch.empty(3).uniform_(2, 1),
            lambda: torch.empty(3).normal_(0, -1),
            lambda: torch.empty(3).geometric_(1.5),
            lambda: torch.empty(3).exponential_(-1),
            lambda: torch.empty(3).bernoulli_(1.5),
            lambda: torch.bernoulli(torch.full((3,), 1.5)),
            lambda: torch.empty(3).bernoulli_(torch.ones(3, dtype=torch.int64)),
            lambda: torch.randint(3, 3, (2,)),
            lambda: torch.normal(0.0, torch.full((3,), -1.0)),
            lambda: torch.normal(torch.zeros(3), -1.0),
            lambda: torch.empty(1).expand(3).uniform_(),
            lambda: torch.empty(3, dtype=torch.int64).uniform_(),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call()
        assert generator.get_offset() == 0


def test_memory_order() -> None:
    with emulate_cuda("A100", seed=1) as generator:
        flat = torch.rand(120)
        generator.manual_seed(1)
        last = torch.rand_like(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
        assert torch.equal(last.permute(0, 2, 3, 1).reshape(-1), flat)
        generator.manual_seed(1)
        turned = torch.empty(10, 12).t().uniform_()
        assert torch.equal(turned.t().reshape(-1), flat)
        generator.manual_seed(1)
        gaps = torch.zeros(10, 24)
        gaps[:, ::2].uniform_()
        assert torch.equal(gaps[:, ::2].reshape(-1), flat)
        assert not gaps[:, 1::2].any()


def test_chances_of_other_strides_change_the_order() -> None:
    """CUDA_tensor_apply2 swaps dims only where neither tensor objects."""
    p = torch.linspace(0.01, 0.99, 60).view(6, 10)
    with emulate_cuda("A100", seed=1) as generator:
        plain = torch.bernoulli(p)
        generator.manual_seed(1)
        logical = torch.empty(10, 6).t().bernoulli_(p)
        generator.manual_seed(1)
        both = torch.empty(10, 6).t().bernoulli_(p.t().contiguous().t())
        generator.manual_seed(1)
        memory = torch.bernoulli(p.t().contiguous())
    assert torch.equal(logical, plain)
    assert torch.equal(both, memory.t())


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize(
    ("dtype", "numel"), [(torch.float32, 4096), (torch.bfloat16, 4096), (torch.float64, 4096), (torch.float32, 4095)]
)
def test_dropout_is_the_fused_kernel(dtype: torch.dtype, numel: int) -> None:
    x = torch.linspace(-2, 2, numel).to(dtype).requires_grad_()
    with emulate_cuda("T4", seed=3) as generator:
        y = F.dropout(x, 0.25)
        assert generator.get_offset() == 4
        y.sum().backward()
        generator.manual_seed(3)
        mask = torch.empty(numel, dtype=dtype)
        fill("dropout", mask, Part.whole((numel,)), (0.25,))
        generator.manual_seed(3)
        out, kept = torch.native_dropout(x, 0.25, True)
    assert torch.equal(mask.bool(), kept)
    assert torch.equal(out, y)
    scale = 1.0 / torch.tensor(0.75).to(torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(y, (x.to(scale.dtype) * mask.to(scale.dtype) * scale).to(dtype))
    assert torch.equal(x.grad != 0, kept)


def test_dropout_of_a_shifted_view_uses_smaller_vectors() -> None:
    base = torch.ones(4100)
    with emulate_cuda("T4", seed=3) as generator:
        masks = []
        for shift in (0, 1, 2, 4):
            generator.manual_seed(3)
            masks.append(F.dropout(base[shift : shift + 4096]))
    assert torch.equal(masks[0], masks[3])
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_dropout_of_an_odd_permuted_tensor_goes_in_logical_order() -> None:
    with emulate_cuda("T4", seed=3) as generator:
        permuted = F.dropout(torch.ones(5, 7).t())
        generator.manual_seed(3)
        plain = F.dropout(torch.ones(7, 5))
    assert torch.equal(permuted, plain)
    assert permuted.stride() == (1, 7)


def test_dropout_inside_modules_and_inference_mode() -> None:
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.5)
    x = torch.ones(4, 2, 8)
    with emulate_cuda("A100", seed=2) as generator:
        attention(x, x, x)
        assert generator.get_offset() == 4
        generator.manual_seed(2)
        y = F.dropout(torch.ones(64))
        generator.manual_seed(2)
        with torch.inference_mode():
            assert torch.equal(F.dropout(torch.ones(64)), y)
            with pytest.raises(UnsupportedRandomOperatorError):
                F.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 2)] * 3, dropout_p=0.5)


def test_math_attention_drops_like_dropout() -> None:
    q = torch.eye(8).view(1, 1, 8, 8)
    with emulate_cuda("A100", seed=2) as generator:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        generator.manual_seed(2)
        kept = F.dropout(torch.ones(1, 1, 8, 8)) != 0
    assert torch.equal(out != 0, kept)


# ------------------------------------------------------------------ state


def test_state_of_the_generator() -> None:
    generator = EmulatedGenerator(DeviceProfile.of("A100"), -1)
    assert generator.initial_seed() == 2**64 - 1
    generator.set_offset(2**40)
    state = generator.get_state()
    assert state.tolist() == [255] * 8 + list((2**40).to_bytes(8, "little"))
    other = EmulatedGenerator(DeviceProfile.of("H100"))
    other.set_state(state)
    assert (other.initial_seed(), other.get_offset()) == (2**64 - 1, 2**40)
    with pytest.raises(RandomError, match="multiple of 4"):
        other.set_offset(6)
    with pytest.raises(RandomError, match="16 bytes"):
        other.set_state(torch.get_rng_state())
    with pytest.raises(RandomError, match="seed has to be"):
        other.manual_seed(2**64)


def test_torch_state_functions_act_on_the_emulated_gpu() -> None:
    with emulate_cuda("A100", seed=9) as generator:
        torch.rand(5)
        state = torch.get_rng_state()
        first = torch.rand(5)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            torch.rand(99)
            assert generator.initial_seed() == 1
        assert generator.initial_seed() == 9
        assert generator.get_offset() == 8
        torch.set_rng_state(state)
        assert torch.equal(torch.rand(5), first)


def test_checkpointed_dropout_is_recomputed() -> None:
    x = torch.ones(1000, requires_grad=True)
    with emulate_cuda("A100", seed=9) as generator:
        y = checkpoint(lambda v: F.dropout(v) * v, x, use_reentrant=False)
        offset = generator.get_offset()
        y.sum().backward()
        assert generator.get_offset() == offset
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * y.detach())


def test_blocks_nest_and_go_on() -> None:
    before = torch.get_rng_state()
    with emulate_cuda("A100", seed=3) as outer:
        first = torch.rand(5)
        with emulate_cuda("H100", seed=3) as inner:
            assert torch.equal(torch.rand(5), first)
            assert active_sampler() is inner
            F.dropout(torch.ones(4))
        assert (outer.get_offset(), inner.get_offset()) == (4, 8)
        F.dropout(torch.ones(4))
        assert outer.get_offset() == 8
    assert active_sampler() is None
    assert torch.equal(torch.get_rng_state(), before)
    with emulate_cuda(outer):
        on = torch.rand(5)
    outer.set_offset(8)
    with emulate_cuda(outer):
        assert torch.equal(torch.rand(5), on)
    with pytest.raises(ValueError, match="seed=1"), emulate_cuda(outer, seed=1):
        pass


def test_an_error_inside_ends_the_block() -> None:
    before = torch.get_rng_state()

    def fails() -> None:
        with emulate_cuda("A100"):
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    plain = F.dropout(torch.ones(50))
    torch.manual_seed(0)
    assert torch.equal(plain, torch.empty(50).bernoulli_(0.5) * 2)
    torch.set_rng_state(before)


# ------------------------------------------------------------------ sharded draws


@pytest.mark.parametrize("op", ["rand", "normal_", "bernoulli_", "randint", "exponential_", "dropout"])
@pytest.mark.parametrize("shape", [(40, 30), (700, 1000)])
def test_parts_of_a_draw(op: str, shape: tuple[int, int]) -> None:
    args = {"bernoulli_": (0.5,), "randint": (0, 9), "dropout": (0.5,)}.get(op, ())
    with emulate_cuda("T4", seed=3) as generator:
        whole = torch.empty(shape)
        fill(op, whole, Part.whole(shape), args)
        end = generator.get_offset()
        for slices in ((slice(5, 20), slice(None)), (slice(None), slice(7, 11))):
            part = part_of_slices(shape, slices)
            generator.manual_seed(3)
            local = torch.empty(part.local_shape)
            fill(op, local, part, args)
            assert torch.equal(local, whole[slices])
            assert generator.get_offset() == end
    outside = EmulatedGenerator(DeviceProfile.of("T4"), 3)
    again = torch.empty(shape)
    fill(op, again, Part.whole(shape), args, {"generator": outside})
    assert torch.equal(again, whole)
    assert outside.get_offset() == end


LAYOUTS = [
    ((7, 5), (1, 7)),
    ((6, 8), (1, 12)),
    ((6, 8), (16, 2)),
    ((4, 3, 5), (15, 1, 3)),
    ((4, 3, 5), (2, 40, 8)),
    ((40, 3, 30), (1, 1200, 40)),
    ((3, 1, 5), (1, 1, 3)),
    ((600, 1001), (1, 600)),
]


@pytest.mark.parametrize(("shape", "stride"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parts_of_a_dropout_of_any_strides(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
    profile = DeviceProfile("small", 2, 1024)
    x = torch.empty_strided(shape, stride, dtype=dtype).fill_(1.0)
    with emulate_cuda(profile, seed=3) as generator:
        whole = F.dropout(x) != 0
        end = generator.get_offset()
        for slices in (
            tuple(slice(0, n) for n in shape),
            tuple(slice(n // 3, n - n // 3) for n in shape),
            tuple(slice(0 if d else 1, n) for d, n in enumerate(shape)),
            tuple(slice(n // 2 if d == len(shape) - 1 else 0, n) for d, n in enumerate(shape)),
        ):
            generator.manual_seed(3)
            part = part_of_slices(shape, slices, stride=stride)
            mask = torch.empty(part.local_shape, dtype=dtype)
            fill("dropout", mask, part, (0.5,))
            assert torch.equal(mask != 0, whole[slices])
            assert generator.get_offset() == end


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize("profile", [None, 5, 1.5, torch.tensor(3)])
def test_what_is_no_profile(profile: Any) -> None:
    with pytest.raises(TypeError, match="profile: expected the name of a GPU model"), emulate_cuda(profile):
        pass
    with pytest.raises(TypeError, match="profile: expected a DeviceProfile"):
        EmulatedGenerator(profile)


def test_wrong_types() -> None:
    generator = EmulatedGenerator(DeviceProfile.of("A100"), 3)
    for seed in (1.5, "a", None):
        with pytest.raises(TypeError, match="seed: expected an integer"), emulate_cuda("A100", seed=seed):
            pass
        with pytest.raises(TypeError, match="offset: expected an integer"):
            generator.set_offset(seed)
    for state in (b"x" * 16, None, [1]):
        with pytest.raises(TypeError, match="state: expected the tensor"):
            generator.set_state(state)
    assert (generator.initial_seed(), generator.get_offset()) == (3, 0)


def test_names_of_devices() -> None:
    with emulate_cuda("NVIDIA H100 80GB HBM3", seed=1) as generator:
        assert generator.profile == DeviceProfile.of("H100")
