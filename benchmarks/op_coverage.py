"""Coverage of torch's operators: every OpInfo of torch.testing, with random placements, against one device.

    python benchmarks/op_coverage.py --json coverage.json --markdown docs/op_coverage.md

A sample counts as passed if its result and gradients under random placements equal one device's, as
distributed if it also runs without gathering when its data are sharded along one dim, and as refused
if it raised one of this project's errors. `--sample N` takes every N-th operator.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from vescale_testing.opinfo import FORMS, OpRow, op_names, run_opinfo


def main() -> None:
    """Run the operators and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--form", choices=FORMS, default="function")
    parser.add_argument("--mesh", default="2,2", help="shape of the mesh, for example 4 or 2,2")
    parser.add_argument("--samples", type=int, default=4, help="samples per operator")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="take every N-th operator")
    parser.add_argument("--only", nargs="*", help="names of operators")
    options = parser.parse_args()
    mesh = tuple(map(int, options.mesh.split(",")))
    world = 1
    for size in mesh:
        world *= size
    names = options.only or op_names()[:: options.sample]
    print(f"{len(names)} operators on {world} ranks; all of torch's take some minutes", flush=True)
    start = time.perf_counter()
    rows = run_opinfo(names, world=world, mesh=mesh, samples=options.samples, form=options.form)
    report(rows, time.perf_counter() - start)
    if options.json:
        options.json.write_text(
            json.dumps(summary_rows(rows) + [{"name": r.name, **asdict(r)} for r in rows], indent=1)
        )
    if options.markdown:
        options.markdown.write_text(markdown(rows, options.form, mesh))


def report(rows: list[OpRow], seconds: float) -> None:
    """Print what did not pass, and the totals."""
    for row in rows:
        if row.status in ("wrong", "failed", "refused"):
            print(f"{row.status:8s} {row.name:44s} {row.messages[:1]}")
    for row in summary_rows(rows):
        print(f"{row['name']:32s} {row['value']}")
    print(f"{seconds:.0f} s")


def summary_rows(rows: list[OpRow]) -> list[dict[str, object]]:
    """Totals, as benchmark rows."""
    count = Counter(r.status for r in rows)
    run = [r for r in rows if r.status != "skipped"]
    distributed = sum(r.distributed > 0 for r in run)
    return [
        {"name": "operators run", "value": len(run), "goal": None, "ok": True},
        {"name": "operators passed", "value": count["passed"], "goal": None, "ok": True},
        {"name": "operators refused clearly", "value": count["refused"], "goal": None, "ok": True},
        {"name": "operators failed", "value": count["failed"], "goal": 0, "ok": count["failed"] == 0},
        {"name": "operators wrong", "value": count["wrong"], "goal": 0, "ok": count["wrong"] == 0},
        {"name": "operators that ran distributed", "value": distributed, "goal": None, "ok": True},
        {"name": "samples passed", "value": sum(r.passed for r in rows), "goal": None, "ok": True},
        {"name": "samples distributed", "value": sum(r.distributed for r in rows), "goal": None, "ok": True},
    ]


def markdown(rows: list[OpRow], form: str, mesh: tuple[int, ...]) -> str:
    """The table of docs/op_coverage.md."""
    lines = [
        "# Operator coverage",
        "",
        f"`python benchmarks/op_coverage.py --form {form} --mesh {','.join(map(str, mesh))}`: OpInfo samples of "
        "torch.testing with random placements (S, replicated, varying, partial) per mesh axis, float64, results and "
        "gradients against one device.",
        "*distributed*: runs with one dim of its data (first the batch dim) sharded, and nothing is gathered. "
        "*refused*: one of this project's errors, which say what to do.",
        "",
        "| | |",
        "|---|---|",
        *[f"| {r['name']} | {r['value']} |" for r in summary_rows(rows)],
        "",
        "| operator | status | passed | distributed | refused | failed | wrong |",
        "|---|---|---|---|---|---|---|",
        *[
            f"| {r.name} | {r.status} | {r.passed} | {r.distributed} | {r.refused} | {r.failed} | {r.wrong} |"
            for r in rows
            if r.status != "skipped"
        ],
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
