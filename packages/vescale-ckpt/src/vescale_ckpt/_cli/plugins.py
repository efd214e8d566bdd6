"""`plugins`: the installed plugins and the hooks that they serve here."""

from __future__ import annotations

import argparse
from importlib.metadata import entry_points
from typing import Any

from .._plugins import GROUP, OFF, PROJECT, PluginError, describe, switched_off
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
    off = sorted(switched_off())
    try:
        found = describe()
    except PluginError:
        if not arguments.json:
            _write([(*row, "not looked at") for row in _installed() if not {row[0], "all"} & set(off)], off)
        raise
    if arguments.json:
        write_json({"plugins": found, "switched_off": off})
        return 0
    _write([(p.name, p.distribution, p.version, ", ".join(p.hooks) or "-") for p in found], off)
    return 0


def _write(rows: list[tuple[str, str, str, str]], off: list[str]) -> None:
    write(table(["plugin", "distribution", "version", f"hooks of {PROJECT}"], rows))
    write(f"switched off by {OFF}: {', '.join(off) or 'none'}")


def _installed() -> list[tuple[str, str, str]]:
    """Return what is installed, without loading it, which one of them does not take."""
    found = ((entry.name, entry.dist) for entry in entry_points(group=GROUP))
    return sorted((name, dist.name, dist.version) if dist else (name, "?", "?") for name, dist in found)
