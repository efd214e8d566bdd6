"""`transformer`: torch's own layers: `nn.TransformerEncoder`, `nn.TransformerDecoder`, `nn.Transformer`.

Inputs are cut where the module itself is one of these; a model that contains them says how its own are.
"""

from __future__ import annotations

import inspect

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlanError
from ...placements import InterleavedShard, Shard
from ..registry import Plan
from ._parts import COLUMN, GATHERED, PREFIX, ROW, SEQUENCE, Entries, axis_size, cut

_ATTENTION = r"(self_attn|multihead_attn)"
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STACKS = (*_LAYERS, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, nn.MultiheadAttention)
_PADDING = "key_padding_mask"


def transformer(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for modules that are, or contain, transformer layers of `torch.nn`."""
    attentions = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    if not attentions:
        raise PlanError(
            f'the plan "transformer" found no torch.nn.MultiheadAttention in {type(module).__name__}; it serves '
            "nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer, and models that contain them"
        )
    if len({m.batch_first for m in attentions}) > 1:
        raise PlanError('the plan "transformer" needs one batch_first for all attentions of a model, but they differ')
    batch_first = attentions[0].batch_first
    sequence = SEQUENCE if batch_first else {"tp": Shard(0)}
    parameter = {**cut(("linear1",), COLUMN, bias=True), **cut(("linear2",), ROW)}
    if all(m.num_heads % axis_size(mesh, "tp") == 0 for m in attentions):
        parameter |= {
            rf"{PREFIX}in_proj_(weight|bias)": {"tp": InterleavedShard(0, 3)},  # queries, keys, values: each is cut
            rf"{PREFIX}(q|k|v)_proj_weight": COLUMN,
            **cut((r"out_proj",), ROW),
        }
    forward = _own_inputs(module, 0 if batch_first else 1)
    forward |= {f"{PREFIX}{_ATTENTION}.input.{name}": GATHERED for name in ("query", "key", "value")}
    forward |= {
        f"{PREFIX}{_ATTENTION}.output.0": sequence,
        f"{PREFIX}linear1.input": GATHERED,
        f"{PREFIX}linear2.output": sequence,
    }
    return {"parameter": parameter, "forward": forward}


def _own_inputs(module: nn.Module, batch_dim: int) -> Entries:
    """Entries for the inputs of a module of torch's: tokens and padding have a batch dim, attention masks none."""
    if not isinstance(module, _STACKS):
        return {}
    names = list(inspect.signature(module.forward).parameters)
    tokens = [n for n in names if n in ("src", "tgt", "memory", "query", "key", "value")]
    padding = [n for n in names if n.endswith(_PADDING)]
    return {f"input.{n}": {"dp": Shard(batch_dim)} for n in tokens} | {f"input.{n}": {"dp": Shard(0)} for n in padding}
