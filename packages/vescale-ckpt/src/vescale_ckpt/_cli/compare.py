"""`verify` and `diff`: is everything as it was saved, and what differs between two steps."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import PATH_HELP, UsageError, add_common, add_path, chosen, one_step, split_path, store_at
from .progress import Bar
from .tables import count, number, printable, size, table, write, write_json

__all__ = ["register"]


def register(commands: Any) -> None:
    """Add the commands."""
    verify = commands.add_parser(
        "verify",
        help="compare every byte of the latest step (--all: of all) with its checksum; status 1 if damaged",
    )
    add_path(verify, f"{PATH_HELP}, or @all")
    verify.add_argument("--all", action="store_true", help="look at all steps, not at the latest or given one only")
    verify.add_argument("--threads", type=int, default=2, help="that read and decode (default 2)")
    verify.set_defaults(run=run_verify)
    add_common(verify)
    diff = commands.add_parser("diff", help="compare two steps tensor by tensor; status 1 if they differ")
    diff.add_argument("a", help="folder or URL, with @STEP for another than the latest")
    diff.add_argument("b", help="likewise")
    diff.add_argument("--read", action="store_true", help="read also what is known to be equal by its checksums")
    diff.add_argument("--equal", action="store_true", help="list also what is equal")
    diff.set_defaults(run=run_diff)
    add_common(diff)


def run_verify(arguments: argparse.Namespace) -> int:
    """Verify a step, or all."""
    from .._ops import verify

    path, step = split_path(chosen(arguments.path, arguments.step))
    if arguments.threads < 1:
        raise UsageError(f"--threads: expected at least 1, but got {arguments.threads}.")
    if arguments.all:
        if step not in (None, "all"):
            raise UsageError(f"--all: {arguments.path} names one step already.")
        step = "all"
    with Bar("verify") as bar:
        report = verify(store_at(path), step, threads=arguments.threads, progress=bar)
    if arguments.json:
        write_json({"ok": report.ok, "damaged_tensors": report.tensors, "report": report})
        return 0 if report.ok else 1
    for entry in report.steps:
        what = f"{count(entry.tensors, 'tensor')}, {count(entry.chunks, 'chunk')}, {size(entry.bytes)}"
        write(f"step {entry.step}: {'ok' if entry.ok else count(len(entry.problems), 'problem')} ({what})")
        for finding in entry.problems:
            write(f"  {printable(finding.text)}")
    for finding in report.others:
        write(f"{printable(str(finding))}")
    if report.tensors:
        write(f"damaged tensors: {printable(', '.join(report.tensors))}")
    return 0 if report.ok else 1


def run_diff(arguments: argparse.Namespace) -> int:
    """Compare two steps."""
    from .._ops import diff

    (a, first), (b, second) = one_step(arguments.a), one_step(arguments.b)
    with Bar("diff") as bar:
        report = diff((store_at(a), first), (store_at(b), second), read=arguments.read, progress=bar)
    if arguments.json:
        write_json({"equal": report.equal, "report": report})
        return 0 if report.equal else 1
    rows = [
        [
            entry.name,
            entry.kind,
            entry.a,
            entry.b,
            f"{entry.different} of {entry.elements}" if entry.kind == "changed" else "",
            number(entry.max_abs) if entry.kind == "changed" else "",
            number(entry.mean_abs) if entry.kind == "changed" else "",
        ]
        for entry in report.tensors
        if arguments.equal or entry.kind != "equal"
    ]
    if rows:
        head = ["tensor", "result", "a", "b", "elements", "max", "mean"]
        write(table(head, rows, "elements max mean"))
    values = [
        [entry.name, entry.kind, _short(entry.a), _short(entry.b)]
        for entry in report.values
        if arguments.equal or entry.kind != "equal"
    ]
    if values:
        write(table(["value", "result", "a", "b"], values))
    for note in report.notes:
        write(note)
    equal = sum(entry.kind == "equal" for entry in report.tensors)
    unread = sum(entry.kind == "equal" and not entry.read for entry in report.tensors)
    unequal = len(report.changes)
    write("equal" if report.equal else f"{count(unequal, 'difference')}")
    write(
        f"{equal} of {count(len(report.tensors), 'tensor')} equal, {unread} of them by their checksums, unread; "
        f"{count(len(report.values), 'value')} compared"
    )
    return 0 if report.equal else 1


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
