"""The hooks of this package as typed functions: each calls one hook and checks the answer.

Nothing is kept here: a caller asks once, at construction or first use, and keeps what it got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._plugins import check_answer, fingerprint, manager

if TYPE_CHECKING:
    from .hookspecs import Collectives, OpRegistry, PlanRegistry, RandomProvider, Timeline


def random_provider() -> RandomProvider | None:
    """Ask plugins for the object that draws random numbers; None if there is none."""
    answer: RandomProvider | None = manager().hook.vescale_random()
    if answer is not None:
        check_answer("vescale_random", answer, "scope", "fill")
    return answer


def register_ops(registry: OpRegistry) -> None:
    """Let plugins add sharding rules for custom operators."""
    manager().hook.vescale_register_ops(registry=registry)


def register_plans(registry: PlanRegistry) -> None:
    """Let plugins add named parallel plans."""
    manager().hook.vescale_register_plans(registry=registry)


def collectives() -> Collectives | None:
    """Ask plugins for the object that communicates; None if there is none."""
    answer: Collectives | None = manager().hook.vescale_collectives()
    if answer is not None:
        check_answer("vescale_collectives", answer, "all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    return answer


def timeline() -> Timeline | None:
    """Ask plugins for the recorder of spans; None if nothing is to be recorded."""
    answer: Timeline | None = manager().hook.vescale_timeline()
    if answer is not None:
        check_answer("vescale_timeline", answer, "begin", "end")
    return answer


def plugin_fingerprint() -> str:
    """Return a short hash of the plugins that serve this package; it must be the same on every rank."""
    return fingerprint()
