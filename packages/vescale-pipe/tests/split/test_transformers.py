"""Models of Hugging Face with random weights, if `transformers` is there: loss and gradients bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from vescale_pipe._split import split
from vescale_pipe.errors import SplitError

hf = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2))


def mixtral() -> nn.Module:
    config = hf.MixtralConfig(**SMALL, intermediate_size=64, num_key_value_heads=2, num_local_experts=4)
    return hf.MixtralForCausalLM(config)


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=4))


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, intermediate_size=64))


def batch(model: nn.Module, *, mask: bool, rows: int = 2, length: int = 12) -> dict[str, Any]:
    ids = torch.randint(1, 64, (rows, length))
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if mask:
        kwargs["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
        kwargs["attention_mask"][0, :3] = 0
    if not isinstance(model, hf.BertForMaskedLM):
        kwargs["use_cache"] = False
    return kwargs


@pytest.mark.parametrize(("count", "mask"), [(2, True), (3, False), (4, True)])
@pytest.mark.parametrize("make", [llama, mixtral, gpt2, t5, bert])
def test_same_as_whole(make: Callable[[], nn.Module], count: int, mask: bool) -> None:
    torch.manual_seed(0)
    model = make()
    whole = copy.deepcopy(model)
    kwargs = batch(model, mask=mask)
    graph = split(model, num_stages=count, example_kwargs=kwargs)
    assert graph.num_stages == count
    assert graph.training is None
    assert set().union(*(stage.module.state_dict() for stage in graph.stages)) == set(model.state_dict())
    # Hidden states are sent; masks, positions and rotary tables are made where they are needed.
    assert not any("rotary" in crossing.text or "mask" in crossing.text for crossing in graph.crossings)
    if make is not t5:
        assert len(graph.crossings) == count - 1
    for mode in (True, False):
        model.train(mode)
        whole.train(mode)
        torch.manual_seed(1)
        out = graph.run(**kwargs)
        torch.manual_seed(1)
        expected = whole(**kwargs)
        assert type(out) is type(expected)
        assert list(out) == list(expected)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out["logits"], expected.logits)
        out.loss.backward()
        expected.loss.backward()
        for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad), name


def test_checkpointing_stays() -> None:
    model = llama().train()
    kwargs = batch(model, mask=False)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()
    graph = split(model, num_stages=2, example_kwargs=kwargs)
    calls: list[int] = []
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda module, args: calls.append(1))
    graph.run(**kwargs).loss.backward()
    assert len(calls) == 2


def test_a_cache_is_refused() -> None:
    model = llama()
    kwargs = batch(model, mask=False) | {"use_cache": True}
    with pytest.raises(SplitError, match=r"DynamicCache carries tensors.*use_cache=False"):
        split(model, num_stages=2, example_kwargs=kwargs)


def test_cuts_inside_of_an_encoder_and_a_decoder() -> None:
    model = t5().eval()
    kwargs = batch(model, mask=True)
    graph = split(model, at=["encoder.block.2", "decoder", "decoder.block.2"], example_kwargs=kwargs)
    other = batch(model, mask=True, rows=3, length=7)
    for some in (kwargs, other):
        out, expected = graph.run(**some), model(**some)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(out.encoder_last_hidden_state, expected.encoder_last_hidden_state)
    names = [[name for stage, name in group] for group in graph.tied]
    assert any("shared.weight" in group and "lm_head.weight" in group for group in names)
