"""`ctc_loss`: sequences of the batch sharded; a mean is this rank's share of the mean over all sequences."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .._dispatch.call import Call, LocalFunction, Rule, Strategy
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._spec import Spec
from .._tensor import TABLE
from ..placements import P, R

_NAMES = "log_probs targets input_lengths target_lengths blank reduction zero_infinity"
_DIM_OF_BATCH = {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}


def ctc_rule(call: Call) -> Rule | None:
    """`F.ctc_loss` of log probabilities `(time, batch, classes)` and targets `(batch, length)`."""
    bound = call.bind(_NAMES, reduction="mean", blank=0, zero_infinity=False)
    names = _NAMES.split()
    roles = [p[0] if isinstance(p[0], str) else names[p[0]] for p in call.paths]
    dims = dict(zip(roles, (s.ndim for s in call.specs), strict=True))
    reduction = bound["reduction"]
    if len(dims) != len(roles) or dims.get("log_probs") != 3 or dims.get("targets") != 2:
        return None  # one sequence, or targets one after the other
    if reduction not in ("none", "mean", "sum"):
        return None
    log_probs = call.specs[roles.index("log_probs")]
    batch = log_probs.shape[1]
    lengths = [bound[k] for k in ("input_lengths", "target_lengths")]
    if any(len(v) != batch for v in lengths if not isinstance(v, Tensor)):
        return None  # torch's own error
    ins = tuple(_DIM_OF_BATCH[r] if dims[r] else R for r in roles)
    strategies = [Strategy(ins, (0 if reduction == "none" else P,))]

    def localize(specs: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        spec = specs[roles.index("log_probs")]
        return _own_sequences(bound, spec, batch) if 1 in spec.sharded else None

    return Rule([(batch,) if reduction == "none" else ()], strategies, localize)


def _own_sequences(bound: dict[str, Any], spec: Spec, batch: int) -> LocalFunction:
    start, count = spec.local_offset[1], spec.local_shape[1]
    names = _NAMES.split()

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        given = {**bound, **dict(zip(names, args, strict=False)), **kwargs}
        for name in ("input_lengths", "target_lengths"):
            if not isinstance(given[name], Tensor):
                given[name] = tuple(given[name])[start : start + count]
        if not count:  # torch wants a sequence; zeros that are connected to the log probabilities do
            none: Tensor = given["log_probs"].sum((0, 2))
            return none if given["reduction"] == "none" else none.sum()
        loss: Tensor = F.ctc_loss(**given)
        return loss * (count / batch) if given["reduction"] == "mean" else loss

    return local


TABLE[F.ctc_loss] = keyed_handler(ctc_rule, gather_fallback)
