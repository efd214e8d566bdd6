"""Coverage of torch's operators: every OpInfo of torch.testing, with random placements, against one device.

    python benchmarks/op_coverage.py --json function.json
    python benchmarks/op_coverage.py --form out --json out.json
    python benchmarks/op_coverage.py --show function.json out.json --markdown docs/op_coverage.md

A sample counts as passed if its result and gradients under random placements equal one device's, as
distributed if it also runs without gathering when its data are sharded along one dim, and as refused
if it raised one of this project's errors. `--sample N` takes every N-th operator. With `--show` nothing runs: runs
that `--json` kept are put into one document, with the families and operators of the first.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from vescale_testing.opinfo import FORMS, OpRow, families, op_names, run_opinfo

_BATCH = 24


def main() -> None:
    """Run the operators, or show runs, and write what was asked for."""
    options = _options()
    if options.show:
        runs = [_read(path) for path in options.show]
    else:
        runs = [_run(options)]
    for title, rows in runs:
        report(title, rows)
    if options.json:
        title, rows = runs[0]
        options.json.write_text(json.dumps(summary_rows(title, rows) + [asdict(r) for r in rows], indent=1))
    if options.markdown:
        options.markdown.write_text(markdown(runs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--show", type=Path, nargs="+", metavar="JSON", help="show these runs instead of running")
    parser.add_argument("--form", choices=FORMS, default="function")
    parser.add_argument("--mesh", default="2,2", help="shape of the mesh, for example 4 or 2,2")
    parser.add_argument("--samples", type=int, default=4, help="samples per operator")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="take every N-th operator")
    parser.add_argument("--only", nargs="*", help="names of operators")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> tuple[str, list[OpRow]]:
    mesh = tuple(map(int, options.mesh.split(",")))
    names = options.only or op_names()[:: options.sample]
    print(f"{len(names)} operators on {math.prod(mesh)} ranks; all of torch's take some minutes", flush=True)
    start, rows = time.perf_counter(), []
    for first in range(0, len(names), _BATCH):
        part = names[first : first + _BATCH]
        rows += run_opinfo(part, world=math.prod(mesh), mesh=mesh, samples=options.samples, form=options.form)
        print(f"{len(rows)} done after {time.perf_counter() - start:.0f} s", flush=True)
    return f"{options.form} form, mesh ({options.mesh}), up to {options.samples} samples", rows


def _read(path: Path) -> tuple[str, list[OpRow]]:
    rows = json.loads(path.read_text())
    title = next(r["value"] for r in rows if r["name"] == "run")
    names = [f.name for f in fields(OpRow)]
    return title, [OpRow(**{n: r[n] for n in names}) for r in rows if "passed" in r]


def report(title: str, rows: Sequence[OpRow]) -> None:
    """Print what did not pass, and the totals."""
    for row in rows:
        if row.status in ("wrong", "failed", "refused"):
            print(f"{row.status:8s} {row.name:44s} {row.messages[:1]}")
    for row in summary_rows(title, rows):
        print(f"{row['name']:32s} {row['value']}")


def summary_rows(title: str, rows: Sequence[OpRow]) -> list[dict[str, object]]:
    """Totals, as benchmark rows."""
    count, total, distributed = _counts(rows)
    return [
        {"name": "run", "value": title, "goal": None, "ok": True},
        {"name": "operators run", "value": total, "goal": None, "ok": True},
        {"name": "operators passed", "value": count["passed"], "goal": None, "ok": True},
        {"name": "operators refused clearly", "value": count["refused"], "goal": None, "ok": True},
        {"name": "operators failed", "value": count["failed"], "goal": 0, "ok": count["failed"] == 0},
        {"name": "operators wrong", "value": count["wrong"], "goal": 0, "ok": count["wrong"] == 0},
        {"name": "operators that ran distributed", "value": distributed, "goal": None, "ok": True},
        {"name": "samples passed", "value": sum(r.passed for r in rows), "goal": None, "ok": True},
        {"name": "samples distributed", "value": sum(r.distributed for r in rows), "goal": None, "ok": True},
    ]


def _counts(rows: Sequence[OpRow]) -> tuple[Counter[str], int, int]:
    """Rows by status, rows that ran, rows that ran distributed."""
    count = Counter(r.status for r in rows)
    return count, len(rows) - count["skipped"], sum(r.distributed > 0 for r in rows)


def _table(first: str, groups: dict[str, list[OpRow]]) -> list[str]:
    lines = [
        f"| {first} | operators | passed | refused | failed | wrong | distributed | | samples passed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, rows in groups.items():
        count, total, distributed = _counts(rows)
        found = [total, *(count[s] for s in ("passed", "refused", "failed", "wrong")), distributed]
        share = f"{distributed / total:.0%}" if total else ""
        lines.append(f"| {name} | {' | '.join(map(str, found))} | {share} | {sum(r.passed for r in rows)} |")
    return lines


def _by_family(rows: Sequence[OpRow]) -> dict[str, list[OpRow]]:
    family_of = families()
    groups: dict[str, list[OpRow]] = {}
    for row in rows:
        if row.status != "skipped":
            groups.setdefault(family_of[row.name], []).append(row)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1]))) | {"all": list(rows)}


def markdown(runs: Sequence[tuple[str, list[OpRow]]]) -> str:
    """The tables of docs/op_coverage.md: families and operators of the first run, a line per run."""
    title, rows = runs[0]
    ran = [r for r in rows if r.status != "skipped"]
    lines = [
        "# Operator coverage",
        "",
        "By `benchmarks/op_coverage.py`: OpInfo samples of torch.testing with random placements (S, replicated, "
        "varying, partial) per mesh axis, float64, results and gradients against one device. "
        "*distributed*: runs with one dim of its data (first the batch dim) sharded, and nothing is gathered. "
        "*refused*: one of this project's errors, which say what to do. The targets of `out=` are replicated, so "
        "results that are sharded are gathered into them.",
        "",
        f"## Families ({title})",
        "",
        *_table("family", _by_family(rows)),
        "",
        "## Runs",
        "",
        *_table("run", dict(runs)),
        "",
        "## Refused",
        "",
        *[f"- `{r.name}`: {r.messages[0].partition(': ')[2]}" for r in ran if r.refused],
        "",
        f"## Operators ({title}), in samples",
        "",
        "| operator | status | passed | distributed | refused | failed | wrong |",
        "|---|---|--:|--:|--:|--:|--:|",
        *[
            f"| {r.name} | {r.status} | {r.passed} | {r.distributed} | {r.refused} | {r.failed} | {r.wrong} |"
            for r in ran
        ],
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
