"""`plugins`: the installed plugins and the hooks that they serve here."""

from __future__ import annotations

import argparse
from typing import Any

from .._plugins import OFF, PROJECT, describe, switched_off
from .arguments import add_common
from .tables import table, write, write_json

__all__ = ["register"]


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("plugins", help="list the installed plugins and the hooks that they serve")
    parser.set_defaults(run=run)
    add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    """List the plugins: name, distribution, version, hooks."""
    found = describe()
    off = sorted(switched_off())
    if arguments.json:
        write_json({"plugins": found, "switched_off": off})
        return 0
    rows = [[p.name, p.distribution, p.version, ", ".join(p.hooks) or "-"] for p in found]
    write(table(["plugin", "distribution", "version", f"hooks of {PROJECT}"], rows))
    write(f"switched off by {OFF}: {', '.join(off) or 'none'}")
    return 0
