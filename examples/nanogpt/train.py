"""Train a GPT on several ranks, and its single-device twin beside it, and compare their losses.

    python train.py --mesh dp=2,tp=2
    torchrun --nproc-per-node 4 train.py --mesh dp=2,tp=2

`model.py` is plain PyTorch. What makes it parallel is the line with `parallelize_module` in `train` below;
one class, `Trainer`, trains both models.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from importlib.util import find_spec
from math import prod
from pathlib import Path

import data
import torch
import torch.distributed as dist
from model import GPT, GPTConfig
from report import Result, write_json, write_picture
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from vescale_dtensor import DTensor, parallelize_module, random_mode

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


class Trainer:
    """A model in training. Knows nothing of parallelism: the same code trains both models."""

    def __init__(self, model: nn.Module, *, learning_rate: float, seed: int) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 10))
        self.random = RandomStream(seed)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        """Train on one batch and return its loss."""
        with self.random:
            _, loss = self.model(tokens, targets)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.item())


class RandomStream:
    """A state of the default generator for one model, so that two models in turns draw as if alone."""

    def __init__(self, seed: int) -> None:
        self._own = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._others = torch.get_rng_state()
        torch.set_rng_state(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = torch.get_rng_state()
        torch.set_rng_state(self._others)


def train(options: argparse.Namespace) -> bool:
    """Train on all ranks of the default process group; False where the curves differ too much."""
    first = dist.get_rank() == 0
    dtype = getattr(torch, options.dtype)
    mesh = init_device_mesh("cpu", tuple(options.mesh.values()), mesh_dim_names=tuple(options.mesh))

    torch.manual_seed(options.seed)  # the same initial parameters on every rank
    model = GPT(GPTConfig(dropout=options.dropout, n_layer=options.layers, n_embd=options.width)).to(dtype)
    twin = copy.deepcopy(model) if first else None

    model = parallelize_module(model, mesh, "nanogpt")  # takes whole batches and cuts them along dp

    arguments = {"learning_rate": options.learning_rate, "seed": options.seed + 1}
    parallel = Trainer(model, **arguments)
    single = Trainer(twin, **arguments) if twin is not None else None
    length = GPTConfig.block_size
    batches = data.batches(
        data.standard_library_text(), batch_size=options.batch_size, length=length, seed=options.seed + 2
    )

    losses: tuple[list[float], list[float]] = [], []
    speeds = []
    if first:
        _introduce(model, options)
    for step in range(1, options.steps + 1):
        tokens, targets = next(batches)
        start = time.perf_counter()
        losses[0].append(parallel.step(tokens, targets))
        speeds.append(tokens.numel() / (time.perf_counter() - start))
        if single is not None:
            losses[1].append(single.step(tokens, targets))
            a, b = losses[0][-1], losses[1][-1]
            print(f"{step:4} | {a:13.9f} | {b:11.9f} | {abs(a - b):10.1e} | {speeds[-1]:8.0f}", flush=True)

    gap = _parameter_difference(model, twin)
    if not first:
        return True
    result = Result(
        mesh=",".join(f"{name}={size}" for name, size in options.mesh.items()),
        dtype=options.dtype,
        seed=options.seed,
        dropout=options.dropout,
        torch=torch.__version__,
        parallel=losses[0],
        single=losses[1],
        tolerance=TOLERANCE[options.dtype],
        parameter_difference=gap,
        tokens_per_second=statistics.median(speeds),
    )
    _conclude(result, options.out)
    return result.within_tolerance


def _introduce(model: nn.Module, options: argparse.Namespace) -> None:
    whole = sum(p.numel() for p in model.parameters())
    local = sum(prod(p.local_shape) if isinstance(p, DTensor) else p.numel() for p in model.parameters())
    print(
        f"GPT of {whole:,} parameters, {local:,} of them on this rank; {options.dtype}, dropout {options.dropout}, "
        f"{options.batch_size} x {GPTConfig.block_size} bytes of the standard library's source per step\n"
        f"step | loss parallel | loss single | difference | tokens/s"
    )


def _parameter_difference(model: nn.Module, twin: nn.Module | None) -> float:
    """Largest difference of a parameter element; every rank calls it, the one with the twin gets the answer."""
    gaps = [0.0]
    others = dict(twin.named_parameters()) if twin is not None else {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach()
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        if name in others:
            gaps.append((whole - others[name].detach()).abs().max().item())
    return max(gaps)


def _conclude(result: Result, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    json_path, picture_path = out / "losses.json", out / "losses.png"
    write_json(result, json_path)
    drawn = write_picture(result, picture_path)
    verdict = "EQUAL within" if result.within_tolerance else "DIFFERENT beyond"
    print(
        f"\nloss {result.parallel[0]:.3f} -> {result.parallel[-1]:.3f} in {len(result.parallel)} steps on mesh "
        f"{result.mesh}, {result.tokens_per_second:.0f} tokens/s\n"
        f"losses of the mesh and of one device: {verdict} the tolerance of {result.tolerance:g} "
        f"(largest difference {max(result.differences):.1e}, of parameters {result.parameter_difference:.1e})\n"
        f"curves: {json_path}" + (f", {picture_path}" if drawn else " (install matplotlib for a picture)")
    )


# ------------------------------------------------------------------ starting the ranks


def run_rank(rank: int, world_size: int, folder: str, options: argparse.Namespace) -> None:
    """Be one rank; ends the process with status 1 where the curves differ.

    Args:
        rank: number of this rank.
        world_size: number of ranks.
        folder: where the ranks of `launch` meet and the first one to fail leaves its traceback; empty
            under torchrun, which has means of its own.
        options: what the command line says.
    """
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous" if folder else "env://",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        with one_device_numbers():
            equal = train(options)
        dist.destroy_process_group()
    except BaseException:
        if folder:
            _leave_traceback(rank, Path(folder))
        raise
    if not equal:
        sys.exit(1)


def one_device_numbers() -> contextlib.AbstractContextManager[None]:
    """Let dropout draw what one device draws: vescale-rng does so by being installed, each rank its part."""
    return contextlib.nullcontext() if find_spec("vescale_rng") else random_mode("whole")


def _leave_traceback(rank: int, folder: Path) -> None:
    # Only the first to fail finds no file: what fails in other ranks follows from it.
    try:
        with (folder / "first-failure").open("x") as file:
            file.write(f"rank {rank} failed:\n{traceback.format_exc()}")
    except FileExistsError:
        return


def launch(world_size: int, options: argparse.Namespace) -> int:
    """Run all ranks on this machine and return the exit status of the job. One that fails ends all."""
    method = "fork" if sys.platform == "linux" else "spawn"  # fork need not import torch again
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as folder:
        try:
            start_processes(run_rank, args=(world_size, folder, options), nprocs=world_size, start_method=method)
        except (ProcessRaisedException, ProcessExitedException) as error:
            failure = Path(folder) / "first-failure"
            if failure.exists():
                print(failure.read_text(), file=sys.stderr)
            elif not (isinstance(error, ProcessExitedException) and error.exit_code == 1):
                print(error, file=sys.stderr)
            return 1
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a GPT on a mesh and compare it with one device.")
    parser.add_argument("--mesh", type=parse_mesh, default="dp=2,tp=2", help="axes and sizes: dp=4, tp=4, dp=2,tp=2")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--layers", type=int, default=GPTConfig.n_layer)
    parser.add_argument("--width", type=int, default=GPTConfig.n_embd)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder for the curves")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps {options.steps}: at least one step is needed")
    return options


def parse_mesh(text: str) -> dict[str, int]:
    """Read mesh axes and their sizes.

    >>> parse_mesh("dp=2,tp=2")
    {'dp': 2, 'tp': 2}
    """
    mesh = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("dp", "tp") or name in mesh or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected sizes of the axes dp (data parallel) and tp (tensor parallel), as in dp=2,tp=2"
            )
        mesh[name] = int(size)
    return mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return its exit status."""
    options = parse(arguments)
    needed = prod(options.mesh.values())
    if "RANK" not in os.environ:
        return launch(needed, options)
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != needed:
        raise SystemExit(f"--mesh {options.mesh} has {needed} ranks, torchrun started {world_size}")
    run_rank(int(os.environ["RANK"]), world_size, "", options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
