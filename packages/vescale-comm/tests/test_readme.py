"""The code of the README runs, alone and on ranks, to what torch alone computes on one device; its names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_comm as vc

HOME = Path(__file__).parents[1]
TEXT = (HOME / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_with(strategy: str) -> dict[str, Any]:
    """Run the example with one of its three strategies."""
    whole = BLOCKS[0]
    begin, end = whole.index("vc.replicate("), whole.index("for _ in range(3)")
    instead = {"ddp": whole[begin:end], "zero": BLOCKS[1], "fsdp": BLOCKS[2]}[strategy]
    names: dict[str, Any] = {}
    exec(compile(whole[:begin] + instead + whole[end:], str(HOME / "README.md"), "exec"), names)
    return names


def on_one_device() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    batch = torch.randn(24, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        torch.nn.functional.mse_loss(model(batch), batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def check(strategy: str) -> None:
    names = run_with(strategy)
    model, wanted = names["model"], on_one_device()
    with vc.full_parameters(model) if strategy == "fsdp" else torch.no_grad():
        for mine, theirs in zip(model.parameters(), wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_in_one_process(no_group: None, strategy: str) -> None:
    check(strategy)


@pytest.mark.ranks(3)
def test_on_ranks(rank: int) -> None:
    for strategy in ("ddp", "zero", "fsdp"):
        check(strategy)


def test_the_tables_name_what_there_is() -> None:
    rows = re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)[`(]", row) if not name.startswith("vescale_")}
    assert names >= {"replicate", "DistributedOptimizer", "fully_shard", "emulator"}
    assert not [name for name in names if not hasattr(vc, name)]
