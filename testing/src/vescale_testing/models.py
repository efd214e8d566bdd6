"""Small models that exist in the wild, with data and a loss: what plans of the zoo are tested and timed on.

Nothing of a model is changed for parallelism. Models of transformers have random weights; the package is
imported when one of them is made.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is, and its batch."""

    width: int = 16
    """Features; four heads share them."""
    layers: int = 2
    """Layers, of each kind."""
    vocabulary: int = 32
    """Number of tokens that are known."""
    rows: int = 4
    """Sequences, or pictures, in a batch."""
    length: int = 8
    """Positions in a sequence."""


TINY = Size()
HEADS, GROUPS = 4, 2


@dataclass(frozen=True, slots=True)
class Example:
    """A model with its plan and data. Random numbers are those of the seed at the call."""

    name: str
    """What it is called."""
    plan: str
    """Name of its plan in the zoo."""
    make: Callable[[Size], nn.Module]
    """Makes the model, in float32 and for training, without dropout."""
    inputs: Callable[[Size], dict[str, Any]]
    """Makes the arguments of a call."""
    target: Callable[[Size], Tensor]
    """Makes what the result is compared with."""
    loss: Callable[[Any, Tensor], Tensor]
    """Loss of a result and a target, in the precision of the result."""
    batch_dim: int = 0
    """Dim of the target that is the batch."""
    spread: bool = False
    """Whether the batch is cut along all mesh axes, not only "dp"."""
    needs: str = ""
    """Package that it needs beside torch."""
    labels: bool = field(default=False)
    """Whether the model itself computes the loss, in float32, where it is given `labels`."""

    def built(self, size: Size = TINY, *, seed: int = 0) -> nn.Module:
        """Return the model with the weights of a seed."""
        torch.manual_seed(seed)
        return self.make(size).train()

    def batch(self, size: Size = TINY, *, seed: int = 1) -> tuple[dict[str, Any], Tensor]:
        """Return arguments and target of one call."""
        torch.manual_seed(seed)
        return self.inputs(size), self.target(size)


class Double(TorchFunctionMode):
    """Within a ``with`` block float32 means float64, so that models compute all of it in double precision.

    Those of transformers convert to float32 for norms and losses, whatever they are in. Where two runs differ by
    rounding of float64, such a conversion may make that a rounding of float32, which AdamW may make a whole step.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple([torch.float64 if a is torch.float32 else a for a in args])
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def examples() -> dict[str, Example]:
    """All examples by name."""
    return {e.name: e for e in (*_TRANSFORMERS, *_TORCH)}


# ------------------------------------------------------------------ models of transformers


def _transformers(model: str, **settings: Any) -> nn.Module:
    """A model of transformers by the name of its class, with random weights."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    model_class = getattr(importlib.import_module("transformers"), model)
    made: nn.Module = model_class(model_class.config_class(**settings))
    return made


