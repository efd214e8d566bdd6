"""Sharding rules for the operators of this package: loaded by vescale_dtensor, before its first DTensor.

A rule reasons about one axis of the mesh: "if the operands lie like this, each rank runs the operator on what it
holds, and the results lie like that". The engine does the rest, gradients included.
"""

from __future__ import annotations

from typing import Any

import pluggy

hookimpl = pluggy.HookimplMarker("vescale_dtensor")


@hookimpl
def vescale_register_ops(registry: Any) -> None:
    """Hand the rules over."""
    from row_ops import Quantize, normalize_rows, scale_columns
    from vescale_dtensor import Rule, Strategy
    from vescale_dtensor.placements import P, R  # a pending sum; the same on every rank

    def rows(call: Any) -> Rule:  # any dim but the last may be cut
        return Rule([call.shape], [Strategy((d,), (d,)) for d in range(call.ndim - 1)])

    def everywhere(call: Any) -> Rule:  # element by element: any dim may be cut, but a sum must not be pending
        return Rule([call.shape], [Strategy((d,), (d,)) for d in range(call.ndim)])

    def columns(call: Any) -> Rule:
        last = call.ndim - 1
        cut = [Strategy((d, R), (d,)) for d in range(last)]  # rows: every rank needs all of w
        return Rule([call.shape], [*cut, Strategy((last, 0), (last,)), Strategy((P, R), (P,))])  # linear in x

    registry.register(normalize_rows, rows)
    registry.register(Quantize.apply, everywhere)
    registry.register(scale_columns, columns)
