"""Models of transformers whose experts are spread over ranks, against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor import DTensor, Replicate, Shard, implicit_communication, parallelize_module
from vescale_dtensor._experts import expert_parallel
from vescale_dtensor.placements import InterleavedShard
from vescale_testing import cached_mesh

transformers = pytest.importorskip("transformers")

VOCABULARY = 61


BATCHED = {"implementation": "batched_mm"}


def make_model(implementation: str = "eager", **config: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "output_router_logits": True, "router_aux_loss_coef": 0.1,
    }  # fmt: skip
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**sizes, **config})).double()
    model.set_experts_implementation(implementation)
    return model


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, ids: Tensor, steps: int) -> tuple[list[Any], dict[str, Any]]:
    """Losses of `steps` steps, and the gradients of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, gradients = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach())
        gradients = {n: p.grad for n, p in model.named_parameters()}
        optimizer.step()
    return losses, gradients


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


ATTENTION = {
    "parameter": {r".*\.[qkv]_proj\.weight": {"tp": Shard(0)}, r".*\.o_proj\.weight": {"tp": Shard(1)}},
    "forward": {r".*\.o_proj\.output": {"tp": Replicate()}},
}
"""Attention heads over "tp"."""
INSIDE = {
    "parameter": {
        r".*\.experts\.gate_up_proj": {"tp": InterleavedShard(1, 2)},
        r".*\.experts\.down_proj": {"tp": Shard(2)},
    }
}
"""Every expert cut over "tp"."""
CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], list[Any], dict[str, Any]]] = {
    "ep": ((4,), ("ep",), ["experts"], {}),
    "dp x ep": ((2, 2), ("dp", "ep"), ["experts"], {"num_experts_per_tok": 1, **BATCHED}),
    "ep x tp": ((2, 2), ("ep", "tp"), [ATTENTION, expert_parallel()], {}),
    "more ranks than experts": ((2, 2), ("dp", "ep"), [expert_parallel(("dp", "ep"))], {"num_local_experts": 3}),
}


@pytest.mark.ranks(4, pool=True, timeout=300)
def test_training_of_mixtral_equals_one_device() -> None:
    """Losses with the router's own, gradients and parameters; nothing moves that nobody asked for."""
    ids = tokens(8, 6)
    for case, (shape, names, plans, config) in CASES.items():
        reference, model = make_model(**config), make_model(**config)
        mesh = cached_mesh(*shape, names=names)
        batch = {"forward": {"input": {n: Shard(0) for n in names if n != "tp"}}}
        parallelize_module(model, mesh, [batch, *plans])
        with implicit_communication("error"):
            got = train(model, ids, 5 if case == "ep" else 2)
        expected = train(reference, ids, 5 if case == "ep" else 2)
        for mine, theirs in zip(got[0], expected[0], strict=True):
            torch.testing.assert_close(whole(mine), theirs, rtol=1e-6, atol=1e-6, msg=case)  # computed in float32
        for name, grad in expected[1].items():
            torch.testing.assert_close(whole(got[1][name]), grad, rtol=1e-7, atol=1e-7, msg=f"{case}: {name}")
        for name, p in reference.named_parameters():
            mine = whole(model.get_parameter(name))
            torch.testing.assert_close(mine, p.detach(), rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


@pytest.mark.ranks(4, pool=True, timeout=300)
def test_mixtral_otherwise() -> None:
    """Kernels in float32, checkpointing, an uneven batch with padding, experts cut inside, and no gradients."""
    ids = tokens(5, 6)
    padding = torch.ones(5, 6, dtype=torch.int64)
    padding[1, :2] = 0
    mesh = cached_mesh(2, 2, names=("ep", "tp"))
    for plans, implementation, recompute in (
        ([ATTENTION, "experts"], "grouped_mm", True),
        ([ATTENTION, "experts", INSIDE], "eager", False),
        (["mixtral", "experts"], "eager", True),
    ):
        reference, model = (make_model(implementation).float() for _ in range(2))
        parallelize_module(model, mesh, [{"forward": {"input": {"ep": Shard(0)}}}, *plans])
        if recompute:
            model.activation_checkpointing_enable()
        with implicit_communication("allow"):
            results = [m(input_ids=ids, attention_mask=padding, labels=ids) for m in (model, reference)]
            for r in results:
                r.loss.backward()
            torch.testing.assert_close(whole(results[0].loss), results[1].loss.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(whole(results[0].aux_loss), results[1].aux_loss.detach(), rtol=1e-5, atol=1e-5)
            for name, p in reference.named_parameters():
                mine = whole(model.get_parameter(name).grad)
                torch.testing.assert_close(mine, p.grad, rtol=1e-4, atol=1e-5, msg=f"{implementation}: {name}")
            with torch.no_grad():
                got = model(input_ids=ids).logits
            torch.testing.assert_close(whole(got), reference(input_ids=ids).logits.detach(), rtol=1e-4, atol=1e-5)
