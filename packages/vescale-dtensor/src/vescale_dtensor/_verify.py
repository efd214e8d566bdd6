"""`verify_rule`: a sharding rule against one device, strategy by strategy.

Without a mesh nothing is sent, and one process plays all ranks of one mesh axis: the operands are cut as a strategy
says, the operator runs on each part, and the results are put together again. Gradients are checked in the same way,
under random cotangents. So a rule can be tested on a laptop, in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ._comm.move import strip
from ._dispatch import engine
from ._dispatch.call import Call, Rule, Strategy
from ._dispatch.engine import execute
from ._dispatch.entry import Entry, RuleFunction, miss
from ._imagined import imagined_mesh
from ._mesh import MeshInfo
from ._register import ask_plugins, on_plain_tensors, require_form, rule_of
from ._spec import chunk, spec_of
from ._tensor import DTensor, make
from .errors import RuleError
from .placements import I, P, R, dual, short

Samples = Sequence[Any]
_RANKS = (2, 3)
"""Numbers of ranks that are played: 3 cuts most sizes unevenly."""


def verify_rule(fn: Any, samples: Samples, mesh: DeviceMesh | None = None) -> int:
    """Check the sharding rule of an operator: all its strategies, values and gradients, against one device.

    Args:
        fn: what was registered with `register_op`, or by a plugin.
        samples: calls to check. Each is a tuple of positional arguments, or a pair of such a tuple and a dict of
            named ones. Tensors are plain; where gradients are to be checked, of a floating-point dtype (float64
            is strictest). Sizes of 6 and more let 2 and 3 ranks all have something.
        mesh: None plays 2 and 3 ranks in this process. With a mesh, of which every rank must make this call, the
            operands are also distributed in all ways that the rule names, and the operator runs there.

    Returns:
        How many times a strategy was checked.

    Raises:
        RuleError: a strategy is wrong; the message names it and what is wrong. Or none applies to the samples.
        ValueError: `fn` has no rule of its own.

    >>> import torch
    >>> from vescale_dtensor import Rule, Strategy, register_op
    >>> def double(x):
    ...     return 2 * x
    >>> double = register_op(double, lambda call: Rule([call.shape], [Strategy((0,), (0,)), Strategy((-3,), (-3,))]))
    >>> verify_rule(double, [(torch.randn(6, 4),)])
    4
    """
    ask_plugins()  # perhaps no mesh was made yet, which would have
    func, rule, inplace = rule_of(fn)
    count = check_rule(func, rule, inplace, samples)
    if mesh is not None:
        from ._verify_mesh import check_on_mesh

        count += check_on_mesh(fn, rule, inplace, list(_read(samples)), mesh)
    return count


def check_rule(func: Any, rule: RuleFunction, inplace: bool, samples: Samples) -> int:
    """Check a rule that need not be registered; see `verify_rule`.

    Args:
        func: the operator as it runs on plain tensors.
        rule: the rule.
        inplace: whether the operator changes its first argument.
        samples: calls to check.
    """
    count = 0
    for number, (args, kwargs) in enumerate(_read(samples)):
        reference = _Reference(func, args, kwargs, inplace)
        for ranks in _RANKS:
            count += _check_sample(func, rule, inplace, reference, ranks, f"sample {number}")
    if not count:
        raise RuleError(
            f"nothing was checked: the rule has no strategy that fits any of {len(samples)} samples (its condition "
            "`even` may need other sizes, or it answered None); give samples that it is for"
        )
    return count


def _read(samples: Samples) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    for sample in samples:
        if not isinstance(sample, tuple):
            raise TypeError(f"a sample is a tuple of arguments, or a pair (arguments, named), got {sample!r}")
        if len(sample) == 2 and isinstance(sample[0], tuple | list) and isinstance(sample[1], dict):
            yield tuple(sample[0]), sample[1]
        else:
            yield sample, {}


class _Reference:
    """One call on one device: its arguments, results, and gradients under a random cotangent."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inplace: bool) -> None:
        self.args, self.kwargs, self.inplace = args, kwargs, inplace
        leaves: list[Tensor] = []

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaves.append(value.detach().clone().requires_grad_(_differentiable(value) and not inplace))
            return leaves[-1]

        a, k = tree_map(leaf, (args, kwargs))
        self.inputs = leaves
        result = func(*a, **k)
        self.outputs = _results(leaves[0] if inplace else result)
        self.cotangents = [
            _noise(o, 1000 + i) if o.requires_grad else None for i, o in enumerate(self.outputs)
        ]  # None where nothing flows
        try:
            self.gradients = _gradients(self.outputs, self.inputs, self.cotangents)
        except RuntimeError as error:
            if not re.search("no autograd formula|not implemented|not differentiable", str(error)):
                raise
            self.cotangents = [None] * len(self.outputs)  # on one device there is no gradient either
            self.gradients = [None] * len(leaves)
        self.wholes = [t.detach() for t in self._plain()]

    def _plain(self) -> list[Tensor]:
        found: list[Tensor] = []
        tree_map(lambda v: found.append(v) if isinstance(v, Tensor) else None, (self.args, self.kwargs))
        return found


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _results(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [r for r in result if isinstance(r, Tensor)] if result is not None else []


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    if _differentiable(like):
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
    if like.dtype == torch.bool:
        return torch.zeros_like(like)
    return torch.randint(-3, 4, like.shape, device=like.device, generator=generator).to(like.dtype)


def _gradients(outputs: list[Tensor], inputs: list[Tensor], cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
    wanted = [x for x in inputs if x.requires_grad]
    roots = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    if not wanted or not roots:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([o for o, _ in roots], wanted, [c for _, c in roots], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


# ------------------------------------------------------------------ ranks that one process plays


def _cut(whole: Tensor, kind: int, ranks: int, seed: int) -> list[Tensor]:
    """The parts of a tensor that ranks hold under an axis type."""
    if kind >= 0:
        return [whole.narrow(kind, *chunk(whole.shape[kind], ranks, r)).clone() for r in range(ranks)]
    if kind != P:
        return [whole.clone() for _ in range(ranks)]
    others = [_noise(whole, seed + r) for r in range(1, ranks)]
    return [whole - sum(others), *others]


def _joined(parts: list[Tensor], kind: int) -> list[Tensor]:
    """The whole that parts make: once, or as each rank has it."""
    if kind >= 0:
        return [torch.cat(parts, kind)]
    if kind == P:
        return [torch.stack(parts).sum(0).to(parts[0].dtype)]
    return parts


def _check_sample(func: Any, rule: RuleFunction, inplace: bool, reference: _Reference, ranks: int, where: str) -> int:
    meshes = [imagined_mesh(ranks, r, reference.wholes[0].device.type) for r in range(ranks)]
    call = Call(func, *_distributed(reference, [R] * len(reference.wholes), meshes[0], None))
    answer = rule(call)
    if answer is None:
        return 0
    require_form(answer, call)
    _check_shapes(answer, reference, where)
    count = 0
    for index, strategy in enumerate(answer.strategies):
        if len(strategy.ins) != len(reference.wholes) or len(strategy.outs) != len(answer.shapes):
            raise RuleError(
                f"{where}: strategy {index}, {_named(strategy)}, has {len(strategy.ins)} operands and "
                f"{len(strategy.outs)} results; the call has {len(reference.wholes)} tensors and "
                f"{len(answer.shapes)} results. Name one axis type for each"
            )
        if not _applies(strategy, reference, answer, ranks, inplace):
            continue
        try:
            _check_strategy(func, rule, inplace, reference, strategy, meshes)
        except _Wrong as wrong:
            raise RuleError(
                f"{where} on {ranks} ranks: strategy {index} of the rule, {_named(strategy)}, is wrong: {wrong}"
            ) from wrong.__cause__
        count += 1
    return count


class _Wrong(Exception):
    """What is wrong with a strategy."""


def _named(strategy: Strategy) -> str:
    return f"({short(strategy.ins)}) -> ({short(strategy.outs)})"


def _check_shapes(answer: Rule, reference: _Reference, where: str) -> None:
    said, true = [tuple(s) for s in answer.shapes], [tuple(o.shape) for o in reference.outputs]
    if said != true:
        raise RuleError(f"{where}: the rule says that the results have the shapes {said}, but they have {true}")


def _applies(strategy: Strategy, reference: _Reference, answer: Rule, ranks: int, inplace: bool) -> bool:
    if inplace and strategy.outs[:1] != strategy.ins[:1]:
        return False
    if strategy.when is not None and not strategy.when(0, []):
        return False
    if any(k >= w.ndim for k, w in zip(strategy.ins, reference.wholes, strict=True)):
        return False  # a dim that this operand lacks: the engine never meets it
    sizes = [(reference.wholes[i].shape if i >= 0 else answer.shapes[~i])[d] for i, d in strategy.even]
    return all(size % ranks == 0 for size in sizes)


def _distributed(
    reference: _Reference, kinds: Sequence[int], mesh: MeshInfo, parts: list[Tensor] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a DTensor for each tensor; `parts` are this rank's, None for whole ones."""
    position = iter(range(len(kinds)))

    def distribute(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        i = next(position)
        local = reference.wholes[i].clone() if parts is None else parts[i]
        return make(local, spec_of(mesh, value.shape, (kinds[i],)))

    args, kwargs = tree_map(distribute, (reference.args, reference.kwargs))
    return args, kwargs


def _check_strategy(
    func: Any, rule: RuleFunction, inplace: bool, reference: _Reference, strategy: Strategy, meshes: list[MeshInfo]
) -> None:
    ranks = len(meshes)
    cut = [_cut(w, k, ranks, 7 * i) for i, (w, k) in enumerate(zip(reference.wholes, strategy.ins, strict=True))]
    cotangents = [
        None if c is None else _cut(c, dual(k), ranks, 7 * i + 3)
        for i, (c, k) in enumerate(zip(reference.cotangents, strategy.outs, strict=True))
    ]
    results: list[list[Tensor]] = []
    gradients: list[list[Tensor | None]] = []
    for rank, mesh in enumerate(meshes):
        leaves = [parts[rank].requires_grad_(reference.inputs[i].requires_grad) for i, parts in enumerate(cut)]
        args, kwargs = _distributed(reference, strategy.ins, mesh, leaves)
        outputs = _run(func, rule, inplace, strategy, args, kwargs, rank)
        results.append([o.detach() for o in outputs])
        own = [None if c is None else c[rank] for c in cotangents]
        gradients.append(_gradients(outputs, leaves, own))
    for i, (kind, expected) in enumerate(zip(strategy.outs, reference.outputs, strict=True)):
        _compare([r[i] for r in results], kind, expected.detach(), f"result {i}")
    for i, (kind, gradient) in enumerate(zip(strategy.ins, reference.gradients, strict=True)):
        if gradient is not None:
            parts = [torch.zeros_like(cut[i][r]) if (g := own[i]) is None else g for r, own in enumerate(gradients)]
            _compare(parts, dual(kind), gradient, f"the gradient of tensor argument {i}")


def _run(
    func: Any,
    rule: RuleFunction,
    inplace: bool,
    strategy: Strategy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
) -> list[Tensor]:
    def only(call: Call) -> Rule | None:
        answer = rule(call)
        plain = strategy._replace(even=(), when=None, exact=False)  # conditions that were asked already
        return None if answer is None else replace(answer, strategies=[plain], replicated_ok=False)

    before = engine.checking
    engine.debug_checks(False)  # shapes are compared below
    try:
        chosen = only if inplace else on_plain_tensors(only)
        entry: Entry = miss(func, args, kwargs, chosen, inplace=inplace)
        outputs = _results(execute(entry, func, args, kwargs))
    except Exception as error:
        raise _Wrong(f"the operator fails on the part of rank {rank}: {type(error).__name__}: {error}") from error
    finally:
        engine.debug_checks(before)
    for i, (o, spec) in enumerate(zip(outputs, entry.outs, strict=True)):
        local = tuple(strip(o).shape) if isinstance(o, DTensor) else tuple(o.shape)
        if local != spec.local_shape:
            raise _Wrong(
                f"on rank {rank}, result {i} has a local part of shape {list(local)}; the strategy promises "
                f"{list(spec.local_shape)} of a tensor of shape {list(spec.shape)}"
            )
    return [strip(o) if isinstance(o, DTensor) else o for o in outputs]


def _compare(parts: list[Tensor], kind: int, expected: Tensor, what: str) -> None:
    for rank, whole in enumerate(_joined(parts, kind)):
        try:
            torch.testing.assert_close(whole, expected, equal_nan=True)
        except AssertionError as error:
            on = f" on rank {rank}" if kind in (R, I) else ""
            raise _Wrong(f"{what}{on} differs from one device. {error}") from None
