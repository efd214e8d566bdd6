"""Random tensors of which the caller holds a part; the oracle is torch's own call on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.nn import functional

import vescale_rng
from vescale_rng import PortableGenerator, draw, dropout, dropout_mask, emulate_cuda, fill_, portable
from vescale_rng._layout import Part
from vescale_rng.errors import LayoutError, RandomError, UnsupportedRandomOperatorError
from vescale_testing import fake_ranks

SHAPE = (11, 7)
PART: Any = (slice(3, 8), [slice(0, 2), slice(4, 7)])


def cut(whole: Tensor) -> Tensor:
    """What `PART` is of the whole."""
    return torch.cat([whole[3:8, 0:2], whole[3:8, 4:7]], 1)


CHANCES = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
NAMED: dict[str, tuple[Callable[..., Tensor], Callable[[], Tensor]]] = {
    "rand": (lambda **k: vescale_rng.rand(SHAPE, **k), lambda: torch.rand(SHAPE)),
    "rand of doubles": (
        lambda **k: vescale_rng.rand(SHAPE, dtype=torch.float64, **k), lambda: torch.rand(SHAPE, dtype=torch.float64)
    ),
    "randn": (lambda **k: vescale_rng.randn(SHAPE, **k), lambda: torch.randn(SHAPE)),
    "randn of complex": (
        lambda **k: vescale_rng.randn(SHAPE, dtype=torch.complex64, **k),
        lambda: torch.randn(SHAPE, dtype=torch.complex64),
    ),
    "randint": (lambda **k: vescale_rng.randint(3, 50, SHAPE, **k), lambda: torch.randint(3, 50, SHAPE)),
    "randint of int32": (
        lambda **k: vescale_rng.randint(0, 2**28, SHAPE, dtype=torch.int32, **k),
        lambda: torch.randint(0, 2**28, SHAPE, dtype=torch.int32),
    ),
    "uniform": (lambda **k: vescale_rng.uniform(SHAPE, -1.0, 2.0, **k), lambda: torch.empty(SHAPE).uniform_(-1.0, 2.0)),
    "normal": (lambda **k: vescale_rng.normal(SHAPE, 1.0, 2.0, **k), lambda: torch.normal(1.0, 2.0, SHAPE)),
    "normal of means": (
        lambda **k: vescale_rng.normal(SHAPE, cut(CHANCES).double(), **k), lambda: torch.normal(CHANCES.double(), 1.0)
    ),
    "normal of stds": (
        lambda **k: vescale_rng.normal(SHAPE, 2.0, cut(CHANCES), **k), lambda: torch.normal(2.0, CHANCES)
    ),
    "bernoulli": (lambda **k: vescale_rng.bernoulli(SHAPE, 0.3, **k), lambda: torch.empty(SHAPE).bernoulli_(0.3)),
    "bernoulli of chances": (
        lambda **k: vescale_rng.bernoulli(SHAPE, cut(CHANCES), **k), lambda: torch.bernoulli(CHANCES)
    ),
    "exponential": (lambda **k: vescale_rng.exponential(SHAPE, 2.0, **k), lambda: torch.empty(SHAPE).exponential_(2.0)),
    "cauchy": (lambda **k: vescale_rng.cauchy(SHAPE, 1.0, 2.0, **k), lambda: torch.empty(SHAPE).cauchy_(1.0, 2.0)),
    "log_normal": (lambda **k: vescale_rng.log_normal(SHAPE, **k), lambda: torch.empty(SHAPE).log_normal_()),
    "geometric": (lambda **k: vescale_rng.geometric(SHAPE, 0.2, **k), lambda: torch.empty(SHAPE).geometric_(0.2)),
    "dropout_mask": (
        lambda **k: dropout_mask(SHAPE, 0.3, **k),
        lambda: functional.dropout(torch.ones(SHAPE), 0.3).ne(0).float(),
    ),
    "poisson": (lambda **k: vescale_rng.poisson(CHANCES * 9, **k), lambda: torch.poisson(CHANCES * 9)),
    "binomial": (
        lambda **k: vescale_rng.binomial((CHANCES * 9).round(), CHANCES, **k),
        lambda: torch.binomial((CHANCES * 9).round(), CHANCES),
    ),
    "multinomial": (
        lambda **k: vescale_rng.multinomial(torch.cat([CHANCES, CHANCES], 1), 7, **k),
        lambda: torch.multinomial(torch.cat([CHANCES, CHANCES], 1), 7),
    ),
    "multinomial with replacement": (
        lambda **k: vescale_rng.multinomial(CHANCES, 7, replacement=True, **k),
        lambda: torch.multinomial(CHANCES, 7, replacement=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_parts_equal_torch(name: str) -> None:
    mine, torchs = NAMED[name]
    torch.manual_seed(5)
    torch.randn(1)
    before = torch.get_rng_state()
    expected = torchs()
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    local = mine(part=PART)
    assert local.dtype == expected.dtype
    assert local.is_contiguous()
    assert torch.equal(local, cut(expected))
    assert torch.equal(torch.get_rng_state(), after)
    generator = torch.Generator()
    generator.set_state(before)
    assert torch.equal(mine(part=PART, generator=generator), cut(expected))
    assert torch.equal(generator.get_state(), after)
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("name", [name for name in NAMED if " of means" not in name])
def test_ranges_meshes_and_wholes(name: str) -> None:
    mine, torchs = NAMED[name]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    expected = torchs()
    after = torch.get_rng_state()

    def drawn(**where: Any) -> Tensor:
        torch.set_rng_state(before)
        local = mine(**where)
        assert torch.equal(torch.get_rng_state(), after)
        return local

    if name in ("normal of stds", "bernoulli of chances"):
        return  # their tensors are made for one part
    assert torch.equal(drawn(), expected)
    assert torch.equal(drawn(part=range(9, 44)), expected.flatten()[9:44])
    assert torch.equal(drawn(part=range(0)), expected.flatten()[:0])
    with fake_ranks(4, rank=2):
        mesh = init_device_mesh("cpu", (2, 2))
        assert torch.equal(drawn(mesh=mesh, placements=[Shard(0), Shard(1)]), expected[6:, :4])
        assert torch.equal(drawn(mesh=mesh, placements=[Replicate(), Shard(0)]), expected[:6])


def test_randperm_of_a_dtype_and_device() -> None:
    torch.manual_seed(4)
    wanted = torch.randperm(17, dtype=torch.int32)
    torch.manual_seed(4)
    found = vescale_rng.randperm(17, dtype=torch.int32, device="cpu", part=range(3, 9))
    assert found.dtype == torch.int32
    assert torch.equal(found, wanted[3:9])
    assert vescale_rng.randperm(17, device="meta").is_meta
    with torch.device("meta"):
        assert vescale_rng.randperm(17).is_meta
        assert not vescale_rng.randperm(17, device="cpu").is_meta
    with fake_ranks(2), torch.device("meta"):
        mesh = init_device_mesh("cpu", (2,))
        assert vescale_rng.randperm(17, mesh=mesh, placements=[Shard(0)]).device.type == "cpu"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rand", lambda: vescale_rng.rand((3,), foo=1)),
        ("randint", lambda: vescale_rng.randint(0, 3, (3,), foo=1)),
        ("bernoulli", lambda: vescale_rng.bernoulli((3,), foo=1)),
        ("dropout_mask", lambda: vescale_rng.dropout_mask((3,), foo=1)),
        ("randperm", lambda: vescale_rng.randperm(3, foo=1)),
        ("poisson", lambda: vescale_rng.poisson(torch.ones(3), foo=1)),
        ("poisson", lambda: vescale_rng.poisson(torch.ones(3), foo=1, dtype=torch.float32)),
        ("multinomial", lambda: vescale_rng.multinomial(torch.ones(3), 2, foo=1)),
    ],
)
def test_an_unknown_keyword_names_the_function_called(name: str, call: Callable[[], Any]) -> None:
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'foo'; it takes part, mesh"):
        call()
    assert torch.equal(torch.get_rng_state(), before)


def test_bernoulli_needs_a_chance_under_its_bare_name() -> None:
    for call in (lambda: draw("bernoulli", (3,)), lambda: fill_("bernoulli", torch.ones(3), (3,))):
        with pytest.raises(TypeError, match="bernoulli: missing argument 'p'"):
            call()
    torch.manual_seed(1)
    wanted = torch.empty(9).bernoulli_()
    torch.manual_seed(1)
    assert torch.equal(vescale_rng.bernoulli((9,)), wanted)


@pytest.mark.parametrize("shape", [5, (2.0,), (2**63,), (2**70, 0)], ids=str)
def test_what_is_no_shape_is_named(shape: Any) -> None:
    calls: tuple[Callable[[], Any], ...] = (
        lambda: vescale_rng.rand(shape),
        lambda: vescale_rng.randint(0, 5, shape),
        lambda: fill_("rand", torch.empty(3), shape),
        lambda: dropout(torch.ones(3), shape),
    )
    for call in calls:
        with pytest.raises(LayoutError, match=r"^shape: "):
            call()


def test_other_arguments_of_another_kind_are_named() -> None:
    before = torch.get_rng_state()
    for call in (
        lambda: fill_("rand", [1, 2], (2,)),  # type: ignore[arg-type]
        lambda: dropout([1, 2], (2,)),  # type: ignore[arg-type]
        lambda: fill_("rand", torch.eye(2).to_sparse(), (2, 2)),
    ):
        with pytest.raises(TypeError, match=r"^local: expected a"):
            call()
    for call in (
        lambda: vescale_rng.rand((3,), generator=5),
        lambda: vescale_rng.randperm(3, generator=5),
        lambda: dropout(torch.ones(3), (3,), generator=5),
    ):
        with pytest.raises(TypeError, match=r"^generator: expected a torch.Generator"):
            call()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("block", [lambda: portable(3), lambda: emulate_cuda("H100", seed=3)])
def test_the_default_generator_given_within_a_block_is_the_blocks(block: Callable[[], Any]) -> None:
    calls: tuple[Callable[..., Tensor], ...] = (
        lambda **k: vescale_rng.rand(SHAPE, part=PART, **k),
        lambda **k: dropout(cut(torch.ones(SHAPE, dtype=torch.bfloat16)), SHAPE, 0.3, part=PART, **k),
    )
    for call in calls:
        with block():
            wanted = call()
        with block():
            assert torch.equal(call(generator=torch.default_generator), wanted)


def test_randperm() -> None:
    for n in (0, 1, 17):
        generator = torch.Generator().manual_seed(4)
        expected = torch.randperm(n, generator=generator)
        after = generator.get_state()
        local = vescale_rng.randperm(n, part=range(n // 3, n // 2), generator=generator.manual_seed(4))
        assert torch.equal(local, expected[n // 3 : n // 2])
        assert torch.equal(generator.get_state(), after)
    torch.manual_seed(4)
    assert torch.equal(vescale_rng.randperm(17), expected)


def test_strides_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.empty(7, 11).t().normal_(generator=generator)
    local = vescale_rng.randn(SHAPE, part=PART, stride=(1, 11), generator=generator.manual_seed(4))
    assert torch.equal(local, cut(whole))


def test_devices_and_dtypes() -> None:
    assert vescale_rng.rand((3,), device="meta").is_meta
    with torch.device("meta"):
        assert vescale_rng.rand((3,)).is_meta
        assert not vescale_rng.rand((3,), device="cpu").is_meta
    torch.set_default_dtype(torch.float64)
    try:
        assert draw("rand", (3,)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert draw("randint", (3,), 9).dtype == draw("randint_like", (3,), 9).dtype == torch.int64
    assert draw("random_", (3,), dtype=torch.uint8).dtype == torch.uint8
    assert draw("normal", (3,), torch.zeros(3, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert draw("normal", (3,), torch.zeros(3), dtype=torch.float64).dtype == torch.float64
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        with torch.device("meta"):  # the mesh says where
            assert not vescale_rng.rand((3,), mesh=mesh, placements=[Shard(0)]).is_meta


def test_fill_in_place() -> None:
    generator = torch.Generator().manual_seed(4)
    whole = torch.empty(SHAPE).exponential_(3.0, generator=generator)
    local = torch.empty(5, 5).t()
    assert fill_("exponential_", local, SHAPE, 3.0, part=PART, generator=generator.manual_seed(4)) is local
    assert torch.equal(local, cut(whole))
    leaf = torch.empty(5, 5, requires_grad=True)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"local: needs gradients; fill `local.detach\(\)`, or call within"):
        fill_("rand", leaf, SHAPE, part=PART)
    with pytest.raises(LayoutError, match="local shape"):
        fill_("rand", torch.empty(5, 4), SHAPE, part=PART)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        fill_("exponential_", leaf, SHAPE, 3.0, part=PART, generator=generator.manual_seed(4))
    assert torch.equal(leaf.detach(), cut(whole))


def test_a_part_that_was_made_before() -> None:
    part = Part.whole((3, 4))
    torch.manual_seed(0)
    assert vescale_rng.rand((3, 4), part=part).shape == (3, 4)
    with pytest.raises(LayoutError, match="part: made for a tensor of shape"):
        vescale_rng.rand((4, 3), part=part)


# ------------------------------------------------------------------ dropout


@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0, 1])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_its_gradient(p: float, training: bool) -> None:
    """p = 0, p = 1 and evaluation draw nothing, as `torch.nn.functional.dropout` does not."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(6)
    before = torch.get_rng_state()
    whole = x.clone().requires_grad_()
    expected = functional.dropout(whole, p, training)
    (expected * weight).sum().backward()
    after = torch.get_rng_state()
    assert torch.equal(before, after) == (p in (0, 1) or not training)
    torch.set_rng_state(before)
    mine = cut(x).clone().requires_grad_()
    result = dropout(mine, SHAPE, p, training, part=PART)
    (result * cut(weight)).sum().backward()
    assert torch.equal(result, cut(expected))
    assert whole.grad is not None
    assert mine.grad is not None
    assert torch.equal(mine.grad, cut(whole.grad))
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dropout_of_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.manual_seed(6)
    expected = functional.dropout(x, 0.3)
    torch.manual_seed(6)
    assert torch.equal(dropout(cut(x), SHAPE, 0.3, part=PART), cut(expected))


