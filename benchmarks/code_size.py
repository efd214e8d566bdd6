"""How many lines make a model parallel: ours beside the files that torchtitan has for the same models.

    pip install --no-deps --target /tmp/titan torchtitan
    python benchmarks/code_size.py --torchtitan /tmp/titan --json rows.json

Counted are lines that are neither blank nor comments: of ours, everything that a script for one device has to
gain, imports included, which is run here on a fake group; of torchtitan, the parallelize file of the model.
Without torchtitan only ours are counted.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, Row, parser, row

from vescale_dtensor import DTensor
from vescale_testing.models import Example, examples

PARALLEL_PART = """
from torch.distributed.device_mesh import init_device_mesh
from vescale_dtensor import parallelize_module
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
parallelize_module(model, mesh, "{plan}")
"""
"""What a script for one device gains, after `torch.distributed` is set up and `model` is made."""
TITAN = {"Llama": "llama3", "Qwen3": "qwen3", "Mixtral": "deepseek_v3"}
"""Folders of torchtitan's models. It has no Mixtral; DeepSeek-V3 is its decoder with experts."""
GOAL = 5


def count(text: str) -> int:
    """Number of lines that are neither blank nor comments."""
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def ours(example: Example) -> Row:
    """Run the parallel part on a model, see that it trains, and count the lines."""
    text = PARALLEL_PART.format(plan=example.plan)
    scope: dict[str, Any] = {"model": example.built()}
    exec(text, scope)
    model = scope["model"]
    inputs, _ = example.batch()
    result = model(**inputs)
    result = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
    assert isinstance(result, DTensor)
    result.float().square().mean().backward()
    cut = sum(p.to_local().numel() < p.numel() for p in model.parameters())
    return row(f"{example.name}: lines", count(text), GOAL, f"{cut} parameters are cut; 0 lines of the model change")


def titans(folder: Path | None, name: str) -> Path | None:
    """Torchtitan's parallelize file for a model, if both are there."""
    if folder is None or name not in TITAN:
        return None
    found = sorted((folder / "models" / TITAN[name]).rglob("parallelize.py"))
    return found[0] if found else None


def torchtitan_folder(given: Path | None) -> Path | None:
    """Where the package lies: below `given`, or among the installed ones."""
    if given is not None:
        inside = given / "torchtitan"
        return inside if inside.is_dir() else given
    spec = importlib.util.find_spec("torchtitan")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def main() -> None:
    """Count and print."""
    options = parser(__doc__ or "")
    options.add_argument("--torchtitan", type=Path, metavar="FOLDER", help="where torchtitan was installed")
    given = options.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = torchtitan_folder(given.torchtitan)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    report = Report("Lines that make a model parallel")
    report.heading("torchtitan is not installed: only ours" if folder is None else f"beside torchtitan at {folder}")
    for name, example in examples().items():
        if example.needs and importlib.util.find_spec(example.needs) is None:
            continue
        mine = ours(example)
        report.add(mine)
        theirs = titans(folder, name)
        if theirs is not None and mine.value:
            lines = count(theirs.read_text())
            note = f"{lines} lines in torchtitan's models/{TITAN[name]}"
            report.add(row(f"{name}: ours over torchtitan's", mine.value / lines, None, note))
    report.finish(given.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
