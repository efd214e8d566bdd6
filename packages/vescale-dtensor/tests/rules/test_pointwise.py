"""Elementwise functions against one device: placements, broadcasting, promotion, pending sums, in-place forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, plain_tensors
from vescale_dtensor.errors import PlainTensorError, UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, compare, placements, random_codes

UNARY: dict[str, Callable[..., Any]] = {
    "exp": torch.exp, "log1p": torch.log1p, "sqrt": torch.sqrt, "tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "sigmoid": torch.sigmoid, "neg": torch.neg,
    "clamp": lambda x: x.clamp(0.6, 1.2), "pow": lambda x: x**3, "rpow": lambda x: 2**x, "rsub": lambda x: 1 - x,
    "rdiv": lambda x: 1 / x, "scale": lambda x: x * 2.5, "shift": lambda x: x + 1, "floor_divide": lambda x: x // 0.3,
    "softplus": F.softplus, "leaky_relu": F.leaky_relu, "hardtanh": F.hardtanh, "logit": lambda x: (x / 3).logit(),
    "nan_to_num": torch.nan_to_num, "to-float32": lambda x: x.float().double(), "compare": lambda x: x > 1,
    "frexp": lambda x: torch.frexp(x)[0], "angle": torch.angle, "lerp": lambda x: x.lerp(x * 2, 0.3),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add, "add-alpha": lambda x, y: torch.add(x, y, alpha=2), "sub": torch.sub, "mul": torch.mul,
    "div": torch.div, "div-floor": lambda x, y: torch.div(x, y, rounding_mode="floor"), "maximum": torch.maximum,
    "atan2": torch.atan2, "hypot": torch.hypot, "pow": torch.pow,
    "fmod": torch.fmod, "eq": torch.eq, "copysign": torch.copysign,
    "where": lambda x, y: torch.where(x > y, x, y), "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "logaddexp": torch.logaddexp, "masked_fill": lambda x, y: x.masked_fill(y > 1, 7.0), "xlogy": torch.xlogy,
}  # fmt: skip


def _positive(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    for shape in ((6, 5), (3, 1), (0, 4), ()):
        x = _positive(*shape)
        for mesh_shape in ((4,), (2, 2)):
            for codes in random_codes([x], len(mesh_shape), seed=len(name), count=4):
                check_op(UNARY[name], [x], codes, cached_mesh(*mesh_shape))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", BINARY)
def test_binary_with_broadcasting(name: str) -> None:
    for left, right in (((6, 5), (6, 5)), ((6, 5), (5,)), ((4, 1, 5), (6, 1)), ((3, 1), (1, 7)), ((), (5, 2))):
        args = [_positive(*left), _positive(*right, seed=1)]
        for mesh_shape in ((4,), (2, 2)):
            for codes in random_codes(args, len(mesh_shape), seed=len(name), count=4):
                if name == "masked_fill" and len(left) < len(right):
                    continue
                check_op(BINARY[name], args, codes, cached_mesh(*mesh_shape))


@pytest.mark.ranks(4, pool=True, timeout=120)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_broadcast_and_placement(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    others = [
        [1 if data.draw(st.booleans()) else n for n in shape[data.draw(st.integers(0, len(shape))) :]] for _ in range(2)
    ]
    args = [_positive(*s, seed=i) for i, s in enumerate((shape, *others))]
    codes = [
        " ".join(data.draw(st.sampled_from([f"S{d}" for d in range(a.ndim)] + ["I", "R", "P"])) for _ in range(2))
        for a in args
    ]
    check_op(lambda x, y, z: (x * y + z).tanh() / (y + 2), args, codes, cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("left", [torch.bool, torch.int32, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("right", [torch.int64, torch.float64, torch.bfloat16])
def test_types_are_promoted_as_on_one_device(left: torch.dtype, right: torch.dtype) -> None:
    mesh = cached_mesh(2, 2)
    x, y = torch.arange(6).reshape(2, 3).to(left), torch.ones(3, dtype=right)
    dx, dy = distribute_tensor(x, mesh, placements("S0 S1")), distribute_tensor(y, mesh, placements("I S0"))
    compare(dx + dy, x + y)
    compare(dx * 2, x * 2)
    compare(dx * dy.sum(), x * y.sum())  # a 0-d operand has less weight in promotion


@pytest.mark.ranks(4, pool=True)
def test_linear_functions_keep_sums_pending() -> None:
    mesh = cached_mesh(4)
    p = distribute_tensor(_positive(4, 3), mesh, placements("P"))
    scale = distribute_tensor(torch.tensor(2.0, dtype=torch.float64), mesh, placements("I"))
    for y in (p * 2, p / 3, -p, p + p, p - p, p * scale, p.clone(), p.float(), p.contiguous()):
        assert y.placements[0].is_partial()
    for y in (p + 1, p * p, p.relu(), p.exp(), p + distribute_tensor(_positive(4, 3), mesh, placements("I")), p.long()):
        assert y.placements[0].is_replicate()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 I", "S1 S0", "I P", "P P", "R S1"])
def test_in_place(codes: str) -> None:
    mesh = cached_mesh(2, 2)

    def program(x: Tensor, y: Tensor) -> Tensor:
        z = x * 1
        z.mul_(2).add_(y).sub_(1)
        z += y
        z *= z
        z.clamp_(min=0.5).sqrt_()
        z.masked_fill_(z > 2, 2.0)
        return z

    for other in ("I I", "S0 S1", "P I"):
        check_op(program, [_positive(6, 5), _positive(6, 5, seed=1)], [codes, other], mesh)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["R", "I", "S0", "P"])
@pytest.mark.parametrize("other", ["R", "I", "S0", "P"])
def test_in_place_functions_of_pending_sums_keep_what_backward_needs(codes: str, other: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.add(x).clamp_(max=3).mul_(y).pow_(2).exp_()

    check_op(program, [_positive(4), _positive(4, seed=1)], [f"{codes} P", f"{other} P"], cached_mesh(4, 1))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["R", "I", "S0", "P"])
@pytest.mark.parametrize("other", ["R", "I", "S0", "P"])
def test_in_place_products_keep_the_layout(codes: str, other: str) -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.add(x).mul_(y).div_(2).mul_(y.sum())

    check_op(program, [_positive(8), _positive(8, seed=1)], [codes, other], cached_mesh(4))


@pytest.mark.ranks(4, pool=True)
def test_out() -> None:
    mesh = cached_mesh(4)
    x = _positive(6, 5)
    d = distribute_tensor(x, mesh, placements("S0"))
    out = distribute_tensor(torch.empty(6, 5, dtype=torch.float64), mesh, placements("S1"))
    with implicit_communication("allow"):
        assert torch.add(d, d, out=out) is out
    assert out.placements == tuple(placements("S1"))
    compare(out, x + x)
    plain = torch.empty(6, 5, dtype=torch.float64)
    torch.mul(d, d, out=plain)
    assert torch.equal(plain, x * x)
    integers = distribute_tensor(torch.empty(6, 5, dtype=torch.int64), mesh, placements("S0"))
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(d, d, out=integers)
    with pytest.raises(RuntimeError, match="don't support automatic differentiation"):
        torch.add(d, d.clone().requires_grad_(), out=out)


@pytest.mark.ranks(4, pool=True)
def test_a_dtensor_stays_on_its_mesh() -> None:
    d = distribute_tensor(_positive(4), cached_mesh(4), placements("S0"))
    assert isinstance(d.to("cpu"), DTensor)
    with pytest.raises(UnsupportedOperationError, match="lies on mesh"):
        d.to("cuda")


@pytest.mark.ranks(4, pool=True)
def test_plain_tensors_are_refused_unless_scalars() -> None:
    d = distribute_tensor(_positive(4), cached_mesh(4), placements("S0"))
    compare(d * torch.tensor(2.0), _positive(4) * 2)
    with pytest.raises(PlainTensorError, match=r"mul got a plain tensor of shape \[4\] beside a DTensor"):
        d * torch.ones(4)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("other", ["R P", "I S0", "S0 S1", "S1 I", "P P"])
@pytest.mark.parametrize("codes", ["S0 S1", "P I", "I R", "S1 P"])
def test_a_tensor_that_lends_its_dtype_may_lie_anyhow(codes: str, other: str) -> None:
    mesh = cached_mesh(2, 2)
    x, lender = _positive(6, 5), distribute_tensor(_positive(4, 3).float(), mesh, placements(other))
    with implicit_communication("error"):
        for convert in (lambda t, o: t.type_as(o), lambda t, o: t.to(o)):
            ours = convert(distribute_tensor(x, mesh, placements(codes)), lender)
            assert ours.placements == tuple(placements(codes))
            compare(ours, x.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0", "S1", "I"])
def test_where_of_a_condition_alone(codes: str) -> None:
    """It gives positions, as `nonzero` does; models find the tokens of an expert so."""
    condition = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]])
    x = distribute_tensor(condition, cached_mesh(4), placements(codes))
    with implicit_communication("allow"):
        found = [torch.where(x), torch.where(condition=x), torch.ops.aten.where(x), x.nonzero(as_tuple=True)]
    for rows, columns in found:
        assert rows.full_tensor().tolist() == [0, 1, 1, 3, 4]
        assert columns.full_tensor().tolist() == [1, 0, 1, 2, 0]


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize(
    ("x", "weight"), [((3, 5, 5), (5,)), ((2, 3, 4), (3,)), ((6,), (1,)), ((4, 6), (1,)), ((), (1,))], ids=str
)
def test_prelu_has_a_slope_per_channel(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    values = _positive(*x, seed=1) - 1, _positive(*weight, seed=2) - 1
    for codes in random_codes(values, 2, seed=len(x), count=4):
        with implicit_communication("allow"):
            check_op(F.prelu, values, codes, cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0", "S1", "P", "I"])
def test_a_sparse_operand_meets_the_whole_tensor(codes: str) -> None:
    x = _positive(4, 4)
    d = distribute_tensor(x, cached_mesh(4), placements(codes))
    sparse = torch.eye(4, dtype=torch.float64).to_sparse()
    with implicit_communication("allow"), plain_tensors("replicate"):
        compare([sparse @ d, d + sparse], [x, x + torch.eye(4, dtype=torch.float64)])
        torch.testing.assert_close((d * sparse).to_dense(), x * torch.eye(4, dtype=torch.float64))
