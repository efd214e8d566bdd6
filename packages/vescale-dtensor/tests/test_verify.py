"""Checking sharding rules: right rules pass, and each kind of wrong one is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor import _register
from vescale_dtensor._dispatch.call import Call, Rewrite, Rule, Strategy
from vescale_dtensor._register import register_op
from vescale_dtensor._verify import check_rule, verify_rule
from vescale_dtensor.errors import RuleError
from vescale_dtensor.placements import P, R
from vescale_testing import cached_mesh


def noise(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(size)))


def says(*strategies: Strategy, shapes: Any = None) -> Any:
    return lambda call: Rule([call.shape] if shapes is None else shapes, list(strategies))


def scan(x: Tensor, w: Tensor | None = None) -> Tensor:
    y = torch.cumsum(x, 1)
    return y if w is None else y * w


SAMPLES = [(noise(6, 4),), (noise(7, 5),)]
CASES: dict[str, tuple[Any, Any, list[Any], str]] = {
    "values": (scan, says(Strategy((1,), (1,))), SAMPLES,
               r"sample 0 on 2 ranks: strategy 0 of the rule, \(S\(1\)\) -> \(S\(1\)\), is wrong: result 0 differs"),
    "second strategy": (scan, says(Strategy((0,), (0,)), Strategy((R,), (P,))), SAMPLES,
                        r"strategy 1 of the rule, \(R\) -> \(P\), is wrong: result 0 differs"),
    "shape of the part": (scan, says(Strategy((0,), (1,))), SAMPLES,
                          r"on rank 0, result 0 has a local part of shape \[3, 4\]; the strategy promises \[6, 2\]"),
    "not linear": (lambda x: x * x, says(Strategy((P,), (P,))), SAMPLES, r"\(P\) -> \(P\), is wrong: result 0 differs"),
    "global shape": (scan, says(Strategy((0,), (0,)), shapes=[(6, 5)]), SAMPLES,
                     r"shapes \[\(6, 5\)\], but they have \[\(6, 4\)\]"),
    "operands": (scan, says(Strategy((0,), (0,))), [(noise(6, 4), noise(4))],
                 "has 1 operands and 1 results; the call has 2 tensors and 1 results"),
    "fails": (lambda x: x.view(6, 4) + 1, says(Strategy((0,), (0,))), SAMPLES[:1],
              "the operator fails on the part of rank 0: RuntimeError: shape"),
    "nothing fits": (scan, says(Strategy((0,), (0,), even=((0, 0),))), SAMPLES[1:], "nothing was checked"),
    "no answer": (scan, lambda call: None, SAMPLES, "nothing was checked"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_wrong_rules_are_named(case: str) -> None:
    fn, rule, samples, message = CASES[case]
    with pytest.raises(RuleError, match=message):
        register_op(fn, rule, verify=samples)
    assert not any(known.func is fn for known in _register._known.values())


def test_a_wrong_gradient() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return 2 * grad + grad.mean()  # depends on elements that other ranks hold

    with pytest.raises(RuleError, match=r"\(S\(0\)\), is wrong: the gradient of tensor argument 0 differs"):
        register_op(Doubled.apply, says(Strategy((0,), (0,))), verify=SAMPLES)
    assert "apply" not in Doubled.__dict__


def row_wise(call: Call) -> Rule:
    weights = (R,) * (len(call.specs) - 1)
    return Rule([call.shape], [Strategy((0, *weights), (0,)), Strategy((P, *weights), (P,))])


@torch.library.custom_op("vescale_verify::scan", mutates_args=())
def scan_op(x: Tensor, w: Tensor) -> Tensor:
    return torch.cumsum(x, 1) * w


@scan_op.register_autograd
def _(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return (grad * w).flip(1).cumsum(1).flip(1), (grad * x.cumsum(1)).sum(0)


scan_op._setup_context_fn = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
library = torch.library.Library("vescale_verify2", "DEF")
library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
library.impl("scale_", lambda x, by: x.mul_(by), "CompositeImplicitAutograd")


def pair(x: Tensor, dim: int, *, power: int = 1) -> tuple[Tensor, Tensor]:
    return x.sum(dim), x.pow(power)


def pair_rule(call: Call) -> Rule:
    dim = call.args[1]
    rest = tuple(s for i, s in enumerate(call.shape) if i != dim)
    return Rule(
        [rest, call.shape], [Strategy((dim,), (P, dim)), Strategy((1 - dim,), (0, 1 - dim), even=((0, 1 - dim),))]
    )


def named_rows(x: Tensor, rows: int) -> Tensor:
    return x.view(rows, 2, -1).sum(1)


def named_rows_rule(call: Call) -> Rule:
    rows, columns = call.args[1], call.shape[1]

    def localize(ins: Any, outs: Any) -> Rewrite:
        return Rewrite(named_rows, (outs[0].local_shape[0],))

    return Rule([(rows, columns // 2)], [Strategy((0,), (0,))], localize)


@pytest.mark.ranks(4, pool=True)
def test_right_rules_pass_also_on_a_mesh() -> None:
    mesh = cached_mesh(2, 2)
    if not _done:
        _done["scan"] = register_op(scan_op, row_wise, verify=[(noise(6, 4), noise(4))])
        _done["scale"] = register_op(torch.ops.vescale_verify2.scale_, row_wise)
        _done["pair"] = register_op(pair, pair_rule)
        _done["rows"] = register_op(named_rows, named_rows_rule)
    assert verify_rule(_done["scan"], [(noise(7, 4), noise(4))], mesh) == 2 * 2 + 3 * 3
    assert verify_rule(torch.ops.vescale_verify.scan.default, [(noise(6, 4), noise(4))]) == 4
    assert verify_rule(_done["scale"], [(noise(6, 4), 2.0)], mesh) == 4 + 9
    # on 3 ranks, 4 columns are not even
    assert verify_rule(_done["pair"], [((noise(6, 4), 0), {"power": 2})]) == 2 + 1
    assert verify_rule(_done["pair"], [(noise(6, 4), 1)], mesh) == 4 + 9
    assert verify_rule(_done["rows"], [(noise(6, 8), 6)], mesh) == 2 + 4
    with pytest.raises(RuleError, match=r"operands \[6, 4\] .* differs from one device. Result 0"):
        _check_broken_on(mesh)


_done: dict[str, Any] = {}


def _check_broken_on(mesh: Any) -> None:
    """Right along one axis, and wrong where two axes cut: it takes what one axis leaves for the whole."""
    from vescale_dtensor._verify_mesh import check_on_mesh

    def broken(x: Tensor) -> Tensor:
        return x + (x.to_local().shape[0] == 2)  # type: ignore[operator]

    check_on_mesh(lambda x: broken(x) if hasattr(x, "to_local") else x, says(Strategy((0,), (0,))), False,
                  [((noise(6, 4),), {})], mesh)  # fmt: skip


def test_what_cannot_be_verified() -> None:
    with pytest.raises(ValueError, match="fn = relu has no rule that register_op was given"):
        verify_rule(torch.relu, SAMPLES)
    with pytest.raises(TypeError, match="a sample is a tuple of arguments"):
        check_rule(scan, says(), False, [noise(6, 4)])


def test_the_guide_runs() -> None:
    guide = Path(__file__).parents[3] / "docs" / "sharding_rules.md"
    if not guide.exists():
        pytest.skip("the guide is in the repository only")
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, str(guide), "exec"), namespace)
    wrong = says(Strategy((0,), (0,)), Strategy((2,), (2,)))
    with pytest.raises(
        RuleError, match=r"strategy 1 of the rule, \(S\(2\)\) -> \(S\(2\)\), is wrong: result 0 differs"
    ):
        check_rule(namespace["row_scan"], wrong, False, [(noise(6, 7, 4),)])


MALFORMED = {
    "not-a-rule": ([Strategy((0,), (0,))], r"answered \[Strategy.*a rule returns Rule\(shapes, strategies\), or None"),
    "plain-tuples": (Rule([(6, 4)], [((0,), (0,))]), r"strategy 0 is \(\(0,\), \(0,\)\); write Strategy\(\(0, R\)"),  # type: ignore[list-item]
    "numbers": (Rule([(6, 4)], [Strategy(0, 0)]), "a tuple with one axis type per tensor operand"),  # type: ignore[arg-type]
    "dim": (Rule([(6, 4)], [Strategy((0, R), (2,))]), r"cuts dim 2 of result 0, which has the shape \[6, 4\]"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_answers_that_are_no_rules(case: str) -> None:
    answer, message = MALFORMED[case]
    with pytest.raises(RuleError, match=message):
        check_rule(scan, lambda call: answer, False, SAMPLES)
