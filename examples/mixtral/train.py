"""Train a Mixtral of Hugging Face with its experts spread over ranks, and its single-device twin beside it.

    python train.py --mesh dp=2,ep=2
    torchrun --nproc-per-node 4 train.py --mesh ep=4

The model is transformers' own, with random weights. What makes it parallel is the line with `parallelize_module` in
`train` below; `ExpertsAllocator` moves experts between ranks while it trains.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from transformers import MixtralConfig, MixtralForCausalLM

from vescale_dtensor import ExpertsAllocator, Shard, expert_parallel, explain, parallelize_module

TOLERANCE = 1e-5
LENGTH = 32


def make_model(options: argparse.Namespace) -> nn.Module:
    """A small Mixtral with the router's own loss."""
    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=options.experts, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(options.seed)  # the same initial parameters on every rank
    return MixtralForCausalLM(config)


def batches(options: argparse.Namespace) -> Iterator[Tensor]:
    """Bytes of the standard library's source, [batch, length]; the same on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:20]
    text = torch.tensor(list(b"".join(f.read_bytes() for f in files)))
    generator = torch.Generator().manual_seed(options.seed + 1)
    while True:
        starts = torch.randint(len(text) - LENGTH, (options.batch_size, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH)]


class Trainer:
    """A model in training. Knows nothing of parallelism: the same code trains both models."""

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)

    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""
        self.optimizer.zero_grad()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.item())


def train(options: argparse.Namespace) -> bool:
    """Train on all ranks of the default process group; False where the losses differ too much."""
    first = dist.get_rank() == 0
    mesh = init_device_mesh("cpu", tuple(options.mesh.values()), mesh_dim_names=tuple(options.mesh))
    model = make_model(options)
    single = Trainer(copy.deepcopy(model), options.learning_rate) if first else None

    batch = {"forward": {"input": dict.fromkeys(options.mesh, Shard(0))}}  # every axis takes a part of the batch
    model = parallelize_module(model, mesh, [batch, expert_parallel("ep")])

    parallel = Trainer(model, options.learning_rate)
    allocator = ExpertsAllocator(model, parallel.optimizer)
    widest = 0.0
    for step, tokens in zip(range(1, options.steps + 1), batches(options), strict=False):
        with explain() as seen:
            mine = parallel.step(tokens)
        if single is not None:
            theirs = single.step(tokens)
            widest = max(widest, abs(mine - theirs))
            sent = sum(r.num_bytes for r in seen.records if r.kind == "all_to_all")
            print(
                f"{step:4} | {mine:.7f} | {theirs:.7f} | {abs(mine - theirs):.1e} | {sent:,} bytes to experts",
                flush=True,
            )
        if step % options.move_every == 0:
            for name, move in allocator.step().items():
                if first:
                    print(
                        f"     {name}: {move.moved} experts change ranks; the busiest rank had {move.before} tokens, "
                        f"would have had {move.after}, at best {move.bound}"
                    )
    allocator.restore()
    equal = widest <= TOLERANCE
    if first:
        print(
            f"\nlosses of the mesh and of one device: {'EQUAL within' if equal else 'DIFFERENT beyond'} {TOLERANCE:g}"
        )
    return equal or not first


# ------------------------------------------------------------------ starting the ranks


def run_rank(rank: int, world_size: int, folder: str, options: argparse.Namespace) -> None:
    """Be one rank; ends the process with status 1 where the losses differ."""
    torch.set_num_threads(1)
    init_method = f"file://{folder}/rendezvous" if folder else "env://"
    timeout = timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    equal = train(options)
    dist.destroy_process_group()
    if not equal:
        sys.exit(1)


def parse_mesh(text: str) -> dict[str, int]:
    """Read mesh axes and their sizes.

    >>> parse_mesh("dp=2,ep=2")
    {'dp': 2, 'ep': 2}
    """
    mesh = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in ("dp", "ep") or name in mesh or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{text!r}: expected sizes of dp and ep, as in dp=2,ep=2")
        mesh[name] = int(size)
    if "ep" not in mesh:
        raise argparse.ArgumentTypeError(f"{text!r} has no axis ep to spread experts over, as in dp=2,ep=2 or ep=4")
    return mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job and return its exit status."""
    parser = argparse.ArgumentParser(description="Train a Mixtral with spread experts and compare it with one device.")
    parser.add_argument("--mesh", type=parse_mesh, default="dp=2,ep=2", help="axes and sizes: ep=4, dp=2,ep=2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--move-every", type=int, default=5, help="steps between moves of experts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    needed = prod(options.mesh.values())
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "", options)
        return 0
    with tempfile.TemporaryDirectory(prefix="mixtral-") as folder:
        try:
            start_processes(run_rank, args=(needed, folder, options), nprocs=needed, start_method="spawn")
        except (ProcessRaisedException, ProcessExitedException) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
