"""Ranks compare what they are about to run, before the first step: what differs is an error, not a hang."""

from __future__ import annotations

import hashlib

import torch

from .._hooks import plugin_fingerprint
from .._plan import PipePlan
from .._schedule import Schedule
from .._transport import Transport
from ..errors import PipeError
from .wiring import GraphLike, Wiring

__all__ = ["agree", "facts"]


def facts(plan: PipePlan, schedule: Schedule, wiring: Wiring, graph: GraphLike) -> dict[str, str]:
    """Return what must be the same on all ranks, by names for people.

    Args:
        plan: of the engine.
        schedule: that it runs.
        wiring: messages.
        graph: the model in stages.
    """
    digest = hashlib.sha256()
    for rank in range(schedule.num_ranks):
        columns = schedule.columns[rank]
        for column in (columns.kind, columns.stage, columns.microbatch):
            digest.update(bytes(column.contiguous().view(torch.uint8).tolist()))
        digest.update(b"|")
    weights = hashlib.sha256()
    for stage in graph.stages:
        for name, parameter in stage.module.named_parameters():
            weights.update(f"{stage.index} {name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    return {
        "micro-batches": str(schedule.num_microbatches),
        "schedule": f"{schedule.name} {digest.hexdigest()[:12]}",
        "placement": str(schedule.placement),
        "edges": str(wiring.edges),
        "parameters": weights.hexdigest()[:12],
        "loss": plan.loss if isinstance(plan.loss, str) else "a function",
        "tied": plan.tied,
        "whole": str(list(plan.whole)),
        "seed": str(plan.seed),
        "added_losses": str(plan.added_losses),
        "torch": str(torch.__version__),
        "plugins": plugin_fingerprint(),
    }


def agree(transport: Transport, mine: dict[str, str]) -> None:
    """Compare with the ranks before and after; so all of them agree, or some rank sees a difference.

    Args:
        transport: of this rank; its tag 0 is used.
        mine: what `facts` says here.

    Raises:
        PipeError: a neighbour says something else.
    """
    if transport.size == 1:
        return
    transport.label = "the plan, tag {}".format
    # Both neighbours, so that both ranks of a pair that differs say so.
    others = sorted({(transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size})
    expected = [(other, transport.recv(other, 0)) for other in others]
    sent = [transport.send(other, 0, [mine]) for other in others]
    found = []
    for other, one in expected:
        theirs = one.wait()[0]
        found += [
            f"{name}: {mine.get(name)} here, {theirs.get(name)} on rank {other}"
            for name in mine
            if mine.get(name) != theirs.get(name)
        ]
    for message in sent:
        message.wait()
    if found:
        raise PipeError(
            f"rank {transport.rank}: the ranks of the pipeline do not run the same: {'; '.join(found)}. "
            "Make the engine with the same model and plan on all ranks."
        )
