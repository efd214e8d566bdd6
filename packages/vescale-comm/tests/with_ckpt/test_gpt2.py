"""A GPT-2 that is trained on three ranks, saved by vescale_ckpt and loaded on two, goes on as one on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("vescale_ckpt")
pytest.importorskip("transformers")

import transformers as hf

import vescale_ckpt as ck
import vescale_comm as vc

ROWS = 6
"""Samples of a batch, which two ranks and three share equally."""


def gpt2(seed: int) -> Any:
    """Make a small one, whose head is tied to its embedding."""
    torch.manual_seed(seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(
        vocab_size=61, bos_token_id=0, eos_token_id=0, n_positions=16, n_embd=12, n_layer=2, n_head=2, **drops
    )
    return hf.GPT2LMHeadModel(config).double()


def batch(step: int) -> Tensor:
    return torch.randint(0, 61, (ROWS, 9), generator=torch.Generator().manual_seed(step))


def train(model: Any, optimizer: Any, steps: range, rank: int = 0, world: int = 1) -> None:
    for step in steps:
        optimizer.zero_grad()
        tokens = batch(step).chunk(world)[rank]
        logits = model(input_ids=tokens[:, :-1]).logits  # its own loss is in float32
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sharded(kind: str, seed: int, group: Any = None) -> tuple[nn.Module, Any]:
    model = gpt2(seed)
    if kind == "fully_shard":
        rules = {r".*c_(attn|fc)\.weight": vc.Rows(1), ".*": 1}
        vc.fully_shard(model, group, granularity=rules)
        return model, adamw(model.parameters())
    return model, vc.DistributedOptimizer(
        model, torch.optim.AdamW, zero=2, group_or_mesh=group, bucket_mb=0.01, lr=0.01, weight_decay=0.1
    )


def save(kind: str, folder: Path, model: nn.Module, optimizer: Any) -> None:
    if kind == "fully_shard":
        ck.save(folder, {"model": model.state_dict(), "optimizer": vc.optimizer_state(optimizer)})
    else:
        ck.save(folder, {"model": model, "optimizer": optimizer})


def load(kind: str, folder: Path, model: nn.Module, optimizer: Any, group: Any) -> None:
    if kind == "fully_shard":
        state = {"model": model.state_dict(), "optimizer": {}}
        ck.load(folder, state, process_group=group)
        vc.load_optimizer_state(optimizer, state["optimizer"])
    else:
        ck.load(folder, {"model": model, "optimizer": optimizer}, process_group=group)


@pytest.mark.ranks(3, timeout=120)
def test_a_state_of_three_ranks_goes_to_two(rank: int, world: int, tmp_path: Path) -> None:
    reference = gpt2(0)
    train(reference, adamw(reference.parameters()), range(2))
    weights = {name: value.clone() for name, value in reference.state_dict().items()}
    reference = gpt2(0)
    train(reference, adamw(reference.parameters()), range(4))
    pair = dist.new_group([0, 1])
    for kind in ("fully_shard", "DistributedOptimizer"):
        folder = tmp_path / kind
        model, optimizer = sharded(kind, 0)
        train(model, optimizer, range(2), rank, world)
        save(kind, folder, model, optimizer)
        # What is in the files are whole tensors under the names of one device.
        saved = ck.load_dict(folder, keys="model.*")["model"]
        assert saved.keys() == weights.keys()
        for name, value in saved.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-10, atol=1e-12, msg=name)
        if rank < 2:
            other, resumed = sharded(kind, 9, pair)
            load(kind, folder, other, resumed, pair)
            train(other, resumed, range(2, 4), rank, 2)
            if kind == "fully_shard":
                with vc.full_parameters(other):
                    found = [parameter.detach().clone() for parameter in other.parameters()]
            else:
                resumed.finish_param_sync()
                found = list(other.parameters())
            assert other.lm_head.weight is other.transformer.wte.weight
            for (name, want), got in zip(reference.named_parameters(), found, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=f"{kind} {name}")