def test_dropout_in_memory_order() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    torch.manual_seed(6)
    expected = functional.dropout(x, 0.3)
    for channel in range(3):
        torch.manual_seed(6)
        part = (slice(0, 2), slice(channel, channel + 1), slice(0, 4), slice(1, 5))
        mine = dropout(x[part], x.shape, 0.3, part=part, stride=x.stride())
        assert torch.equal(mine, expected[part])


def test_dropout_of_channels() -> None:
    """`dropout2d` by a mask of (N, C, 1, 1)."""
    x = torch.randn(4, 6, 3, 5)
    torch.manual_seed(6)
    expected = functional.dropout2d(x, 0.4)
    after = torch.get_rng_state()
    for dim in (0, 1):
        part = [slice(0, 4), slice(0, 6), slice(0, 1), slice(0, 1)]
        part[dim] = slice(1, 3)
        torch.manual_seed(6)
        mask = dropout_mask((4, 6, 1, 1), 0.4, part=tuple(part))
        assert torch.equal(x.narrow(dim, 1, 2) * mask.div_(1 - 0.4), expected.narrow(dim, 1, 2))
        assert torch.equal(torch.get_rng_state(), after)


def test_dropout_of_nothing() -> None:
    before = torch.get_rng_state()
    x = torch.empty(0, 7)
    assert dropout(x, (0, 7), 0.3) is x
    assert torch.equal(torch.get_rng_state(), before)
    for p in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"p = {p}: a dropout probability lies between 0 and 1"):
            dropout(x, (0, 7), p)
    # a rank that holds nothing of a tensor that is not empty moves on with the others
    torch.manual_seed(1)
    functional.dropout(torch.ones(SHAPE), 0.3)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert dropout(torch.empty(0, 7), SHAPE, 0.3, part=(slice(11, 11), slice(0, 7))).numel() == 0
    assert torch.equal(torch.get_rng_state(), after)


