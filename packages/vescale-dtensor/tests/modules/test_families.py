"""Models of transformers that no plan of the zoo knows, data parallel and with every weight cut, against one device."""

from __future__ import annotations

import copy
import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Shard, implicit_communication, parallelize_module, plain_tensors
from vescale_testing import cached_mesh
from vescale_testing.models import Double

SIZE = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
MLP = {"intermediate_size": 32, "max_position_embeddings": 16}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "output_router_logits": True}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "Phi3": {**SIZE, **MLP, **IDS, "num_key_value_heads": 2},
    "Falcon": {**SIZE, "ffn_hidden_size": 32, "alibi": True},
    "Bloom": {"vocab_size": 32, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "Mamba": {**SIZE, "state_size": 4, "time_step_rank": 4, "conv_kernel": 3},
    "Qwen3Moe": {**SIZE, **MLP, **EXPERTS, "num_key_value_heads": 2, "head_dim": 4},
    "Roberta": {**SIZE, **MLP, **QUIET},
}
BATCH: dict[str, Any] = {"forward": {"input": {"dp": Shard(0)}}}


def _made(family: str) -> nn.Module:
    module = importlib.import_module("transformers")
    config = getattr(module, f"{family}Config")(**FAMILIES[family])
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    torch.manual_seed(0)
    kind = "ForMaskedLM" if family == "Roberta" else "ForCausalLM"
    model: nn.Module = getattr(module, family + kind)(config).double().train()
    return model


def _batch() -> dict[str, Tensor]:
    """Sequences of which some are shorter, and labels of which some do not count."""
    ids = torch.randint(3, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, -2:] = mask[2, -1:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _weights_cut(model: nn.Module) -> dict[str, Any]:
    return {"parameter": {re.escape(n): {"tp": Shard(0)} for n, p in model.named_parameters() if p.ndim}}


@pytest.mark.ranks(4, pool=True, timeout=180)
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_one_device(family: str) -> None:
    pytest.importorskip("transformers")
    mesh, single, batch = cached_mesh(2, 2, names=("dp", "tp")), _made(family), _batch()
    models = [single, copy.deepcopy(single), copy.deepcopy(single)]
    parallelize_module(models[1], mesh, BATCH)
    parallelize_module(models[2], mesh, [BATCH, _weights_cut(single)])
    with implicit_communication("allow"), Double():
        losses = [model(**batch).loss for model in models]
        for loss in losses:
            loss.backward()
    for model, loss in zip(models[1:], losses[1:], strict=True):
        torch.testing.assert_close(loss.detach().full_tensor(), losses[0].detach(), rtol=1e-9, atol=1e-9)
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.ranks(4, pool=True, timeout=180)
def test_generation_equals_one_device() -> None:
    pytest.importorskip("transformers")
    mesh, single, batch = cached_mesh(2, 2, names=("dp", "tp")), _made("Phi3").eval(), _batch()
    ours = parallelize_module(copy.deepcopy(single), mesh, [BATCH, _weights_cut(single)])
    prompt = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    with implicit_communication("allow"), Double(), plain_tensors("replicate"):
        for options in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2}):
            found = []
            for model in (single, ours):
                torch.manual_seed(2)
                found.append(model.generate(**prompt, max_new_tokens=3, **options))  # type: ignore[operator]
            assert isinstance(found[1], DTensor)
            assert torch.equal(found[1].full_tensor(), found[0])
