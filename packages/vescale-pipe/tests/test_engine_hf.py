"""Hugging Face models as they are: own losses, tied heads, shared encoders, experts; the bits of a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
LAYERS = [f"model.layers.{number}" for number in (1, 2, 3)]


def gpt2() -> tuple[nn.Module, list[str]]:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=32, n_head=2, vocab_size=64, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config), [f"transformer.h.{number}" for number in (1, 2, 3)]


def llama() -> tuple[nn.Module, list[str]]:
    config = transformers.LlamaConfig(num_hidden_layers=4, num_key_value_heads=2, **SMALL)
    return transformers.LlamaForCausalLM(config), LAYERS


def mixtral() -> tuple[nn.Module, list[str]]:
    config = transformers.MixtralConfig(num_hidden_layers=4, num_key_value_heads=2, num_local_experts=4, **SMALL)
    return transformers.MixtralForCausalLM(config), LAYERS


def t5() -> tuple[nn.Module, list[str]]:
    """The table of tokens is used in three stages, the encoder's result twice in each block of the decoder."""
    config = transformers.T5Config(
        num_layers=2,
        num_decoder_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_heads=4,
        vocab_size=64,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config), ["encoder.block.1", "decoder.block.0", "decoder.block.1"]


@pytest.mark.parametrize(("schedule", "ranks"), [("zb_v", 2)])  # engine/test_matrix.py has all, of smaller models
@pytest.mark.parametrize("make", [gpt2, llama, mixtral, t5])
def test_models_train_as_on_one_device(make: Any, schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, at = make()
    reference = copy.deepcopy(model)
    plan = PipePlan(schedule=schedule, num_microbatches=3, at=at)
    ids = torch.randint(0, 64, (4, 7))
    example = {"input_ids": ids[:2], "labels": ids[:2], "use_cache": False}
    engine = PipeEngine(model, None, plan, example=((), example), act_out=ranks)
    for length in (7, 5):
        ids = torch.randint(0, 64, (4, length))
        loss, result = engine(input_ids=ids, labels=ids, use_cache=False)
        total = torch.zeros(())
        for piece in ids.tensor_split(3):
            part = reference(input_ids=piece, labels=piece, use_cache=False).loss * (len(piece) / 4)
            part.backward()
            total = total + part.detach()
        assert torch.equal(loss, total)
        assert torch.equal(result.loss, total)
        assert result.logits.shape == (4, length, 64)
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            if mine.grad is not None:
                assert torch.equal(mine.grad, theirs.grad), name


@pytest.mark.parametrize("make", [gpt2, llama, mixtral, t5])
def test_padded_batches_of_which_some_micro_batches_have_no_padding(make: Any) -> None:
    """transformers leaves the mask out where nothing is masked: micro-batches of one step then differ."""
    torch.manual_seed(0)
    model, at = make()
    reference = copy.deepcopy(model)
    engine = PipeEngine(model, None, PipePlan(num_microbatches=3, at=at), act_out=4)
    for short in ([2], [], [0, 2], [0, 1, 2, 3, 4, 5], [1, 3]):
        ids = torch.randint(1, 64, (6, 7))
        mask = torch.ones_like(ids)
        mask[short, 5:] = 0
        labels = ids.masked_fill(mask == 0, -100)
        loss, result = engine(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False)
        total = torch.zeros(())
        pieces = zip(ids.tensor_split(3), mask.tensor_split(3), labels.tensor_split(3), strict=True)
        for piece, some, wanted in pieces:
            part = reference(input_ids=piece, attention_mask=some, labels=wanted, use_cache=False).loss * (2 / 6)
            part.backward()
            total = total + part.detach()
        assert torch.equal(loss, total)
        assert torch.equal(result.loss, total)
        for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad), name
