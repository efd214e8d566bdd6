"""The code blocks of the README run, on ranks that torchrun would start."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_testing import run_ranks

README = Path(__file__).parents[1] / "README.md"


def _run_blocks(path: str) -> dict[str, object]:
    torch.manual_seed(dist.get_rank())  # as under torchrun, where no rank is seeded like another one
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in re.findall(r"```python\n(.*?)```", Path(path).read_text(), re.DOTALL):
        exec(compile(block, path, "exec"), namespace)
    return {"same": namespace["same"], "x": namespace["x"]}


def test_blocks_run_and_the_first_one_shows_the_problem() -> None:
    ranks = run_ranks(_run_blocks, 4, kwargs={"path": str(README)})
    assert [r["same"] for r in ranks] == [False] * 4
    assert all(torch.equal(torch.as_tensor(r["x"]), torch.as_tensor(ranks[0]["x"])) for r in ranks)
