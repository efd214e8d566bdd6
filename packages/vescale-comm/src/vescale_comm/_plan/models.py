"""Shapes of the parameters of known models, and of any decoder that a config in Hugging Face's words describes.

Shapes only, in torch's order (output features first), by units: what FSDP gathers and frees together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PlanError

__all__ = ["MODELS", "Unit", "model_units", "read_units"]

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-3-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
"""Configs by name, with the keys that shapes depend on."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered together."""

    name: str
    """Of the module."""
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    """Full name and shape of each parameter."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(math.prod(shape) for _, shape in self.tensors)


def model_units(config: str | Mapping[str, Any]) -> tuple[Unit, ...]:
    """Return the units of a decoder: embedding, each layer, and the last norm with the head.

    Args:
        config: a name of `MODELS`, or the keys of a Hugging Face config: hidden_size, num_hidden_layers,
            num_attention_heads, vocab_size, intermediate_size, and where they differ num_key_value_heads, head_dim,
            num_experts or num_local_experts, moe_intermediate_size, tie_word_embeddings, attention_bias. Experts are
            three tensors per layer with the expert as dim 0. A model_type of qwen3 adds norms of queries and keys.

    Raises:
        PlanError: the name is unknown, or a key is missing.

    Example:
        >>> units = model_units("llama-3-8b")
        >>> len(units), sum(unit.numel for unit in units), units[1].tensors[0]
        (34, 8030261248, ('layers.0.self_attn.q_proj.weight', (4096, 4096)))
    """
    if isinstance(config, str):
        if config not in MODELS:
            raise PlanError(f"No model is called {config!r}: choose from {', '.join(MODELS)}, or give a config.")
        config = MODELS[config]
    hidden, vocab = _key(config, "hidden_size"), _key(config, "vocab_size")
    layers = [
        Unit(f"layers.{index}", tuple((f"layers.{index}.{name}", shape) for name, shape in _layer(config)))
        for index in range(_key(config, "num_hidden_layers"))
    ]
    head: list[tuple[str, tuple[int, ...]]] = [("norm.weight", (hidden,))]
    if not config.get("tie_word_embeddings"):
        head.append(("lm_head.weight", (vocab, hidden)))
    embedding = Unit("embed_tokens", (("embed_tokens.weight", (vocab, hidden)),))
    return (embedding, *layers, Unit("head", tuple(head)))


def _layer(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, heads = _key(config, "hidden_size"), _key(config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("self_attn.q_proj.weight", (queries, hidden)),
        ("self_attn.k_proj.weight", (keys, hidden)),
        ("self_attn.v_proj.weight", (keys, hidden)),
        ("self_attn.o_proj.weight", (hidden, queries)),
    ]
    if config.get("attention_bias"):
        sizes = {"q": queries, "k": keys, "v": keys}
        shapes += [(f"self_attn.{name}_proj.bias", (size,)) for name, size in sizes.items()]
    if str(config.get("model_type", "")).startswith("qwen3"):
        shapes += [(f"self_attn.{name}_norm.weight", (head_dim,)) for name in "qk"]
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        wide = config.get("moe_intermediate_size") or _key(config, "intermediate_size")
        shapes += [
            ("mlp.gate.weight", (experts, hidden)),
            ("mlp.experts.gate_proj", (experts, wide, hidden)),
            ("mlp.experts.up_proj", (experts, wide, hidden)),
            ("mlp.experts.down_proj", (experts, hidden, wide)),
        ]
    else:
        wide = _key(config, "intermediate_size")
        shapes += [
            ("mlp.gate_proj.weight", (wide, hidden)),
            ("mlp.up_proj.weight", (wide, hidden)),
            ("mlp.down_proj.weight", (hidden, wide)),
        ]
    return [*shapes, ("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,))]


def _key(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise PlanError(f"The config has {name} = {value!r}: a whole number from 1 on is needed.")
    return value


def read_units(path: Path) -> tuple[Unit, ...]:
    """Read units from a JSON file: a Hugging Face config, or shapes as `{unit: {parameter: [size, ...]}}`.

    Raises:
        PlanError: the file is neither.
        OSError: it cannot be read.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {error}") from None
    if isinstance(content, dict) and "hidden_size" in content:
        return model_units(content)
    if not isinstance(content, dict) or not all(_is_unit(unit) for unit in content.values()):
        raise PlanError(f"{path} is neither a config with hidden_size nor shapes as {{unit: {{parameter: [size]}}}}.")
    return tuple(
        Unit(name, tuple((tensor, tuple(shape)) for tensor, shape in unit.items())) for name, unit in content.items()
    )


def _is_unit(unit: object) -> bool:
    return isinstance(unit, dict) and all(
        isinstance(shape, Sequence) and all(isinstance(size, int) for size in shape) for shape in unit.values()
    )
