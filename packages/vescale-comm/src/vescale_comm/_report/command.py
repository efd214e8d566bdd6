"""Command line: `python -m vescale_comm predict MODEL --mesh shard=64 ...`, step time and memory without any ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .costs import MeshCosts
    from .prediction import Prediction

__all__ = ["add_predict"]

COLUMNS = ("mesh", "ranks", "step", "exposed", "sent", "peak memory")


def add_predict(commands: Any) -> None:
    """Add the sub-command to a parser.

    Args:
        commands: what `ArgumentParser.add_subparsers` returned.
    """
    predict = commands.add_parser("predict", help="predict time and memory of a training step on any number of ranks")
    predict.add_argument("model", help="name of a model, or a JSON file: a config, or {unit: {parameter: [size, ...]}}")
    predict.add_argument(
        "--mesh",
        type=_mesh,
        required=True,
        action="append",
        metavar="AXIS=N[,AXIS=N...]",
        help="data parallel axes, outermost first; more of them: a table",
    )
    predict.add_argument("--strategy", choices=("ddp", "zero1", "zero2", "fsdp"), default="fsdp")
    predict.add_argument(
        "--link",
        type=_link,
        action="append",
        default=[],
        metavar="AXIS=SECONDS:BYTES[:ALGORITHM]",
        help="latency of a message and bytes per second along an axis; ring (default), direct or tree",
    )
    predict.add_argument("--costs", type=Path, help="file with what MeshCosts.to_json of a calibration gave")
    predict.add_argument("--compute-seconds", type=float, required=True, help="of forward and backward on one rank")
    predict.add_argument("--update-seconds", type=float, default=0.0, help="of the whole optimizer step on one rank")
    predict.add_argument(
        "--overlap", type=float, help="speed of computing while data move, 0 to 1; else as measured, or 1"
    )
    for name in ("bucket-bytes", "param-bytes", "grad-bytes", "state-bytes", "activation-bytes", "prefetch"):
        predict.add_argument(f"--{name}", type=int, default=None)
    predict.add_argument("--no-reshard", action="store_true", help="keep gathered parameters for the backward")
    predict.set_defaults(run=_predict)


def _mesh(text: str) -> dict[str, int]:
    mesh = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not (name and size.isdigit() and int(size)):
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected sizes of axes, such as shard=64 or replicate=8,shard=64"
            )
        mesh[name] = int(size)
    return mesh


def _link(text: str) -> tuple[str, float, float, str]:
    name, _, numbers = text.partition("=")
    parts = numbers.split(":")
    try:
        return name, float(parts[0]), float(parts[1]), parts[2] if len(parts) > 2 else "ring"
    except (ValueError, IndexError):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected such as shard=5e-6:45e9 or shard=5e-6:45e9:tree"
        ) from None


def _predict(args: argparse.Namespace) -> str:
    from .._plan import MODELS, model_units, read_units
    from .prediction import predict

    units = model_units(args.model) if args.model in MODELS else read_units(Path(args.model))
    names = ("bucket_bytes", "param_bytes", "grad_bytes", "state_bytes", "activation_bytes", "prefetch")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    costs = _costs(args)
    found = [
        predict(
            units,
            mesh,
            args.strategy,
            costs,
            compute_seconds=args.compute_seconds,
            update_seconds=args.update_seconds,
            overlap=args.overlap,
            reshard=not args.no_reshard,
            **options,
        )
        for mesh in args.mesh
    ]
    return found[0].explain() if len(found) == 1 else _table(found)


def _costs(args: argparse.Namespace) -> MeshCosts:
    from .costs import AxisCost, MeshCosts

    known = dict(MeshCosts.from_json(args.costs.read_text()).axes) if args.costs is not None else {}
    for name, alpha, bandwidth, algorithm in args.link:
        known[name,] = AxisCost.of_link(alpha, bandwidth, algorithm=algorithm)
    return MeshCosts(known)


def _table(found: list[Prediction]) -> str:
    from math import prod

    rows = [COLUMNS]
    rows += [
        (
            " x ".join(f"{name}={size}" for name, size in one.mesh.items()),
            str(prod(one.mesh.values())),
            f"{one.seconds * 1e3:.1f} ms",
            f"{one.exposed / one.seconds if one.seconds else 0:.1%}",
            f"{sum(one.sent.values()) / 1e9:.2f} GB",
            f"{one.peak_bytes / 2**30:.2f} GiB",
        )
        for one in found
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
