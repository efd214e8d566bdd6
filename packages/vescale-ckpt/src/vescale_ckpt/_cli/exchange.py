"""`export` and `import`: other formats."""

from __future__ import annotations

import argparse
import os
from typing import Any

from .._format.paths import MARKER
from ..errors import CheckpointError
from .arguments import UsageError, add_common, one_step, opened, split_path, store_at
from .progress import Bar
from .tables import count, printable, size, write, write_json

__all__ = ["register"]

PROGRAM = "vescale-ckpt"
FORMATS = ("safetensors", "hf", "torch", "dcp")
HINT = "of safetensors and hf only"


def register(commands: Any) -> None:
    """Add the commands."""
    out = commands.add_parser(
        "export", help="write a step for Hugging Face, torch.load or torch.distributed.checkpoint"
    )
    out.add_argument("path", help="folder or URL, with @STEP for another than the latest")
    out.add_argument("out", help="a file, or a folder for shards and for dcp")
    out.add_argument("--format", choices=FORMATS, required=True, help="hf: tied tensors once, without `model.`")
    _add_choice(out)
    out.add_argument("--dtype", metavar="NAME", help="convert floating point tensors, e.g. to bfloat16")
    out.add_argument("--prefix", metavar="TEXT", help=f"only names that begin so, without it; {HINT}")
    out.add_argument("--max-shard-bytes", metavar="SIZE", help=f"of a file in a folder (5GB); {HINT}")
    out.add_argument("--no-verify", action="store_true", help="do not compare checksums")
    out.set_defaults(run=run_export)
    add_common(out)
    into = commands.add_parser("import", help="save files of another format as a step; no pickle is run")
    into.add_argument("src", help="a .safetensors file, an index, a file of torch.save, or a folder")
    into.add_argument("path", help="folder or URL to save to, with @STEP for another number than the next one")
    into.add_argument("--format", choices=FORMATS, help="else it is told by what is there")
    _add_choice(into)
    into.add_argument("--under", metavar="KEY", help="put all into a dict of this key, e.g. model")
    into.add_argument("--compress", metavar="CODEC", help="auto, or the name of a codec; else nothing is compressed")
    into.set_defaults(run=run_import)
    add_common(into)


def _add_choice(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keys", action="append", metavar="PATTERN", help="only these, e.g. 'model.*'; can be repeated"
    )
    command.add_argument(
        "--rename", action="append", metavar="REGEX=TEXT", help=f"in names; repeatable; {HINT}", default=[]
    )
    command.add_argument("--overwrite", action="store_true", help="replace what is there")


def run_export(arguments: argparse.Namespace) -> int:
    """Export a step."""
    from .._interop import export

    path, step = one_step(arguments.path)
    options = {"dtype": arguments.dtype}
    options |= _of_safetensors(arguments, ("prefix", "max_shard_bytes"))
    with Bar("export") as bar:
        report = _checked(
            export,
            store_at(path),
            arguments.out,
            arguments.format,
            step=step,
            keys=arguments.keys,
            overwrite=arguments.overwrite,
            verify=not arguments.no_verify,
            progress=bar,
            **options,
        )
    if arguments.json:
        write_json(report)
        return 0
    write(f"step {report.step}: {count(report.tensors, 'tensor')}, {size(report.bytes)} -> {printable(report.out)}")
    for left_out, kept in (report.tied or {}).items():
        write(f"left out, the same tensor as {printable(kept)}: {printable(left_out)}")
    if report.skipped:
        write(f"left out, no tensors: {printable(', '.join(report.skipped))}")
    return 0


def run_import(arguments: argparse.Namespace) -> int:
    """Import files as a step."""
    from .._interop import detect, import_

    path, step = split_path(arguments.path)
    if isinstance(step, str):
        raise UsageError(f"{arguments.path}: give the number of the step that is to be made, or none.")
    _refuse_store(arguments.src)
    if arguments.format is None:
        arguments.format = detect(arguments.src)
    with Bar("import") as bar:
        report = _checked(
            import_,
            arguments.src,
            opened(path),
            arguments.format,
            step=step,
            keys=arguments.keys,
            under=arguments.under,
            compress=arguments.compress,
            overwrite=arguments.overwrite,
            progress=bar,
            **_of_safetensors(arguments, ()),
        )
    if arguments.json:
        write_json(report)
        return 0
    what = f"{count(report.tensors, 'tensor')}, {count(report.values, 'other value')}, {size(report.bytes)}"
    write(f"{report.format} -> step {report.info.step}: {what}")
    return 0


def _refuse_store(src: str) -> None:
    """Raise CheckpointError for a store of this package, with or without @STEP."""
    folder = split_path(src)[0]
    if os.path.isfile(os.path.join(folder, MARKER)):
        raise CheckpointError(
            f"src: {folder} is a store of {PROGRAM} already, so there is nothing to import: `{PROGRAM} ls {folder}` "
            f"lists its steps, `{PROGRAM} export` writes one in another format."
        )


def _of_safetensors(arguments: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the options that only safetensors has, of those that were given."""
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    if arguments.rename:
        given["rename"] = [_rule(text) for text in arguments.rename]
    if given and arguments.format not in ("safetensors", "hf"):
        option = next(iter(given)).replace("_", "-")
        raise UsageError(f"--{option}: {arguments.format} does not have it; it is {HINT}.")
    return given


def _rule(text: str) -> tuple[str, str]:
    """Return what `REGEX=TEXT` says."""
    pattern, equals, replacement = text.partition("=")
    if not pattern or not equals:
        raise UsageError(f"--rename {text}: expected REGEX=TEXT.")
    return pattern, replacement


def _checked(function: Any, *values: Any, **options: Any) -> Any:
    """Call a function whose ValueErrors tell of wrong options."""
    try:
        return function(*values, **options)
    except ValueError as error:
        if type(error) is not ValueError:  # FormatError and others, which tell of files
            raise
        raise UsageError(str(error)) from error
