"""Models of transformers, constructed without values, against their ordinary construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, Shard, _random, parallelize_module, random_mode
from vescale_dtensor._deferred import deferred_init, is_deferred, materialize
from vescale_testing import fake_ranks

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": {**SMALL, "num_key_value_heads": 2},
    "GPT2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 40, "n_positions": 12},
    "Mixtral": {**SMALL, "num_key_value_heads": 2, "num_local_experts": 4, "dtype": "bfloat16"},
    "Bert": {**SMALL, "tie_word_embeddings": True},
    "T5": {"d_model": 16, "d_ff": 24, "d_kv": 4, "num_layers": 2, "num_heads": 4, "vocab_size": 40},
    "ViT": {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4},
}
AUTO = {"Llama": "ForCausalLM", "GPT2": "ForCausalLM", "Mixtral": "ForCausalLM", "Bert": "ForMaskedLM"}


def build(family: str) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    model: nn.Module = getattr(transformers, f"AutoModel{AUTO.get(family, '')}").from_config(config)
    return model


@pytest.mark.parametrize("family", CONFIGS)
def test_from_config(family: str) -> None:
    torch.manual_seed(2)
    expected = build(family)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    with random_mode("whole"):
        with deferred_init():
            model = build(family)
        assert torch.equal(torch.get_rng_state(), state)
        assert all(is_deferred(p) for p in model.parameters())
        materialize(model)
    ours = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    theirs = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype, name
        assert torch.equal(value, ours[name]), name
    assert len({id(p) for p in model.parameters()}) == len({id(p) for p in expected.parameters()})


@pytest.mark.parametrize("rank", [0, 3])
def test_the_part_of_a_rank(rank: int) -> None:
    """One process stands for a rank: importing transformers on four would take longer than all else here."""
    plan = {
        "parameter": {
            r".*(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.weight": {"tp": Shard(0)},
            r".*(o_proj|down_proj)\.weight": {"tp": Shard(1)},
        }
    }
    torch.manual_seed(2)
    expected = build("Llama")
    torch.manual_seed(2)
    with random_mode("whole" if _random.provider() is None else "shard"), fake_ranks(4, rank=rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with deferred_init():
            model = build("Llama")
        parallelize_module(model, mesh, plan)
        for name, value in model.named_parameters():
            assert isinstance(value, DTensor)
            box = [slice(o, o + n) for o, n in zip(value.local_offset, value.local_shape, strict=True)]
            assert torch.equal(value.to_local(), expected.get_parameter(name)[tuple(box)]), name
        sharded = [v for v in model.parameters() if v.to_local().numel() * 2 == v.numel()]  # type: ignore[operator]
    assert len(sharded) == 2 * 7 + 2
