"""The code blocks of the READMEs run, on the ranks that they ask for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_testing import run_ranks

PACKAGE = Path(__file__).parents[1]
READMES = {"package": PACKAGE / "README.md", "repository": PACKAGE.parents[1] / "README.md"}


def _run_blocks(path: str) -> int:
    blocks = re.findall(r"```python\n(.*?)```", Path(path).read_text(), re.DOTALL)
    torch.manual_seed(dist.get_rank())  # as under torchrun, where no rank is seeded like another one
    namespace: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, path, "exec"), namespace)
    return len(blocks)


@pytest.mark.parametrize("which", READMES)
def test_blocks_run(which: str) -> None:
    if not READMES[which].exists():
        pytest.skip("not in the repository")
    assert min(run_ranks(_run_blocks, 4, kwargs={"path": str(READMES[which])})) > 0
