"""`gc`, `pin` and `unpin`: which steps stay."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .arguments import UsageError, add_common, add_path, chosen, one_step, store_at
from .tables import count, printable, size, write, write_json

__all__ = ["register"]


def register(commands: Any) -> None:
    """Add the commands."""
    gc = commands.add_parser("gc", help="remove what no step needs, and steps beyond those to keep")
    gc.add_argument("path", help="folder or URL")
    gc.add_argument("--dry-run", action="store_true", help="remove nothing, only tell what would be")
    gc.add_argument("--keep-last", type=int, metavar="N", help="keep the newest N steps; without any --keep all stay")
    gc.add_argument("--keep-every", type=int, metavar="K", help="keep steps whose number is a multiple of K")
    gc.add_argument("--keep-best", metavar="NAME:min|max[:N]", help="keep the N best by a number in the metadata")
    gc.add_argument("--keep-hours", type=float, metavar="H", help="keep steps that were saved in the last H hours")
    gc.add_argument(
        "--grace", type=float, default=3600.0, metavar="S", help="leave unfinished saves alone for S seconds (3600)"
    )
    gc.add_argument("--break-leases", action="store_true", help="take unfinished saves for dead: only if none runs")
    gc.set_defaults(run=run_gc)
    add_common(gc)
    for name, help_text in (("pin", "keep a step whatever gc is told"), ("unpin", "let gc remove a step again")):
        command = commands.add_parser(name, help=help_text)
        add_path(command)
        command.set_defaults(run=run_pin)
        add_common(command)


def run_gc(arguments: argparse.Namespace) -> int:
    """Collect garbage; the status is 1 if damage kept it from removing more."""
    from .._ops import Keep, gc
    from .._ops.leases import lease_text

    best = _best(arguments.keep_best) if arguments.keep_best is not None else None
    rules = (arguments.keep_last, arguments.keep_every, best, arguments.keep_hours)
    keep = None
    try:
        if any(rule is not None for rule in rules):
            last = 1 if arguments.keep_last is None else arguments.keep_last
            keep = Keep(last=last, every=arguments.keep_every, best=best, hours=arguments.keep_hours)
        if not arguments.grace >= 0:
            raise ValueError(f"grace: expected seconds, at least 0, but got {arguments.grace}.")
    except ValueError as error:
        raise UsageError(str(error)) from None
    report = gc(
        store_at(arguments.path),
        keep=keep,
        dry_run=arguments.dry_run,
        grace=arguments.grace,
        break_leases=arguments.break_leases,
    )
    if arguments.json:
        write_json(report)
        return 1 if report.problems else 0
    verb = "would remove" if report.dry_run else "removed"
    write(f"{verb} {count(report.files, 'file')}, {size(report.bytes)}")
    if report.steps:
        write(f"{verb} {count(len(report.steps), 'step')}: {', '.join(map(str, report.steps))}")
    if report.unfinished:
        write(f"{verb} {count(len(report.unfinished), 'unfinished save')}: {', '.join(report.unfinished)}")
    if report.retained_bytes:
        write(f"{size(report.retained_bytes)} of removed steps stay, since later steps refer to them")
    for folder in report.running:
        told = lease_text(report.leases.get(folder), time.time())
        write(f"left alone, being saved, or a save that has died: {folder}: {told}")
    write(f"{count(len(report.kept), 'step')} stay: {', '.join(map(str, report.kept)) or 'none'}")
    for problem in report.problems:
        write(printable(problem))
    return 1 if report.problems else 0


def run_pin(arguments: argparse.Namespace) -> int:
    """Pin or unpin a step."""
    from .._ops import pin, unpin

    path, step = one_step(chosen(arguments.path, arguments.step))
    done = (pin if arguments.command == "pin" else unpin)(store_at(path), step)
    if arguments.json:
        write_json({"step": done, "pinned": arguments.command == "pin"})
    else:
        write(f"step {done} is {'pinned' if arguments.command == 'pin' else 'not pinned'}")
    return 0


def _best(text: str) -> tuple[str, str, int]:
    """Return what `NAME:min|max[:N]` says."""
    name, _, rest = text.partition(":")
    sign, _, number = rest.partition(":")
    if not name or sign not in ("min", "max") or not (number.isdecimal() or not number):
        raise UsageError(f"--keep-best {text}: expected NAME:min or NAME:max, and perhaps :N.")
    return name, sign, int(number or 1)
