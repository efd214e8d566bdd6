"""The code of the README runs, alone and on ranks, to the same losses; what it names is there."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import vescale_pipe as vp

HOME = Path(__file__).parents[1]
TEXT = (HOME / "README.md").read_text()


def run_block(number=0):
    names = {}
    exec(compile(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[number], str(HOME / "README.md"), "exec"), names)
    return names


def plain_losses():
    """What one process computes without any of this, by torch alone."""
    torch.manual_seed(0)
    blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8))
    model, batch = torch.nn.Sequential(*blocks), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        losses = []
        for part in batch.chunk(8):
            loss = torch.nn.functional.mse_loss(model(part), part) / 8
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).sum()


def test_in_one_process():
    assert torch.allclose(run_block()["loss"], plain_losses(), rtol=1e-6)


def test_dropout_is_that_of_one_process():
    names = run_block(1)
    assert torch.equal(names["loss"], names["plain"])  # as the block says itself
    again, _ = names["engine"](names["batch"], target=names["batch"])
    assert not torch.equal(again, names["loss"])


@pytest.mark.ranks(4)
def test_on_ranks(rank, world):
    names = run_block()
    assert torch.allclose(names["loss"], plain_losses(), rtol=1e-6)
    counts = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(p.numel() for p in names["engine"].parameters()))
    assert sum(counts) == sum(p.numel() for p in names["model"].parameters())
    assert len(set(counts)) == 1


def test_the_tables_name_what_there_is():
    rows = re.findall(r"^\| (.*?) \|", TEXT, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)[`(]", row) if not name.startswith("vescale_")}
    assert names >= {"PipeEngine", "split", "simulate", "timeline"}
    assert not [name for name in names if not hasattr(vp, name)]
    pictures = re.findall(r"\]\((pictures/\w+\.svg)\)", TEXT)
    assert all((HOME / picture).is_file() for picture in pictures)
    drawn = {Path(picture).stem for picture in pictures}
    assert drawn == set(vp.schedule_names()) - {"optimized"}


def test_the_figures_of_the_table_are_simulated():
    for line in TEXT.splitlines():
        found = re.match(r"\| \[(\w+)\]\(\S+\) \| .*? \| ([\d.]+) % \| .*? \| ([\d.]+) \|$", line)
        if found is None:
            continue
        schedule = vp.build_schedule(found[1], 4, 8)
        result = vp.simulate(schedule, vp.Costs().divided(schedule.num_stages // 4))
        assert f"{100 * result.bubble:.1f}" == found[2], line
        assert max(result.peak) == float(found[3]), line