def _decoder(size: Size) -> dict[str, Any]:
    """Settings that Llama and its relatives share."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": size.width // HEADS,
        "max_position_embeddings": size.length,
        "pad_token_id": 0,
    }


def _encoder(size: Size) -> dict[str, Any]:
    """Settings that BERT and ViT share."""
    return {
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": HEADS,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _gpt2(size: Size) -> nn.Module:
    sizes = {"n_embd": size.width, "n_layer": size.layers, "n_head": HEADS, "n_positions": size.length}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _transformers("GPT2LMHeadModel", vocab_size=size.vocabulary, **sizes, **off)


def _t5(size: Size) -> nn.Module:
    return _transformers(
        "T5ForConditionalGeneration", vocab_size=size.vocabulary, d_model=size.width, d_kv=size.width // HEADS,
        d_ff=2 * size.width, num_layers=size.layers, num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0,
        relative_attention_num_buckets=8,
    )  # fmt: skip


def _tokens(size: Size) -> Tensor:
    """Random tokens, none of which means padding."""
    return torch.randint(1, size.vocabulary, (size.rows, size.length))


def _input_ids(size: Size) -> dict[str, Any]:
    return {"input_ids": _tokens(size)}


def _padded_ids(size: Size) -> dict[str, Any]:
    """Tokens of which the last row has only half."""
    mask = torch.ones(size.rows, size.length, dtype=torch.long)
    mask[-1, size.length // 2 :] = 0
    return {"input_ids": _tokens(size), "attention_mask": mask}


def _both_ids(size: Size) -> dict[str, Any]:
    return {**_padded_ids(size), "decoder_input_ids": _tokens(size)}


def _pictures(size: Size) -> dict[str, Any]:
    return {"pixel_values": torch.randn(size.rows, 3, 8, 8)}


def _classes(size: Size) -> Tensor:
    return torch.randint(size.vocabulary, (size.rows,))


def _logits_loss(result: Any, target: Tensor) -> Tensor:
    """Cross entropy of logits (..., classes), in their own precision."""
    logits = result.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("llama", "LlamaForCausalLM", {}),
    "Qwen3": ("qwen3", "Qwen3ForCausalLM", {}),
    "Gemma": ("gemma", "GemmaForCausalLM", {"num_key_value_heads": 1}),
    "Mixtral": (
        "mixtral",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"},
    ),
}


def _decoder_example(name: str, plan: str, model: str, own: dict[str, Any]) -> Example:
    def make(size: Size) -> nn.Module:
        return _transformers(model, **{**_decoder(size), **own})

    return Example(name, plan, make, _input_ids, _tokens, _logits_loss, needs="transformers", labels=True)


def _bert(size: Size) -> nn.Module:
    sizes = {"vocab_size": size.vocabulary, "max_position_embeddings": size.length, "type_vocab_size": 2}
    return _transformers("BertForMaskedLM", **sizes, **_encoder(size))


def _vit(size: Size) -> nn.Module:
    return _transformers(
        "ViTForImageClassification", image_size=8, patch_size=2, num_labels=size.vocabulary, **_encoder(size)
    )


_TRANSFORMERS = (
    *(_decoder_example(name, *rest) for name, rest in _DECODERS.items()),
    Example("GPT-2", "gpt2", _gpt2, _input_ids, _tokens, _logits_loss, needs="transformers", labels=True),
    Example("BERT", "bert", _bert, _padded_ids, _tokens, _logits_loss, needs="transformers", labels=True),
    Example("T5", "t5", _t5, _both_ids, _tokens, _logits_loss, needs="transformers", labels=True),
    Example("ViT", "vit", _vit, _pictures, _classes, _logits_loss, needs="transformers", labels=True),
)

# ------------------------------------------------------------------ models of torch


def _squares(result: Any, target: Tensor) -> Tensor:
    return (result - target).square().mean()  # type: ignore[no-any-return]


def _attended_squares(result: Any, target: Tensor) -> Tensor:
    return _squares(result[0], target)


def _sequences(size: Size) -> Tensor:
    return torch.randn(size.rows, size.length, size.width)


def _layer(kind: type[nn.Module], size: Size, *, batch_first: bool, norm_first: bool) -> nn.Module:
    return kind(size.width, HEADS, 2 * size.width, 0.0, batch_first=batch_first, norm_first=norm_first)


def _torch_encoder(size: Size) -> nn.Module:
    layer = _layer(nn.TransformerEncoderLayer, size, batch_first=True, norm_first=True)
    norm = nn.LayerNorm(size.width)
    return nn.TransformerEncoder(layer, size.layers, norm, enable_nested_tensor=False)  # type: ignore[arg-type]


def _torch_encoder_inputs(size: Size) -> dict[str, Any]:
    padding = torch.zeros(size.rows, size.length, dtype=torch.bool)
    padding[-1, size.length // 2 :] = True
    return {"src": _sequences(size), "src_key_padding_mask": padding}


def _torch_decoder(size: Size) -> nn.Module:
    layer = _layer(nn.TransformerDecoderLayer, size, batch_first=False, norm_first=False)
    return nn.TransformerDecoder(layer, size.layers)  # type: ignore[arg-type]


def _torch_decoder_inputs(size: Size) -> dict[str, Any]:
    target, memory = _sequences(size).transpose(0, 1), _sequences(size).transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(size.length).isinf()
    return {"tgt": target, "memory": memory, "tgt_mask": mask, "tgt_is_causal": True}


def _attention_inputs(size: Size) -> dict[str, Any]:
    return {"query": _sequences(size), "key": _sequences(size), "value": _sequences(size)}


class Reader(nn.Module):
    """An LSTM that reads tokens and tells a class."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.lstm = nn.LSTM(size.width, size.width, size.layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * size.width, size.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, classes) for tokens (batch, length)."""
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states.mean(1))  # type: ignore[no-any-return]


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.relu(y + self.downsample(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """A small residual network with batch norm, in the style of torchvision's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, size.width, 3, 1, 1, bias=False), nn.BatchNorm2d(size.width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = _Residual(size.width, size.width, 1), _Residual(size.width, 2 * size.width, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(2 * size.width, size.vocabulary)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return logits (batch, classes) for pictures (batch, 3, height, width)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(pictures))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]


def _attention(size: Size) -> nn.Module:
    return nn.MultiheadAttention(size.width, HEADS, batch_first=True)


_TORCH = (
    Example("TransformerEncoder", "transformer", _torch_encoder, _torch_encoder_inputs, _sequences, _squares),
    Example(
        "TransformerDecoder", "transformer", _torch_decoder, _torch_decoder_inputs,
        lambda size: _sequences(size).transpose(0, 1), _squares, batch_dim=1,
    ),
    Example("MultiheadAttention", "transformer", _attention, _attention_inputs, _sequences, _attended_squares),
    Example(
        "LSTM", "data", Reader, lambda size: {"tokens": _tokens(size)}, _classes, F.cross_entropy, spread=True
    ),
    Example(
        "ResNet", "data", ResNet, lambda size: {"pictures": _pictures(size)["pixel_values"]}, _classes,
        F.cross_entropy, spread=True,
    ),
)  # fmt: skip
