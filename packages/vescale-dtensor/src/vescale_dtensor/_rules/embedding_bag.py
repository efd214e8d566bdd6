"""`embedding_bag`: bags sharded, or the table by columns, or the table by rows (the vocabulary).

With the vocabulary sharded each rank adds up the rows of a bag that it holds: the result is a
pending sum. That serves sums, and means of bags whose size is known; a maximum needs whole rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .._dispatch.call import Call, LocalFunction, Rule, Strategy
from .._dispatch.engine import keyed_handler
from .._dispatch.fallback import gather_fallback
from .._spec import Spec
from .._tensor import TABLE
from ..errors import UnsupportedOperationError
from ..placements import P, R
from ._masked import in_block
from .embedding import renormalized_rule

_NAMES = (
    "input weight offsets max_norm norm_type scale_grad_by_freq mode sparse per_sample_weights "
    "include_last_offset padding_idx"
)


def embedding_bag_rule(call: Call) -> Rule | None:
    """`F.embedding_bag(input, weight, ...)`."""
    bound = call.bind(_NAMES, mode="mean")
    index, weight = bound["input"], bound["weight"]
    if bound["sparse"]:
        raise UnsupportedOperationError(
            "embedding_bag(sparse=True) makes a sparse gradient, which cannot be reduced over the mesh; "
            "use sparse=False"
        )
    if not isinstance(index, torch.Tensor) or not isinstance(weight, torch.Tensor) or index is weight:
        return None
    i, w = call.operand_index(index), call.operand_index(weight)
    bags, table = call.specs[i], call.specs[w]
    if bags.ndim not in (1, 2) or table.ndim != 2 or weight.dtype in (torch.int32, torch.int64):
        return None  # torch's own error, or arguments in the order of old programs
    num = bags.shape[0] if bags.ndim == 2 else _number_of_bags(call, bound)
    if num is None:
        return None
    if bound["max_norm"] is not None:
        return renormalized_rule(table, (num, table.shape[1]), "embedding_bag")
    own = [
        w if t is weight else i if t is index or t is bound["per_sample_weights"] else -1 for t in call.operands
    ]  # whose layout each operand follows; offsets are whole

    def ins(of_index: int, of_weight: int) -> tuple[int, ...]:
        return tuple(of_weight if o == w else of_index if o == i else R for o in own)

    strategies = [Strategy(ins(R, 1), (1,))]
    if bags.ndim == 2 and not bound["scale_grad_by_freq"]:  # which counts an index over the whole batch
        strategies.append(Strategy(ins(0, R), (0,)))
    if bound["mode"] != "max":
        strategies.append(Strategy(ins(R, P), (P,), exact=True))
        sized = bags.ndim == 2 and bags.shape[1] > 0 and bound["padding_idx"] is None
        if not bound["scale_grad_by_freq"] and (bound["mode"] == "sum" or sized):
            strategies.append(Strategy(ins(R, 0), (P,)))

    def localize(specs: list[Spec], outs: list[Spec]) -> LocalFunction | None:
        return _own_rows(specs[w], bound) if 0 in specs[w].sharded else None

    return Rule([(num, table.shape[1])], strategies, localize)


def _number_of_bags(call: Call, bound: dict[str, Any]) -> int | None:
    offsets = bound["offsets"]
    if not isinstance(offsets, torch.Tensor):
        return None
    shape = call.specs[call.operand_index(offsets)].shape
    return shape[0] - bool(bound["include_last_offset"]) if len(shape) == 1 else None


def _own_rows(table: Spec, bound: dict[str, Any]) -> LocalFunction:
    """The part of each bag's sum that comes from this rank's rows."""
    padding, rows, mean = bound["padding_idx"], table.shape[0], bound["mode"] == "mean"
    padding = padding + rows if padding is not None and padding < 0 else padding
    names = _NAMES.split()
    offset_last = bool(bound["include_last_offset"])

    def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        index, weight, scale = given["input"], given["weight"], given.get("per_sample_weights")
        own, inside = in_block(index, table, 0, negative=False)
        if padding is not None:
            inside = inside & (index != padding)
        if not weight.shape[0]:  # zeros that are connected to the table, so that every rank has a gradient
            weight = torch.constant_pad_nd(weight, (0, 0, 0, 1))
        counted = inside.to(weight.dtype) if scale is None else scale.masked_fill(~inside, 0)
        summed = F.embedding_bag(
            own, weight, given.get("offsets"), mode="sum", per_sample_weights=counted, include_last_offset=offset_last
        )
        return summed / index.shape[1] if mean else summed

    return local


TABLE[F.embedding_bag] = keyed_handler(embedding_bag_rule, gather_fallback)
