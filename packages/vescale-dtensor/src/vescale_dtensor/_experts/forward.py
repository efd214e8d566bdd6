"""One call of a mixture's experts across ranks: tokens out, experts, tokens back.

In the backward pass ranks meet in the same order, though each computes something else in between: the casts of
parameters come first here, then the two dispatches, then the combine, and autograd runs what is ready and was
made last. So combine, tokens, weights, and the sums of parameter gradients follow each other on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from .._comm.move import move, strip, watchers
from .._dispatch import policy
from .._dispatch.solve import unwanted
from .._spec import spec_of
from .._tap import slot
from .._tensor import DTensor, make
from ..placements import AxisTypes, P
from .arrangement import Arrangement
from .exchange import combine, dispatch, tie
from .routes import Routes, routes


class Bank(Protocol):
    """A set of experts as `run_experts` sees it."""

    def arrange(self, x: DTensor, weights: DTensor) -> Arrangement:
        """Work out where everything goes."""

    def tensors(self) -> Mapping[str, DTensor]:
        """Parameters by name."""

    def note_load(self, chosen: Tensor, arrangement: Arrangement) -> None:
        """Take note of what this rank's tokens chose."""

    def compute(
        self, rows: Tensor, expert_of: Tensor, weights: Tensor, tensors: Mapping[str, Tensor], at: Arrangement
    ) -> Tensor:
        """Weighted results of local experts: row i of `rows` goes through local expert `expert_of[i]`."""


def run_experts(bank: Bank, x: DTensor, chosen: DTensor, weights: DTensor) -> DTensor:
    """Return the sum, over each token's choices, of weight times expert of the token.

    Args:
        bank: the experts.
        x: hidden states, [tokens, features].
        chosen: the experts of each token, [tokens, top-k], integers.
        weights: their weights, [tokens, top-k].

    Returns:
        [tokens, features]; placed as `x` along the axes of experts and of data, perhaps a pending sum along axes
        that cut inside experts.
    """
    refuse_recording()
    at = bank.arrange(x, weights)
    held = {n: move(p, at.parameters[n]) for n, p in bank.tensors().items()}
    local = _moved(x, at.tokens)
    choices = _moved(chosen, at.tokens)
    shares = _moved(weights, at.tokens).reshape(-1)
    with torch.no_grad():
        bank.note_load(choices, at)
        way = routes(choices, at.residents)
    announce()
    shares = dispatch(shares, way.choices, way.pairs)
    rows = dispatch(local, way.tokens, way.rows)
    done = _computed(bank, rows, shares, way, {n: strip(p) for n, p in held.items()}, at)
    inside = at.inside.axes if at.inside else ()
    types = tuple(P if a in inside else t for a, t in enumerate(at.tokens))
    announce()
    out = combine(done, way.tokens, way.rows, local.shape[0])
    spec = spec_of(at.mesh, x._spec.shape, types)
    result = make(out, spec if torch.is_grad_enabled() else spec.invariant)
    back = tuple(t if a in inside else at.back[a] for a, t in enumerate(types))
    return move(result, back)


def refuse_recording() -> None:
    """Tell a recorder of straight-line programs that what happens here depends on data."""
    if slot.active and slot.recorder is not None:
        slot.recorder.refuse("tokens travel to experts in numbers that depend on the data")


def announce() -> None:
    """Tell `explain()` that nodes of the graph made from here on are this call's."""
    for watch in watchers:
        watch()


def _moved(x: DTensor, types: AxisTypes) -> Tensor:
    """Local part of an input where the call wants it; says so where that re-cuts sharded data."""
    spec = x._spec
    if unwanted(spec.mesh, spec.types, types):
        policy.report("experts", [(spec, types)])
    return strip(move(x, types))


def _computed(
    bank: Bank, rows: Tensor, shares: Tensor, way: Routes, tensors: Mapping[str, Tensor], at: Arrangement
) -> Tensor:
    """What this rank's experts make of the received rows; along axes that cut inside experts a pending sum."""
    inside = at.inside
    if not way.row_of.numel():
        return tie(rows.new_zeros(rows.shape), rows, shares, *tensors.values())
    single = way.row_of.numel() == rows.shape[0]
    given = rows if single else rows.index_select(0, way.row_of)
    if inside is not None:
        given = make(given, inside.spec(given.shape, at.tokens))
        shares = make(shares, inside.spec(shares.shape, at.tokens))
    results = bank.compute(given, way.expert_of, shares, tensors, at)
    if tuple(results.shape) != tuple(given.shape) or results.dtype != rows.dtype:
        raise ValueError(
            f"experts must return one row of {list(rows.shape[1:])} {rows.dtype} per token, but for "
            f"{list(given.shape)} they returned {list(results.shape)} {results.dtype}"
        )
    if inside is not None:
        assert isinstance(results, DTensor)
        results = strip(move(results, (P,) * inside.mesh.ndim))
    return results if single else rows.new_zeros(rows.shape).index_add(0, way.row_of, results)
