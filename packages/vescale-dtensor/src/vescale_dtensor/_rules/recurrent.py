"""Recurrent layers, `lstm`, `gru`, `rnn_tanh`, `rnn_relu`: the batch may be sharded; time and features are whole.

Dropout between layers is done here, layer by layer, so that its mask comes from the random machinery.
Packed sequences, whose rows are the batches of all times one after another, are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._dispatch.call import Call, LocalFunction, Localized, Rule, Strategy
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._dispatch.table import register
from .._spec import Spec
from ..placements import R
from ._across import filled

_NAMES = "input hx params has_biases num_layers dropout train bidirectional batch_first".split()


def _bound(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments by name; None for those of a packed sequence."""
    bound = dict(zip(_NAMES, args, strict=False), **kwargs)
    is_list = isinstance(bound.get("params"), list | tuple)
    return bound if len(bound) == len(_NAMES) and is_list and isinstance(bound["batch_first"], bool) else None


def recurrent_rule(call: Call) -> Rule | None:
    """Any of the layers."""
    bound = _bound(call.args, call.kwargs)
    if bound is None or call.ndim != 3 or call.kwargs:
        return None
    states = len(bound["hx"]) if isinstance(bound["hx"], list | tuple) else 1
    weights = len(call.specs) - 1 - states
    batch, shape = 0 if bound["batch_first"] else 1, call.shape
    state_shapes = [tuple(s.shape) for s in call.specs[1 : 1 + states]]
    if any(len(s) != 3 or s[1] != shape[batch] for s in state_shapes):
        return None  # torch's own error, from whole tensors
    width = state_shapes[0][2] * (2 if bound["bidirectional"] else 1)
    outs = (batch, *(1,) * states)

    def localize(ins: list[Spec], out_specs: list[Spec]) -> Localized:
        return None if ins[0].local_shape[batch] or not shape[batch] else _without_rows(outs)

    strategies = [Strategy((batch, *(1,) * states, *(R,) * weights), outs)]
    return Rule([(*shape[:2], width), *state_shapes], strategies, localize)


def _without_rows(dims: tuple[int, ...]) -> LocalFunction:
    """For a rank without a row of the batch: run on a row of zeros, which is cut off again."""

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x, hx, *rest = args
        state = tuple(filled(h, (1,), 0) for h in hx) if isinstance(hx, list | tuple) else filled(hx, (1,), 0)
        results = func(filled(x, dims[:1], 0), state, *rest)
        return tuple(r.narrow(dim, 0, 0) for r, dim in zip(results, dims, strict=True))

    return local


def _handler(one_layer: Any) -> Any:
    """Handler of one kind of layer."""
    plain = keyed_handler(recurrent_rule, gather_fallback)

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = _bound(args, kwargs)
        if bound is not None and bound["dropout"] and bound["train"] and bound["num_layers"] > 1:
            return _layer_by_layer(one_layer, bound)
        return plain(func, args, kwargs)

    return handler


def _layer_by_layer(one_layer: Any, bound: dict[str, Any]) -> Any:
    """All layers with dropout between them. As in torch, time is the first dim of what is dropped."""
    layers, directions = bound["num_layers"], 2 if bound["bidirectional"] else 1
    several = isinstance(bound["hx"], list | tuple)
    states = list(bound["hx"]) if several else [bound["hx"]]
    each = len(bound["params"]) // layers
    x: Tensor = bound["input"].transpose(0, 1) if bound["batch_first"] else bound["input"]
    last: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer:
            x = F.dropout(x, bound["dropout"], True)
        own = [s[layer * directions : (layer + 1) * directions] for s in states]
        params = list(bound["params"][layer * each : (layer + 1) * each])
        x, *new = one_layer(
            x, tuple(own) if several else own[0], params, bound["has_biases"], 1, 0.0, True, directions == 2, False
        )
        for kept, state in zip(last, new, strict=True):
            kept.append(state)
    return x.transpose(0, 1) if bound["batch_first"] else x, *(torch.cat(kept) for kept in last)


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    register(_name, _handler(getattr(torch, _name)))
