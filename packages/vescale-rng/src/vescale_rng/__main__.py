"""Command line: `python -m vescale_rng plugins` lists the installed plugins, `doctor` tests this machine's torch."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version

from ._plugins import OFF, PROJECT, PluginError, describe, switched_off

DISTRIBUTION = "vescale-rng"


def list_plugins() -> str:
    """Return a table of the plugins: name, distribution, version, and the hooks that they serve here."""
    rows = [("plugin", "distribution", "version", f"hooks of {PROJECT}")]
    rows += [(p.name, p.distribution, p.version, ", ".join(p.hooks) or "-") for p in describe()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"switched off by {OFF}: {', '.join(sorted(switched_off())) or 'none'}")
    return "\n".join(line.rstrip() for line in lines)


def examine(*, as_json: bool) -> int:
    """Print the doctor's report; the exit status is 1 if anything is not as the model says."""
    from ._doctor import doctor  # torch is slow to import, and not needed to list plugins

    report = doctor()
    print(json.dumps(report.to_dict(), indent=2) if as_json else report)
    return 0 if report.ok else 1


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROJECT}", description=__doc__)
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plugins", help="list the installed plugins and the hooks that they serve")
    doctor = commands.add_parser(
        "doctor", help="test this machine's torch, and say what is bitwise here; takes seconds"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    arguments = parser.parse_args(argv)
    if arguments.command == "doctor":
        return examine(as_json=arguments.json)
    try:
        print(list_plugins())
    except PluginError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
