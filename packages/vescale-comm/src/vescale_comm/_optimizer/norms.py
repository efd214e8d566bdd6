"""Norms over gradients that lie in different ways on different ranks: each element counts once.

A gradient says over which groups its local parts differ; the others hold the same. Local sums of equal groups are
added first, so that one small reduction per group is all that is communicated, whatever the number of parameters.
Source of the clipping rule: Pascanu et al., "On the difficulty of training recurrent neural networks" (2013).
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .._gradients import local_of
from ..errors import CommError
from .parts import differing_groups

if TYPE_CHECKING:
    from .optimizer import DistributedOptimizer

__all__ = ["Term", "clip_grad_norm_", "get_total_norm", "owners"]

EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""
CHUNK = 4096
"""Elements whose sum is taken in the dtype of the gradients; sums of those are in float64."""
Groups = tuple[dist.ProcessGroup, ...]
owners: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> weak reference to the `DistributedOptimizer` that holds its gradient."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the gradients."""

    local: Tensor | None
    """The elements here; None: none, but other ranks of the groups may have some."""
    groups: Groups
    """Over whose ranks the elements differ."""


def get_total_norm(
    parameters: nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Return the norm of all gradients as one vector, as a single device would have it.

    Every rank of the groups involved must call it. Right for any mix of plain parameters (whose gradients are the same
    on all ranks), DTensors on any meshes, parameters of a `DistributedOptimizer` and shards of `fully_shard`.

    Args:
        parameters: a model, an optimizer, or parameters.
        norm_type: the p of the norm; `math.inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite.
        groups: groups over whose ranks the parameters themselves differ, such as that of pipeline stages.

    Returns:
        A number in float32, or float64 if some gradient is that; 0 without gradients.

    Raises:
        CommError: the norm is not finite, if asked for.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> get_total_norm([weight])
        tensor(5.)
    """
    return _total(_terms(parameters), float(norm_type), error_if_nonfinite, tuple(groups))


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Scale gradients down so that their norm is at most `max_norm`; see `get_total_norm`.

    Args:
        parameters: a model, an optimizer, or parameters.
        max_norm: the limit.
        norm_type: the p of the norm.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is scaled.
        groups: groups over whose ranks the parameters themselves differ.

    Returns:
        The norm before.

    Raises:
        CommError: the norm is not finite, if asked for.
        ValueError: a limit below 0, or NaN.
    """
    if not max_norm >= 0:  # NaN is not, either
        raise ValueError(f"max_norm: expected a number of at least 0, but got {max_norm}.")
    terms = _terms(parameters)
    total = _total(terms, float(norm_type), error_if_nonfinite, tuple(groups))
    scale_terms(terms, (float(max_norm) / (total + EPSILON)).clamp(max=1.0))
    return total


def scale_terms(terms: Sequence[Term], factor: Tensor) -> None:
    """Multiply gradients by a number, in place."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for term in terms:
        if term.local is not None and term.local.numel():
            by_kind.setdefault((term.local.device, term.local.dtype), []).append(term.local)
    for (device, _), tensors in by_kind.items():
        torch._foreach_mul_(tensors, factor.to(device))


def _terms(given: nn.Module | torch.optim.Optimizer | Tensor | Iterable[Tensor]) -> list[Term]:
    """Return the gradients; of parameters that share an optimizer which holds them, in one go."""
    held = getattr(given, "gradient_terms", None)
    if held is not None:
        return list(held())
    if isinstance(given, torch.optim.Optimizer):
        parameters = [p for group in given.param_groups for p in group["params"]]
    elif isinstance(given, nn.Module):
        parameters = list(given.parameters())
    else:
        parameters = [given] if isinstance(given, Tensor) else list(given)
        for parameter in parameters:
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters: expected tensors, but one is of type {type(parameter).__name__}.")
    terms: list[Term] = []
    held_by: dict[int, tuple[DistributedOptimizer, list[Tensor]]] = {}
    for parameter in parameters:
        reference: weakref.ref[DistributedOptimizer] | None = owners.get(parameter)  # type: ignore[no-untyped-call]
        owner = None if reference is None else reference()
        if owner is not None:
            held_by.setdefault(id(owner), (owner, []))[1].append(parameter)
        else:
            terms.append(_term(parameter))
    for owner, some in held_by.values():
        terms += owner.gradient_terms(some)
    return terms


def _term(parameter: Tensor) -> Term:
    info = getattr(parameter, "vescale", None)
    gradient = parameter.grad
    if info is not None:
        return Term(None if gradient is None else local_of(gradient), tuple(info.groups))
    if gradient is None:
        return Term(None, differing_groups(parameter, "a parameter"))
    placements = getattr(gradient, "placements", ())
    if any(placement.is_partial() for placement in placements):
        gradient = parameter.grad = _reduced(gradient)
    return Term(local_of(gradient), differing_groups(gradient, "a gradient"))


def _reduced(gradient: Tensor) -> Tensor:
    """Return a gradient whose pending sums are done."""
    distributed = sys.modules.get("torch.distributed.tensor")
    if distributed is None or not isinstance(gradient, distributed.DTensor):
        raise CommError(f"A gradient of class {type(gradient).__name__} awaits a reduction; redistribute it first.")
    placements = [distributed.Replicate() if p.is_partial() else p for p in gradient.placements]
    found: Tensor = gradient.redistribute(placements=placements)
    return found


def _total(terms: Sequence[Term], p: float, error_if_nonfinite: bool, groups: Groups) -> Tensor:
    if p < 0 or math.isnan(p):
        raise ValueError(f"norm_type: expected a number of at least 0, but got {p}.")
    sums: dict[Groups, Tensor] = {}
    device = next((term.local.device for term in terms if term.local is not None), torch.device("cpu"))
    for term in terms:
        part = _power(term.local, p, device)
        before = sums.get(term.groups)
        sums[term.groups] = part if before is None else _join(before, part, p)
    _add_ranks(sums, p)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in sums.values():
        total = _join(total, part, p)
    for group in groups:
        _all_reduce(total, group, p)
    if 0 < p < math.inf:
        total = total.pow(1 / p)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise CommError(
            f"The norm of the gradients is {float(total)}, so they cannot be clipped. Find out where NaN or infinity "
            f"comes from, or pass error_if_nonfinite=False to go on."
        )
    wide = any(term.local is not None and term.local.dtype == torch.float64 for term in terms)
    return total if wide else total.float()


def _power(local: Tensor | None, p: float, device: torch.device) -> Tensor:
    """Return the sum of |x|^p in float64, or the largest |x|."""
    if local is None or not local.numel():
        return torch.zeros((), dtype=torch.float64, device=device)
    flat = local.detach().reshape(-1)
    dtype = torch.float32 if local.dtype in (torch.float16, torch.bfloat16) else None
    # Single precision over millions of elements would lose digits, double precision would cost a copy.
    even = flat.numel() // CHUNK * CHUNK
    parts = [torch.linalg.vector_norm(flat[:even].view(-1, CHUNK), p, dim=1, dtype=dtype)] if even else []
    if even < flat.numel():
        parts.append(torch.linalg.vector_norm(flat[even:], p, dtype=dtype).view(1))
    norms = torch.cat(parts).to(device=device, dtype=torch.float64)
    if p == math.inf:
        return norms.max()
    return (norms.pow(p) if p else norms).sum()


def _join(a: Tensor, b: Tensor, p: float) -> Tensor:
    # maximum passes NaN on, as it must.
    return torch.maximum(a, b) if p == math.inf else a + b


def _add_ranks(sums: dict[Groups, Tensor], p: float) -> None:
    """Add the sums of ranks, with one collective per group, in the order in which groups come up on all ranks."""
    order: list[dist.ProcessGroup] = []
    for groups in sums:
        order += [group for group in groups if all(group is not known for known in order)]
    for group in order:
        keys = [groups for groups in sums if any(group is one for one in groups)]
        stacked = torch.stack([sums[key] for key in keys])
        _all_reduce(stacked, group, p)
        sums.update(zip(keys, stacked.unbind(), strict=True))


def _all_reduce(values: Tensor, group: dist.ProcessGroup, p: float) -> None:
    if p == math.inf:
        # Not every backend's maximum passes NaN on, so NaN travels as infinity with a flag.
        flags = values.isnan().to(values.dtype)
        values.nan_to_num_(nan=math.inf, posinf=math.inf)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=group)
        values.masked_fill_(flags > 0, math.nan)
    else:
        dist.all_reduce(values, dist.ReduceOp.SUM, group=group)
