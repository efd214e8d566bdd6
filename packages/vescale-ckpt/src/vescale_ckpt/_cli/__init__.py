"""The command line: `vescale-ckpt COMMAND`, or `python -m vescale_ckpt COMMAND`.

Each command is imported when it runs, none needs torch.distributed. Exit status: 0 all well, 1 a problem was found,
2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version

from .._plugins import PluginError
from ..errors import CheckpointError
from . import compare, exchange, look, plugins, retain
from .arguments import UsageError
from .tables import printable

__all__ = ["main"]

DISTRIBUTION = "vescale-ckpt"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else 2
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, PluginError, UsageError, OSError, KeyError, ImportError) as error:
        if arguments.debug:
            raise
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        lines = str(text).splitlines() or [type(error).__name__]
        sys.stderr.write("".join(f"{printable(line)}\n" for line in (f"{DISTRIBUTION}: {lines[0]}", *lines[1:])))
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=DISTRIBUTION, description="Look at, check, convert and tidy up checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (look, compare, exchange, retain, plugins):
        module.register(commands)
    return parser
