"""Plans for models of transformers and torch: what they cut, what they leave whole, and what they refuse."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from vescale_dtensor import DTensor, Replicate, Shard, explain, parallelize_module
from vescale_dtensor._modules.zoo import PLANS
from vescale_dtensor.errors import PlanError
from vescale_dtensor.placements import InterleavedShard
from vescale_testing import cached_mesh
from vescale_testing.models import Size, examples

RANKS = pytest.mark.ranks(4, pool=True)
EXAMPLES = examples()
WHOLE, OUT, IN = Replicate(), Shard(0), Shard(1)


def _placed(name: str, mesh: Any, plan: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """A model by its plan, and the placements of its parameters along "tp"."""
    if EXAMPLES[name].needs:
        pytest.importorskip(EXAMPLES[name].needs)
    model = parallelize_module(EXAMPLES[name].built(), mesh, plan or EXAMPLES[name].plan)
    return model, {n: p.placements[1] for n, p in model.named_parameters() if isinstance(p, DTensor)}


CUT: dict[str, dict[str, Any]] = {
    "Llama": {
        "model.embed_tokens.weight": OUT, "model.layers.1.self_attn.q_proj.weight": OUT,
        "model.layers.0.self_attn.k_proj.weight": OUT, "model.layers.0.self_attn.o_proj.weight": IN,
        "model.layers.0.mlp.gate_proj.weight": OUT, "model.layers.0.mlp.down_proj.weight": IN,
        "model.norm.weight": WHOLE, "lm_head.weight": OUT,
    },
    "Gemma": {  # one key and value head
        "model.layers.0.self_attn.q_proj.weight": OUT, "model.layers.0.self_attn.k_proj.weight": WHOLE,
        "model.layers.0.self_attn.v_proj.weight": WHOLE, "model.layers.0.self_attn.o_proj.weight": IN,
    },
    "Mixtral": {
        "model.layers.0.self_attn.v_proj.weight": OUT, "model.layers.0.mlp.gate.weight": WHOLE,
        "model.layers.0.mlp.experts.down_proj": Shard(2),
        "model.layers.0.mlp.experts.gate_up_proj": InterleavedShard(1, 2),
    },
    "GPT-2": {
        "transformer.wte.weight": OUT, "transformer.h.0.mlp.c_fc.weight": IN, "transformer.h.0.mlp.c_fc.bias": OUT,
        "transformer.h.0.mlp.c_proj.weight": OUT, "transformer.h.0.mlp.c_proj.bias": WHOLE,
        "transformer.h.1.attn.c_attn.weight": InterleavedShard(1, 3), "transformer.h.1.attn.c_proj.weight": OUT,
    },
    "BERT": {
        "bert.embeddings.word_embeddings.weight": OUT, "bert.encoder.layer.0.attention.self.key.bias": OUT,
        "bert.encoder.layer.0.attention.output.dense.weight": IN, "bert.encoder.layer.1.output.dense.weight": IN,
        "bert.encoder.layer.1.intermediate.dense.weight": OUT, "cls.predictions.bias": OUT,
        "cls.predictions.transform.dense.weight": WHOLE,
    },
    "T5": {
        "shared.weight": OUT, "encoder.block.0.layer.0.SelfAttention.q.weight": OUT,
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight": IN,
        "decoder.block.1.layer.1.EncDecAttention.o.weight": IN, "decoder.block.1.layer.2.DenseReluDense.wo.weight": IN,
    },
    "ViT": {
        "vit.layers.0.attention.q_proj.bias": OUT, "vit.layers.0.mlp.fc2.weight": IN, "classifier.weight": WHOLE,
    },
    "TransformerDecoder": {
        "layers.0.linear1.bias": OUT, "layers.1.linear2.weight": IN, "layers.0.norm3.weight": WHOLE,
        "layers.0.self_attn.in_proj_bias": InterleavedShard(0, 3), "layers.1.multihead_attn.out_proj.weight": IN,
    },
    "LSTM": {"lstm.weight_ih_l0": WHOLE, "head.weight": WHOLE},
}  # fmt: skip


@RANKS
@pytest.mark.parametrize("name", CUT)
def test_plans_cut_what_they_say(name: str) -> None:
    _, placed = _placed(name, cached_mesh(2, 2, names=("dp", "tp")))
    for parameter, placement in CUT[name].items():
        assert placed[parameter] == placement, parameter


@RANKS
def test_the_plan_of_a_model_of_transformers_is_found_by_its_type() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    for name, example in EXAMPLES.items():
        if example.needs:
            assert _placed(name, mesh, "hf")[1] == _placed(name, mesh)[1], name
    with pytest.raises(PlanError, match=r'"hf" knows no models of type None.*goes by module.config.model_type'):
        parallelize_module(nn.Linear(2, 2), mesh, "hf")
    unknown = nn.Linear(2, 2)
    unknown.config = type("Config", (), {"model_type": "lama"})()  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"'lama' \(did you mean 'llama'"):
        parallelize_module(unknown, mesh, "hf")


@RANKS
@pytest.mark.parametrize("name", sorted(set(PLANS) - {"data"}))
def test_models_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"found no (module|torch.nn.MultiheadAttention).*it serves"):
        parallelize_module(nn.Sequential(nn.Linear(2, 2)), cached_mesh(2, 2, names=("dp", "tp")), name)


@RANKS
def test_heads_that_do_not_divide_stay_whole() -> None:
    mesh = cached_mesh(1, 4, names=("dp", "tp"))
    _, placed = _placed("Llama", mesh)  # two groups over four ranks
    assert placed["model.layers.0.self_attn.q_proj.weight"] == OUT
    assert placed["model.layers.0.self_attn.k_proj.weight"] == WHOLE
    pytest.importorskip("transformers")
    model = EXAMPLES["Llama"].built()
    model.config.num_attention_heads = 6
    parallelize_module(model, mesh, "llama")
    assert all(p.placements[1] == WHOLE for n, p in model.named_parameters() if "self_attn" in n)


@RANKS
def test_layers_of_torch_need_one_order_of_dims() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=first) for first in (True, False)])
    with pytest.raises(PlanError, match="needs one batch_first"):
        parallelize_module(model, cached_mesh(2, 2, names=("dp", "tp")), "transformer")


@RANKS
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral", "ViT", "TransformerEncoder"])
def test_blocks_send_what_megatron_sends(name: str) -> None:
    """A block costs two gathers and two scatters each way, though attention of torch takes its input three times."""
    if EXAMPLES[name].needs:
        pytest.importorskip(EXAMPLES[name].needs)
    mesh = cached_mesh(1, 4, names=("dp", "tp"))
    counts = []
    for layers in (1, 2):
        size = Size(width=32, layers=layers)
        model = parallelize_module(EXAMPLES[name].built(size), mesh, EXAMPLES[name].plan)
        inputs, _ = EXAMPLES[name].batch(size)
        with explain() as trace:
            result = model(**inputs)
            getattr(result, "logits", result).float().square().mean().backward()
        assert not trace.implicit
        counts.append(Counter((r.phase, r.kind) for r in trace.records))
    for phase in ("forward", "backward"):
        for kind in ("all_gather", "reduce_scatter"):
            more = counts[1][phase, kind] - counts[0][phase, kind]
            assert more == 2, f"{phase}: a block costs {more} of {kind}"


@RANKS
def test_a_tensor_given_twice_stays_one_object() -> None:
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    model = parallelize_module(nn.MultiheadAttention(8, 4, batch_first=True), mesh, "transformer")
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(args[0] is args[1] and args[1] is args[2]))
    x = torch.randn(4, 6, 8)
    model(x, x, x)
    assert seen == [True]
