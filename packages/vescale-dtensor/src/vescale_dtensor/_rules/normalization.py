"""Normalization layers that work on each sample: layer, RMS and group norm.

The normalized dims must be whole; batch and sequence dims may be sharded, and channels too where
whole groups lie on each rank. Batch and instance norm are in `batch_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.call import Call, Localized, Rule, Strategy
from .._dispatch.entry import RuleFunction
from .._dispatch.table import keyed
from .._spec import Spec
from ..placements import R
from ._canonical import hashable, several


def _layer(
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> tuple[Any, ...]:
    return input, hashable(normalized_shape), weight, bias, eps


def _rms(input: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> tuple[Any, ...]:
    return input, hashable(normalized_shape), weight, eps


def _affine_rule(num_outs: int = 1) -> RuleFunction:
    """Rule of `layer_norm` and `rms_norm`: leading dims may be sharded, weights stay whole."""

    def rule(call: Call) -> Rule | None:
        trailing = call.args[1]
        lead = call.ndim - len(trailing)
        if lead < 0 or tuple(call.shape[lead:]) != tuple(trailing) or call.operands[0] is not call.args[0]:
            return None  # torch's own error
        weights = (R,) * (len(call.specs) - 1)
        shape = tuple(call.shape)
        statistics = (*shape[:lead], *(1,) * len(trailing))
        shapes = [shape, statistics, statistics][:num_outs]
        return Rule(shapes, [Strategy((d, *weights), (d,) * num_outs) for d in range(lead)], uniform=True)

    return rule


def group_norm_rule(call: Call) -> Rule | None:
    """`group_norm`: samples, or channels where every rank holds whole groups."""
    groups = call.args[1]
    if call.ndim < 2 or not isinstance(groups, int) or groups <= 0 or call.shape[1] % groups:
        return None
    affine = len(call.specs) - 1
    strategies = [Strategy((0, *(R,) * affine), (0,))]
    if groups % call.mesh.size == 0:
        strategies.append(Strategy((1, *(0,) * affine), (1,)))

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        own = groups // ins[0].shards_of(1)
        return None if own == groups else lambda _, args, kwargs: torch.group_norm(args[0], own, *args[2:])

    return Rule([tuple(call.shape)], strategies, localize)


def _group(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enabled: bool = True
) -> tuple[Any, ...]:
    return input, num_groups, weight, bias, eps


several("layer_norm", _layer, _affine_rule(), torch.layer_norm)
several("native_layer_norm", _layer, _affine_rule(3), torch.native_layer_norm)
several("rms_norm", _rms, _affine_rule(), torch.rms_norm)
several("torch.group_norm", _group, group_norm_rule, torch.group_norm)


def native_group_norm_rule(call: Call) -> Rule | None:
    """`native_group_norm(input, weight, bias, N, C, HxW, group, eps)`: the number of samples is named once more."""
    samples, groups = call.arg(3, "N"), call.arg(6, "group")
    if call.ndim < 2 or call.shape[0] != samples or call.operands[0] is not call.arg(0, "input"):
        return None
    affine = len(call.specs) - 1

    def localize(ins: list[Spec], outs: list[Spec]) -> Localized:
        own = ins[0].local_shape[0]
        if own == samples or len(call.args) < 4:
            return None
        return lambda func, args, kwargs: func(*args[:3], own, *args[4:], **kwargs)

    shapes = [tuple(call.shape), (samples, groups), (samples, groups)]
    strategies = [Strategy((0, *(R,) * affine), (0,) * 3)] if len(call.args) >= 4 else []
    return Rule(shapes, strategies, localize)


keyed("native_group_norm", native_group_norm_rule, inplace=False)
