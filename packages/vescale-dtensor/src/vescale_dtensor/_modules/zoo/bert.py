"""`bert`: encoders of transformers in the style of BERT, with any head."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..registry import Plan
from ._parts import COLUMN, GATHERED, MASKS, PREFIX, ROW, SEQUENCE, WHOLE, axis_size, cut, inputs, require, setting

_LAYER = rf"{PREFIX}encoder\.layer\.\d+\."
_DECODER = r"predictions\.decoder"


def bert(module: nn.Module, mesh: DeviceMesh) -> Plan:
    """Plan for `embeddings`, `encoder.layer.N.attention`, `encoder.layer.N.intermediate` and the like."""
    require(
        module, "bert",
        (r"embeddings\.word_embeddings", r"encoder\.layer\.\d+\.attention\.self\.query", r"intermediate\.dense"),
        "encoders of transformers in the style of BERT: embeddings.word_embeddings, "
        "encoder.layer.N.attention.self.query, encoder.layer.N.intermediate.dense",
    )  # fmt: skip
    parameter = {
        **cut((r"embeddings\.word_embeddings",), COLUMN),
        **cut((_DECODER, r"intermediate\.dense"), COLUMN, bias=True),
        rf"{PREFIX}predictions\.bias": COLUMN,  # the same tensor as the decoder's
        **cut((r"layer\.\d+\.output\.dense",), ROW),
    }
    forward = {
        **inputs("position_ids", *MASKS),
        rf"{PREFIX}embeddings\.word_embeddings.output": SEQUENCE,
        f"{_LAYER}attention.self.input.hidden_states": WHOLE,
        rf"{_LAYER}attention\.output\.dense.output": SEQUENCE,
        f"{_LAYER}intermediate.input": GATHERED,
        rf"{_LAYER}output\.dense.output": SEQUENCE,
        rf"{PREFIX}{_DECODER}.input": GATHERED,
        f"{PREFIX}pooler.input": WHOLE,  # takes one position
        f"{PREFIX}(classifier|qa_outputs).input": WHOLE,
    }
    ranks = axis_size(mesh, "tp")
    if setting(module, ("num_attention_heads",), ranks) % ranks == 0:
        parameter |= cut((r"attention\.self\.(query|key|value)",), COLUMN, bias=True)
        parameter |= cut((r"attention\.output\.dense",), ROW)
        forward[f"{_LAYER}attention.self.input.hidden_states"] = GATHERED
    return {"parameter": parameter, "forward": forward}
