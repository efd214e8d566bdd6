"""What recorded programs cost: beside programs written by hand, the dynamic path, torch's DTensor and torchtitan.

    python benchmarks/static_eager.py --json rows.json
    python benchmarks/static_eager.py --part ranks --seconds 4 --json rows.json
    python benchmarks/static_eager.py --part fake --quick
    pip install --no-deps --target /tmp/titan torchtitan==0.2.2
    python benchmarks/static_eager.py --part torchtitan --torchtitan /tmp/titan --json rows.json

A step is forward, loss, backward, the sum of gradients, and their dropping. `fake` runs on one rank of a group whose
collectives cost their call only, as does `compile`; the others on gloo ranks of their own. Each part can run by
itself: with --json its rows take the place of its old ones in the file, and others stay.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from _static.alone import fake
from _static.compiled import compiled
from _static.memory import memory
from _static.ranks import quiet, ranks
from _static.titan import torchtitan
from _timing import Report, parser

PARTS = ("fake", "ranks", "memory", "torchtitan", "compile")


def keep(path: Path, part: str, report: Report, first: int) -> None:
    """Put the rows of a part, which begin with its name, in the place of those that a file has."""
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [r for r in old if not r["name"].startswith(f"{part}, ")]
    path.write_text(json.dumps(kept + [asdict(r) for r in report.rows[first:]], indent=1) + "\n")


def main() -> None:
    """Run all parts, or those that are named."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--part", choices=PARTS, action="append", help="all by default")
    arguments.add_argument("--seconds", type=float, default=8.0, help="per model and mesh, 8 by default")
    arguments.add_argument("--quick", action="store_true", help="only the smallest models")
    arguments.add_argument("--torchtitan", type=Path, metavar="FOLDER", help="where torchtitan 0.2.2 was installed")
    args = arguments.parse_args()
    quiet()
    report = Report(f"static eager, torch {torch.__version__}, one thread")
    functions = (fake, ranks, memory, partial(torchtitan, args.torchtitan), compiled)
    for name, part in zip(PARTS, functions, strict=True):
        if args.part and name not in args.part:
            continue
        first = len(report.rows)
        part(report, args.seconds, args.quick)
        if args.json is not None:
            keep(args.json, name, report, first)
    report.finish(None)


if __name__ == "__main__":
    main()
