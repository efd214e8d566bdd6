"""Checking a sharding rule on a real mesh: `verify_rule(fn, samples, mesh)`."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from ._api import distribute_tensor
from ._dispatch import policy
from ._dispatch.call import Call
from ._dispatch.entry import RuleFunction
from ._mesh import mesh_info
from ._spec import replicated
from ._tensor import DTensor, make
from ._verify import _differentiable, _noise, _results
from .errors import RuleError
from .placements import R, to_placement

_MOST = 64
"""Combinations of placements per sample; beyond, an even choice of them."""


def check_on_mesh(
    fn: Any,
    rule: RuleFunction,
    inplace: bool,
    samples: list[tuple[tuple[Any, ...], dict[str, Any]]],
    mesh: DeviceMesh,
) -> int:
    """Distribute the operands of samples in the ways that the rule names, and compare with one device."""
    count = 0
    for number, (args, kwargs) in enumerate(samples):
        ways = _ways(fn, rule, args, kwargs, mesh)
        for way in ways[:: -(-len(ways) // _MOST)] if ways else []:
            _check(fn, inplace, args, kwargs, mesh, way, f"sample {number} on {mesh_info(mesh)!r}")
            count += 1
    return count


def _ways(
    fn: Any, rule: RuleFunction, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> list[list[tuple[int, ...]]]:
    """Axis types of each tensor argument: every choice of strategies over the mesh axes."""
    info = mesh_info(mesh)
    whole = tree_map(
        lambda v: make(v.detach(), replicated(info, v.shape)) if isinstance(v, Tensor) else v, (args, kwargs)
    )
    answer = rule(Call(fn, *whole))
    if answer is None:
        return []
    number = len(Call(fn, *whole).specs)
    choices = list(dict.fromkeys([*(s.ins for s in answer.strategies), (R,) * number]))
    return [
        [tuple(ins[i] for ins in chosen) for i in range(number)]
        for chosen in itertools.product(choices, repeat=info.ndim)
    ]


def _check(
    fn: Any,
    inplace: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    way: list[tuple[int, ...]],
    where: str,
) -> None:
    types = iter(way)
    plain: list[Tensor] = []
    ours: list[DTensor] = []

    def both(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        wants = _differentiable(value) and not inplace
        plain.append(value.detach().clone().requires_grad_(wants))
        d = distribute_tensor(value.detach(), mesh, [to_placement(t) for t in next(types)])
        d.requires_grad_(wants)
        ours.append(d)
        return len(ours) - 1, None

    pairs = tree_map(both, (args, kwargs))
    expected = _call(fn, pairs, plain)
    with policy.implicit_communication("allow"):
        actual = _call(fn, pairs, ours)
        described = ", ".join(f"{list(d.shape)} {d.placements}" for d in ours)
        try:
            _compare(expected, actual, plain, ours)
        except AssertionError as error:
            raise RuleError(f"{where}, operands {described}: differs from one device. {error}") from None


def _call(fn: Any, pairs: Any, tensors: Any) -> list[Tensor]:
    def pick(value: Any) -> Any:
        marked = isinstance(value, tuple) and len(value) == 2 and value[1] is None and isinstance(value[0], int)
        return tensors[value[0]] if marked else value

    args, kwargs = tree_map(pick, pairs, is_leaf=lambda v: pick(v) is not v)
    return _results(fn(*args, **kwargs))


def _compare(expected: list[Tensor], actual: list[Tensor], plain: list[Tensor], ours: list[DTensor]) -> None:
    for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        _close(whole.detach(), e.detach(), f"Result {i}")
    roots = [(e, a, _noise(e, 1000 + i)) for i, (e, a) in enumerate(zip(expected, actual, strict=True))
             if e.requires_grad and a.requires_grad]  # fmt: skip
    if not roots:
        return
    sum((e * c).sum() for e, _, c in roots).backward()  # type: ignore[union-attr]
    with policy.plain_tensors("replicate"):
        sum((a * c).sum() for _, a, c in roots).backward()  # type: ignore[union-attr]
    for i, (p, d) in enumerate(zip(plain, ours, strict=True)):
        if p.grad is not None and d.grad is not None:
            whole = d.grad.full_tensor()  # type: ignore[attr-defined]
            _close(whole, p.grad, f"The gradient of tensor argument {i}")


def _close(ours: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, expected, equal_nan=True, msg=lambda message: f"{what}: {message}")
