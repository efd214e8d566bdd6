"""What a pipeline costs: vescale_pipe beside torch.distributed.pipelining; bubbles, the simulator, spans.

    python benchmarks/pipe.py --json rows.json
    python benchmarks/pipe.py runtime --rounds 20 --ranks 2

Both runtimes run the same model, schedule and micro-batches in the same processes, in random order.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from _pipe import planning
from _pipe.makespan import makespan
from _pipe.runtime import runtime
from _timing import Report, parser

PARTS = ("bubbles", "simulator", "spans", "split", "makespan", "runtime")


def main() -> None:
    """Run the parts that are named, or all."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    arguments.add_argument("--rounds", type=int, default=15, help="steps of each kind, 15 by default")
    arguments.add_argument("--ranks", type=int, default=2, help="of the pipeline, 2 by default")
    args = arguments.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    report = Report("pipelines")
    for part in args.parts or PARTS:
        if part == "bubbles":
            planning.bubbles(report)
        elif part == "simulator":
            planning.simulator(report)
        elif part == "spans":
            planning.spans(report)
        elif part == "split":
            planning.split_backward(report, args.rounds)
        elif part == "makespan":
            with tempfile.TemporaryDirectory(prefix="bench-pipe-") as folder:
                makespan(report, min(args.rounds, 3), Path(folder))
        else:
            with tempfile.TemporaryDirectory(prefix="bench-pipe-") as folder:
                runtime(report, args.rounds, args.ranks, Path(folder))
    report.finish(args.json)


if __name__ == "__main__":
    main()
