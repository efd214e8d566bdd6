"""Choosing and renaming keys, and telling which keys were probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from .._words import near

__all__ = ["Keys", "Rename", "asked", "chooser", "hints", "leave_out", "renamer"]

Keys: TypeAlias = "str | Iterable[str] | Callable[[str], bool] | None"
Rename: TypeAlias = "Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str] | None"
PREFIXES = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What wrappers put into names."""


def chooser(keys: Keys) -> Callable[[str], bool]:
    """Return a function that tells whether a name is wanted.

    Args:
        keys: pattern or patterns such as "model.*", where "model" means also all that is below it; a function, or None
            for all.

    Example:
        >>> list(map(chooser(["model", "step"]), ["model.w", "step", "steps"]))
        [True, True, False]
    """
    if keys is None:
        return lambda _: True
    if callable(keys):
        return keys
    patterns = [keys] if isinstance(keys, str) else list(keys) if isinstance(keys, Iterable) else [keys]
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f'keys: expected patterns such as "model.*", a function, or None, but got {keys!r}.')
    patterns += [f"{pattern}.*" for pattern in patterns]  # what is below
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def asked(keys: Keys, names: Sequence[str]) -> str:
    """Return in words what a caller asked for that is the name of nothing, and what was probably meant.

    Args:
        keys: what was given.
        names: those that there are.

    Example:
        >>> asked("modle.*", ["model.w", "model.b"])
        "by 'modle.*'; near are model"
    """
    if callable(keys) or keys is None:
        return f"by the function; there are {', '.join(names[:5]) or 'none'}"
    patterns = [keys] if isinstance(keys, str) else list(keys)
    found = near(patterns, names)
    hint = f"near are {', '.join(found)}" if found else f"there are {', '.join(names[:5]) or 'none'}"
    return f"by {', '.join(map(repr, patterns[:5])) or 'an empty list'}; {hint}"


def leave_out(problems: Sequence[str], known: Collection[str], *, strict: bool) -> list[str]:
    """Return a line with the arguments that load all but what does not fit; none where no arguments help.

    Args:
        problems: lines that begin with a name and a colon, on things that are there on both sides.
        known: names that `keys` can choose.
        strict: whether nothing else is wrong.

    Example:
        >>> leave_out(["w: shape [2], in the checkpoint [3]"], ["w", "b"], strict=False)
        ["to load the rest, leave out what does not fit: keys=lambda name: name not in ['w'], strict=False"]
    """
    # Some lines say themselves what to pass.
    others = [problem for problem in problems if "; pass " not in problem and "keys=" not in problem]
    names = list(dict.fromkeys(problem.partition(": ")[0] for problem in others))
    if not names or len(names) > 8 or not all(name in known for name in names) or len(names) == len(known):
        return []
    also = "" if strict else ", strict=False"
    return [f"to load the rest, leave out what does not fit: keys=lambda name: name not in {names}{also}"]


def renamer(rename: Rename) -> Callable[[str], str]:
    r"""Return a function from a name of the state to that of the checkpoint.

    Args:
        rename: a mapping of names (others stay), a list of (regular expression, replacement), a function, or None.

    Raises:
        ValueError: something else, or what is no regular expression.

    Example:
        >>> renamer([(r"^net\.", "model.")])("net.w"), renamer({"a": "b"})("c")
        ('model.w', 'c')
    """
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    if isinstance(rename, Mapping):
        table = dict(rename)
        return lambda name: table.get(name, name)
    try:
        rules = [(re.compile(pattern), new) for pattern, new in rename]
    except (TypeError, ValueError, re.error) as error:
        raise ValueError(
            f"rename: expected a mapping of names, a list of (regular expression, replacement), or a function, but "
            f"got {rename!r:.200}: {error}."
        ) from None

    def apply(name: str) -> str:
        for pattern, new in rules:
            name = pattern.sub(new, name)
        return name

    return apply


def hints(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    r"""Return lines that say what was probably meant where names of the state and of the checkpoint differ.

    Example:
        >>> hints(["model._orig_mod.w"], ["model.w"])
        ['the names differ by "_orig_mod.", which a wrapper adds: pass rename=[(r"_orig_mod\\.", "")]']
    """
    there = set(unexpected)
    for prefix in PREFIXES:
        if missing and any(prefix in name and name.replace(prefix, "") in there for name in missing):
            pattern = re.escape(prefix)
            return [f'the names differ by "{prefix}", which a wrapper adds: pass rename=[(r"{pattern}", "")]']
        if missing and any(prefix in name and name.replace(prefix, "") in set(missing) for name in unexpected):
            heads = {name.partition(prefix)[0] for name in unexpected if name.replace(prefix, "") in set(missing)}
            head = heads.pop() if len(heads) == 1 else None
            if head is not None and all(f"{head}{prefix}{name.removeprefix(head)}" in there for name in missing):
                added = f'[(r"^{re.escape(head)}", "{head}{prefix}")]'
                return [f'the names of the checkpoint have "{prefix}" in them: pass rename={added}']
            return [f'the names of the checkpoint have "{prefix}" in them: pass rename=lambda name: ... that adds it']
    lines = []
    for name in missing[:5]:
        like = difflib.get_close_matches(name, unexpected, 1, 0.75)
        if like:
            lines.append(f"{name} may be {like[0]} of the checkpoint: pass rename={{{name!r}: {like[0]!r}}}")
    return lines
