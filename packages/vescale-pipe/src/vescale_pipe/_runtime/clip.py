"""The norm of all gradients of a pipeline: of each parameter of the model once, in the order of the model.

So it is bitwise that of one device, which takes the norm of the norms in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._transport import Transport
from .wiring import GraphLike

__all__ = ["NormOf", "counted", "scale_to", "total_norm"]

NormOf = Callable[[str, nn.Parameter], Tensor]
"""Gets a name and a parameter, returns the norm of its whole gradient."""
Counted = list[tuple[int, str, nn.Parameter]]
"""Place in the model, name in the stage, and parameter."""
TAG = 0


def counted(graph: GraphLike, placement: Sequence[int], ranks: set[int]) -> Counted:
    """Return the parameters that some ranks count: those of their stages, tied ones where their first stage is.

    Args:
        graph: the model in stages.
        placement: rank of each stage.
        ranks: those to return the parameters of.
    """
    same: dict[int, int] = {}
    for group in graph.tied:
        members = [graph.stages[stage].module.get_parameter(name) for stage, name in sorted(group)]
        same.update((id(one), id(members[0])) for one in members)
    model = getattr(graph, "model", None)
    modules = [stage.module for stage in graph.stages]
    places: dict[int, int] = {}
    for module in modules if model is None else [model, *modules]:
        for parameter in module.parameters():
            places.setdefault(same.get(id(parameter), id(parameter)), len(places))
    found: Counted = []
    seen: set[int] = set()
    for rank, module in zip(placement, modules, strict=True):
        for name, parameter in module.named_parameters():
            key = same.get(id(parameter), id(parameter))
            if key not in seen and rank in ranks:
                found.append((places[key], name, parameter))
            seen.add(key)
    return found


def total_norm(parameters: Counted, transport: Transport | None, norm_type: float, norm_of: NormOf | None) -> Tensor:
    """Return the norm of all gradients of a pipeline; all ranks call it.

    Args:
        parameters: that this process counts.
        transport: to the other ranks; None if there are none.
        norm_type: p of the p-norm.
        norm_of: returns the norm of a parameter's gradient where a rank has a part of it only; None: of what it has.
    """
    rows: list[tuple[int, Tensor]] = []
    for place, name, parameter in parameters:
        if parameter.grad is not None:
            norm = _norm(parameter.grad, norm_type) if norm_of is None else norm_of(name, parameter)
            rows.append((place, norm.detach()))
    return _total(rows, norm_type) if transport is None else _shared(rows, transport, norm_type)


def scale_to(parameters: Iterator[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Multiply gradients so that their norm is at most `max_norm`.

    Args:
        parameters: of this process.
        total: norm of all gradients.
        max_norm: largest norm.
    """
    # As torch does it (torch.nn.utils.clip_grads_with_norm_), also where nothing is cut, so that bits are the same.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is not None:
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            local.detach().mul_(factor.to(local.device))


def _norm(grad: Any, norm_type: float) -> Tensor:
    norm: Any = torch.linalg.vector_norm(grad, norm_type)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[no-any-return]


def _total(rows: list[tuple[int, Tensor]], norm_type: float) -> Tensor:
    if not rows:
        return torch.tensor(0.0)
    norms = [norm for _, norm in sorted(rows, key=lambda row: row[0])]
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _shared(rows: list[tuple[int, Tensor]], transport: Transport, norm_type: float) -> Tensor:
    """Send norms to rank 0 of the pipeline, and get the total from there."""
    transport.label = "the norm of gradients, tag {}".format
    if transport.rank:
        # One tensor per type, for thousands of small ones would be as many messages.
        kinds = {norm.dtype for _, norm in rows}
        message: list[Any] = []
        for kind in sorted(kinds, key=str):
            some = [row for row in rows if row[1].dtype == kind]
            message.append(torch.tensor([place for place, _ in some]))
            message.append(torch.stack([norm.cpu() for _, norm in some]))
        sent = transport.send(0, TAG, message)
        total: Tensor = transport.recv(0, TAG).wait()[0]
        sent.wait()
        return total
    others = range(1, transport.size)
    for expected in [transport.recv(other, TAG) for other in others]:
        values = expected.wait()
        for places, norms in zip(values[::2], values[1::2], strict=True):
            rows += zip(places.tolist(), norms.unbind(), strict=True)
    total = _total(rows, norm_type)
    for one in [transport.send(other, TAG, [total.cpu()]) for other in others]:
        one.wait()
    return total
