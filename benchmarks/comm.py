"""What data parallelism costs: vescale_comm beside torch's DDP, FSDP2 and ZeroRedundancyOptimizer; and its parts.

    python benchmarks/comm.py --json rows.json
    python benchmarks/comm.py training --seconds 60

What is compared runs in the same processes, in turns, step by step.
"""

from __future__ import annotations

import torch
from _comm import collectives, emulated, hooks, mesh, model, padding, training
from _timing import Report, parser

PARTS = ("padding", "collectives", "mesh", "training", "model", "hooks", "emulator")


def main() -> None:
    """Run the parts that are named, or all."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    arguments.add_argument("--rounds", type=int, default=30, help="of each collective, 30 by default")
    arguments.add_argument("--seconds", type=float, default=30.0, help="of training per world and batch, 30 by default")
    args = arguments.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        arguments.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    report = Report("data parallelism")
    for part in args.parts or PARTS:
        if part == "padding":
            report.heading("padding of the plan: our buffers over what they hold, less 1")
            for one in padding.rows():
                report.add(one)
        elif part == "collectives":
            collectives.collectives(report, args.rounds)
        elif part == "mesh":
            mesh.mesh(report, args.rounds)
        elif part == "training":
            training.training(report, args.seconds)
        elif part == "model":
            model.model(report, args.seconds / 2)
        elif part == "hooks":
            hooks.hooks(report)
        else:
            emulated.bits(report)
            emulated.cost(report, args.rounds)
    report.finish(args.json)


if __name__ == "__main__":
    main()
