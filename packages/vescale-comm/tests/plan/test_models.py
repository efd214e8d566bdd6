"""Shapes of known models: parameter counts as published, and what a config may say."""

import json
from pathlib import Path

import pytest

from vescale_comm._plan import MODELS, model_units, read_units
from vescale_comm.errors import PlanError


@pytest.mark.parametrize(
    ("name", "numel", "layers"),
    [
        ("llama-3-8b", 8_030_261_248, 32),  # sizes of the published checkpoints
        ("llama-3-70b", 70_553_706_496, 80),
        ("qwen3-30b-a3b", 30_532_122_624, 48),
    ],
)
def test_models_have_as_many_parameters_as_their_checkpoints(name: str, numel: int, layers: int) -> None:
    units = model_units(name)
    assert sum(unit.numel for unit in units) == numel
    assert len(units) == layers + 2
    assert len({tensor for unit in units for tensor, _ in unit.tensors}) == sum(len(unit.tensors) for unit in units)


def test_keys_of_a_config_count() -> None:
    config = {
        "hidden_size": 8,
        "intermediate_size": 20,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 30,
        "tie_word_embeddings": True,
        "attention_bias": True,
    }
    embedding, layer, head = model_units(config)
    shapes = dict(layer.tensors)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (8, 8)
    assert shapes["layers.0.self_attn.k_proj.bias"] == (8,)
    assert shapes["layers.0.mlp.down_proj.weight"] == (8, 20)
    assert embedding.tensors == (("embed_tokens.weight", (30, 8)),)
    assert head.tensors == (("norm.weight", (8,)),)
    experts = dict(model_units({**config, "num_local_experts": 4, "head_dim": 3})[1].tensors)
    assert experts["layers.0.mlp.experts.down_proj"] == (4, 8, 20)
    assert experts["layers.0.mlp.gate.weight"] == (4, 8)
    assert experts["layers.0.self_attn.q_proj.weight"] == (6, 8)


def test_files_hold_a_config_or_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(MODELS["llama-3-8b"]))
    assert read_units(path) == model_units("llama-3-8b")
    path.write_text('{"a": {"a.w": [3, 4], "a.b": [3]}, "c": {"c.s": []}}')
    first, second = read_units(path)
    assert (first.name, first.tensors, first.numel) == ("a", (("a.w", (3, 4)), ("a.b", (3,))), 15)
    assert second.numel == 1


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"'gpt-9'.*llama-3-8b"):
        model_units("gpt-9")
    with pytest.raises(PlanError, match="vocab_size = None"):
        model_units({"hidden_size": 8})
    path = tmp_path / "model.json"
    for text, message in (("{", "is no JSON"), ("[]", "neither"), ('{"a": {"w": 3}}', "neither")):
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            read_units(path)
