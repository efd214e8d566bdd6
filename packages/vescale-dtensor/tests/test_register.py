"""Sharding rules for operators of users."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from vescale_dtensor import Shard, _register, distribute_tensor, implicit_communication
from vescale_dtensor._dispatch.call import Call, Rule, Strategy
from vescale_dtensor._register import register_op
from vescale_dtensor.errors import ImplicitCommunicationError
from vescale_dtensor.placements import R
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op

RANKS = pytest.mark.ranks(4, pool=True)


def rowwise(call: Call) -> Rule:
    """Everything along dim 0 is independent; further operands stay whole."""
    others = len(call.specs) - 1
    return Rule([tuple(call.shape)], [Strategy((0, *(R,) * others), (0,))])


_done: dict[str, Any] = {}


def operators() -> dict[str, Any]:
    """Define and register one operator of each kind, once per process."""
    if _done:
        return _done

    @torch.library.custom_op("vescale_test::scaled", mutates_args=())
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        return torch.cumsum(x, 1) * w

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return torch.flip(torch.cumsum(torch.flip(grad * w, [1]), 1), [1]), (grad * torch.cumsum(x, 1)).sum(0)

    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    scaled.register_autograd(backward, setup_context=save)

    library = torch.library.Library("vescale_test2", "DEF")
    library.define("rows(Tensor x) -> Tensor")
    library.define("fill_(Tensor(a!) x, float value) -> Tensor(a!)")
    library.define("second_(Tensor x, Tensor(a!) y) -> ()")
    library.impl("rows", lambda x: torch.cumsum(x, 1), "CompositeImplicitAutograd")
    library.impl("fill_", lambda x, value: x.mul_(0).add_(value), "CompositeImplicitAutograd")

    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return torch.cumsum(x, 1) ** 3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return torch.flip(torch.cumsum(torch.flip(grad * 3 * torch.cumsum(x, 1) ** 2, [1]), 1), [1])

    def python(x: Tensor, w: Tensor, power: int = 2) -> Tensor:
        return torch.cumsum(x, 1).pow(power) * w

    plain_apply = Cubed.apply
    _done.update(
        library=library,
        custom=register_op(scaled, rowwise),
        packet=register_op(torch.ops.vescale_test2.rows, rowwise),
        inplace=register_op(torch.ops.vescale_test2.fill_.default, rowwise),
        cubed=Cubed,
        plain_apply=plain_apply,
        applied=register_op(Cubed.apply, rowwise),
        python=register_op(python, rowwise),
        plain_python=python,
    )
    return _done


@RANKS
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_registered_operators_equal_one_device(mesh_shape: tuple[int, ...]) -> None:
    ops, mesh = operators(), cached_mesh(*mesh_shape)
    x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = ["S0", "I"] if len(mesh_shape) == 2 else ["S0"]
    x_code, w_code = " ".join(rows), " ".join("I" for _ in rows)
    with implicit_communication("error"):
        check_op(ops["custom"], [x, w], [x_code, w_code], mesh)
        check_op(torch.ops.vescale_test.scaled, [x, w], [x_code, w_code], mesh)
        check_op(torch.ops.vescale_test2.rows, [x], [x_code], mesh)
        check_op(torch.ops.vescale_test2.rows.default, [x], [x_code], mesh)
        check_op(ops["applied"], [x], [x_code], mesh)
        check_op(ops["cubed"].apply, [x], [x_code], mesh)
        check_op(ops["python"], [x, w], [x_code, w_code], mesh)
        check_op(lambda a, b: ops["python"](a, b, power=3), [x, w], [x_code, w_code], mesh)
    with implicit_communication("allow"):
        check_op(ops["custom"], [x, w], [x_code.replace("S0", "S1"), w_code], mesh)


@RANKS
def test_an_operator_that_writes_its_first_argument() -> None:
    ops = operators()
    d = distribute_tensor(torch.ones(8, 2), cached_mesh(4), [Shard(0)])
    assert torch.ops.vescale_test2.fill_(d, 3.0) is d
    assert torch.equal(d.full_tensor(), torch.full((8, 2), 3.0))
    with pytest.raises(ValueError, match=r"changes its arguments \[1\]"):
        register_op(torch.ops.vescale_test2.second_, rowwise)
    assert ops["library"] is not None


@RANKS
def test_what_cannot_be_registered() -> None:
    operators()
    with pytest.raises(ValueError, match="has a sharding rule already"):
        register_op(torch.ops.vescale_test2.rows, rowwise)
    with pytest.raises(ValueError, match="has a sharding rule already"):
        register_op(torch.matmul, rowwise)
    with pytest.raises(ValueError, match=r"Cubed.apply has a rule already"):
        register_op(operators()["plain_apply"], rowwise)
    with pytest.raises(TypeError, match="fn must be something that a user calls"):
        register_op(3, rowwise)
    with pytest.raises(TypeError, match="rule must be a function"):
        register_op(torch.ops.vescale_test2.rows, None)  # type: ignore[arg-type]


@RANKS
def test_without_a_rule_an_operator_gathers_and_says_so() -> None:
    library = torch.library.Library("vescale_test3", "DEF") if "third" not in _done else None
    if library is not None:
        library.define("other(Tensor x) -> Tensor")
        library.impl("other", lambda x: torch.cumsum(x, 0), "CompositeImplicitAutograd")
        operators()["third"] = library
    d = distribute_tensor(torch.ones(8, 2), cached_mesh(4), [Shard(0)])
    with implicit_communication("error"), pytest.raises(ImplicitCommunicationError, match="it has no sharding rule"):
        torch.ops.vescale_test3.other(d)


def test_plugins_register_rules_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("vescale_dtensor._hooks.register_ops", seen.append)
    monkeypatch.setattr(_register, "_plugins_asked", False)
    _register.ask_plugins()
    _register.ask_plugins()
    (registry,) = seen

    def custom(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="a Python function that torch cannot dispatch; decorate it"):
        registry.register(custom, rowwise)

    def handing_over(x: Tensor) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(handing_over, (x,), x)  # type: ignore[no-any-return]
        assert type(x) is Tensor
        return torch.cumsum(x, 1)

    registry.register(handing_over, rowwise)
    with pytest.raises(ValueError, match="has a sharding rule already"):
        registry.register(handing_over, rowwise)
    assert _register.rule_of(handing_over).rule is rowwise
