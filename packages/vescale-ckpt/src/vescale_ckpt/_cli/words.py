"""Messages of functions in the words of the command line: options in place of arguments."""

from __future__ import annotations

import re

__all__ = ["in_options"]

NAMES = {name: f"--{name.replace('_', '-')}" for name in (
    "compress", "dtype", "grace", "keys", "max_shard_bytes", "prefix", "rename", "threads", "under",
)} | {"last": "--keep-last", "every": "--keep-every", "best": "--keep-best", "hours": "--keep-hours"}  # fmt: skip

_ARGUMENT = re.compile(rf"^({'|'.join(NAMES)})(?=:)")
_SET = re.compile(r"\b(?:pass )?overwrite=True")
_KEYS = re.compile(r"\bkeys=\.\.\.")


def in_options(text: str) -> str:
    """Return a message with the names of options.

    Example:
        >>> in_options("out: a is there already. Choose another place, or pass overwrite=True.")
        'out: a is there already. Choose another place, or give --overwrite.'
        >>> in_options("max_shard_bytes: expected at least 1 byte")
        '--max-shard-bytes: expected at least 1 byte'
    """
    text = _ARGUMENT.sub(lambda found: NAMES[found[1]], text)
    return _KEYS.sub("--keys", _SET.sub("give --overwrite", text))