# ------------------------------------------------------------------ refusals


def test_what_cannot_be_drawn() -> None:
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedRandomOperatorError, match="poisson: no closed form"):
        draw("poisson", (3,))
    with pytest.raises(TypeError, match="geometric_ takes p"):
        draw("geometric_", (3,))
    with pytest.raises(RuntimeError, match=r"std >= 0.0, but found std -1"):
        vescale_rng.normal((3,), 0.0, -1.0, part=range(0))
    with pytest.raises(RandomError, match="normal expects all elements"):
        vescale_rng.normal((3,), 0.0, -torch.ones(3))
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        for mine in (vescale_rng.rand, lambda shape, **k: vescale_rng.randperm(shape[0], **k)):
            with pytest.raises(LayoutError, match="partial value still awaits"):
                mine((4,), mesh=mesh, placements=[Partial()])
    with pytest.raises(LayoutError, match="needs 2, one per dim"):
        vescale_rng.rand(SHAPE, part=(slice(0, 2),))
    with pytest.raises(RuntimeError, match="rate"):  # torch notices in the middle of its draw
        vescale_rng.poisson(torch.tensor([3.0, 4.0, -1.0]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_sampler_is_put_back_too() -> None:
    given = PortableGenerator(3)
    token = given.save()
    with pytest.raises(LayoutError, match="needs 1, one per dim"):
        vescale_rng.randperm(9, part=(slice(0, 1), slice(0, 1)), generator=given)
    assert given.save() == token
    with vescale_rng.portable(3) as active:
        token = active.save()
        with pytest.raises(LayoutError, match="needs 1, one per dim"):
            vescale_rng.randperm(9, part=(slice(0, 1), slice(0, 1)))
        assert active.save() == token
        whole = vescale_rng.randperm(9)
    assert torch.equal(vescale_rng.randperm(9, part=range(3, 6), generator=given), whole[3:6])


def test_unknown_places() -> None:
    for mine in (vescale_rng.rand, lambda shape, **k: vescale_rng.randperm(shape[0], **k)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'box'"):
            mine((4,), box=3)
