"""What checkpoints cost: vescale_ckpt beside torch DCP, torch.save, safetensors and torch_checkpointing.

    python benchmarks/ckpt.py --json rows.json
    python benchmarks/ckpt.py saves frozen --size 256MiB --rounds 3 --folder /mnt/disk

All contenders save or load the same state in the same run, in random order, pages warmed before each write; what does
not make its files durable is given the fsync that it lacks. torch_checkpointing is measured where it is installed.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _ckpt import loading, planning, ranks, saving
from _ckpt.measure import Setup
from _ckpt.systems import hush
from _timing import Report, parser

PARTS: dict[str, Callable[[Setup], None]] = {
    "saves": saving.saves,
    "saves_bf16": saving.saves_bf16,
    "frozen": saving.frozen,
    "loads": loading.loads,
    "reshard": ranks.reshard,
    "replicas": ranks.replicas,
    "training": saving.training,
    "snapshot": saving.snapshot,
    "scalars": saving.scalars,
    "balance": planning.balance,
    "planning": planning.planning,
}


def parse_size(text: str) -> int:
    """Read a number of bytes such as 1GiB or 64MiB; at least 16 MiB."""
    found = re.fullmatch(r"(\d+) ?(MiB|GiB)", text)
    if found is None or (size := int(found[1]) << {"MiB": 20, "GiB": 30}[found[2]]) < 16 << 20:
        raise ValueError(f"size: expected at least 16MiB, such as 256MiB or 1GiB, but got {text!r}")
    return size


def main() -> None:
    """Run the parts that are named, or all."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    arguments.add_argument("--size", type=parse_size, default="1GiB", help="size of the state, 1GiB by default")
    arguments.add_argument("--rounds", type=int, default=3, help="how often each thing is measured, 3 by default")
    arguments.add_argument("--folder", type=Path, default=Path.cwd(), help="a folder on the disk to measure")
    arguments.add_argument("--slow", action="store_true", help="DCP's planner at 1,024 ranks too: 3 minutes, 5 GiB")
    args = arguments.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    hush()
    report = Report("checkpoints")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="bench-ckpt-") as folder:
        setup = Setup(report, Path(folder), args.size, args.rounds, args.slow)
        for name in args.parts or PARTS:
            start = time.perf_counter()
            PARTS[name](setup)
            print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)
    report.finish(args.json)


if __name__ == "__main__":
    main()
