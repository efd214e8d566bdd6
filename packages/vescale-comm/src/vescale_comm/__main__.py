"""Command line: `python -m vescale_comm plugins`, `plan` and `predict`."""

from __future__ import annotations

import argparse
import sys

from ._plan.command import add_plan
from ._plugins import OFF, PROJECT, PluginError, describe, switched_off
from ._report.command import add_predict


def list_plugins() -> str:
    """Return a table of the plugins: name, distribution, version, and the hooks that they serve here."""
    rows = [("plugin", "distribution", "version", f"hooks of {PROJECT}")]
    rows += [(p.name, p.distribution, p.version, ", ".join(p.hooks) or "-") for p in describe()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"switched off by {OFF}: {', '.join(sorted(switched_off())) or 'none'}")
    return "\n".join(line.rstrip() for line in lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROJECT}", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="list the installed plugins and the hooks that they serve")
    add_plan(commands)
    add_predict(commands)
    args = parser.parse_args(argv)
    try:
        print(args.run(args) if "run" in args else list_plugins())
    except (PluginError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
