"""The command line: `vescale-ckpt COMMAND`, or `python -m vescale_ckpt COMMAND`.

Each command is imported when it runs, none needs torch.distributed. Exit status: 0 all well, 1 a problem was found,
2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from typing import NoReturn

from .._plugins import PluginError
from ..errors import CheckpointError
from . import compare, exchange, look, plugins, retain
from .arguments import UsageError
from .tables import printable, write_json
from .words import in_options

__all__ = ["main"]

DISTRIBUTION = "vescale-ckpt"


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = argparse.Namespace(parser=None, json="--json" in argv, debug="--debug" in argv)
    try:
        arguments = _parse(argv)
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit:  # help or the version was printed
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has enough of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, PluginError, UsageError, OSError, KeyError, ImportError, ValueError) as error:
        wrong_use = isinstance(error, UsageError)
        if arguments.debug and not wrong_use:
            raise
        text = in_options(str(error.args[0] if isinstance(error, KeyError) and error.args else error))
        if arguments.json:
            write_json({"error": text or type(error).__name__})
        parser = getattr(error, "parser", None) or arguments.parser
        if wrong_use and parser is not None:
            sys.stderr.write(parser.format_usage())
        lines = text.splitlines() or [type(error).__name__]
        sys.stderr.write("".join(f"{printable(line)}\n" for line in (f"{DISTRIBUTION}: {lines[0]}", *lines[1:])))
        return 2 if wrong_use else 1


class _Parser(argparse.ArgumentParser):
    """Raises what is wrong, so that it is told in one place; knows the usage of the command."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(message, self)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Return the arguments; argparse alone would blame the program for what only a command can know."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        hint = " (options come after the command)" if argv[0] in unknown else ""
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{hint}", arguments.parser)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=DISTRIBUTION, description="Look at, check, convert and tidy up checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (look, compare, exchange, retain, plugins):
        module.register(commands)
    return parser
