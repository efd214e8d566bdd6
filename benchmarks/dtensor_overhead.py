"""What vescale_dtensor costs beside plain torch, a hand-written local program and torch's own DTensor.

    python benchmarks/dtensor_overhead.py --json rows.json

All but the last part runs in one process with a fake process group: collectives cost only their call, so
that what remains is the work of the library. The last part times redistributions on 4 gloo ranks.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
import torch.nn.functional as F
from _programs import COLUMN_ROW, Block, HandParallelBlock, explicit_attention, sharded, train_step
from _timing import Report, Row, Times, interleave, microseconds, parser, row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module
from torch.multiprocessing.spawn import start_processes

from vescale_dtensor import DTensor, Varying, distribute_tensor, implicit_communication

RANKS = 4
BATCH, LENGTH, WIDTH, HEADS = 2, 32, 64, 4
PLAIN, OURS, TORCH = "plain", "ours", "torch's DTensor"
Make = Callable[[Tensor, bool], Tensor]
"""Make an operand of a local tensor: one shard of it along dim 0, or (False) the whole of a replicated one."""


def makers(mesh: DeviceMesh, *, requires_grad: bool) -> dict[str, Make]:
    """How each contender makes its operands. Gradients of replicated ones stay pending sums: no communication."""

    def plain(local: Tensor, shard: bool) -> Tensor:
        return local.clone().requires_grad_(requires_grad and local.is_floating_point())

    def ours(local: Tensor, shard: bool) -> Tensor:
        placement = Shard(0) if shard else Varying()
        made = DTensor.from_local(local.clone(), mesh, [placement], run_check=False)
        return made.requires_grad_(requires_grad and local.is_floating_point())

    def torchs(local: Tensor, shard: bool) -> Tensor:
        placement = Shard(0) if shard else Replicate()
        made = torch_tensor.DTensor.from_local(local.clone(), mesh, [placement], run_check=False)
        return made.requires_grad_(requires_grad and local.is_floating_point())

    return {PLAIN: plain, OURS: ours, TORCH: torchs}


# ------------------------------------------------------------------ a chain of small operators


def chain(report: Report, mesh: DeviceMesh) -> None:
    """Time 10 x (linear, gelu) on 8 x 8, forward and backward."""
    report.heading("10 x (linear, gelu) at 8 x 8, forward and backward, over plain torch")
    steps = {}
    for name, make in makers(mesh, requires_grad=True).items():
        x, w = make(torch.randn(8, 8), True), make(torch.randn(8, 8), False)
        steps[name] = _chain_step(x, w)
    times = interleave(steps, seconds=4.0)
    spent = microseconds(*(times.median(name) for name in steps))
    report.add(row("chain: ours", times.ratio(OURS, PLAIN), 1.20, f"plain / ours / torch's {spent}"))
    report.add(row("chain: torch's DTensor", times.ratio(TORCH, PLAIN)))


def _chain_step(x: Tensor, w: Tensor) -> Callable[[], None]:
    def step() -> None:
        h = x
        for _ in range(10):
            h = F.gelu(F.linear(h, w))
        h.sum().backward()
        x.grad = w.grad = None

    return step


# ------------------------------------------------------------------ operator by operator

Operator = tuple[list[Tensor], Callable[[], Tensor], int]
"""Leaves, a function that calls the operator, and how often it calls it."""


def operators(make: Make, factor: int) -> dict[str, Callable[[], Operator]]:
    """Operators at the sizes of a small block; `factor` is global over local batch."""
    generator = torch.Generator().manual_seed(0)
    batch = BATCH * factor

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def tokens(high: int) -> Tensor:
        return torch.randint(high, (BATCH * LENGTH,), generator=generator)

    def chained(apply: Callable[..., Tensor], *others: Tensor, x: Tensor | None = None) -> Callable[[], Operator]:
        def build() -> Operator:
            first = make(normal(BATCH, LENGTH, WIDTH) if x is None else x, True)
            rest = [make(o, False) for o in others]

            def call() -> Tensor:
                h = first
                for _ in range(10):
                    h = apply(h, *rest)
                return h

            return [first, *rest], call, 10

        return build

    def add() -> Operator:
        x = make(normal(BATCH, LENGTH, WIDTH), True)

        def call() -> Tensor:
            h = x
            for _ in range(10):
                h = h + x
            return h

        return [x], call, 10

    def view(h: Tensor) -> Tensor:
        if h.ndim == 3:
            return h.view(batch, LENGTH, HEADS, WIDTH // HEADS)
        return h.view(batch, LENGTH, WIDTH)

    def embedding() -> Operator:
        weight, ids = make(normal(100, WIDTH), False), make(tokens(100), True)
        return [weight], lambda: F.embedding(ids, weight), 1

    def cross_entropy() -> Operator:
        logits, targets = make(normal(BATCH * LENGTH, 100), True), make(tokens(100), True)
        return [logits], lambda: F.cross_entropy(logits, targets, reduction="sum"), 1

    vector = torch.ones(WIDTH)
    heads = normal(BATCH, HEADS, LENGTH, WIDTH // HEADS)
    return {
        "add": add,
        "mul": chained(lambda h: h * 1.001),
        "linear": chained(F.linear, normal(WIDTH, WIDTH) / 8, torch.zeros(WIDTH)),
        "gelu": chained(F.gelu),
        "softmax": chained(lambda h: F.softmax(h, -1)),
        "layer_norm": chained(lambda h, g, b: F.layer_norm(h, (WIDTH,), g, b), vector, vector),
        "view": chained(view),
        "transpose": chained(lambda h: h.transpose(1, 2), x=heads),
        "getitem": chained(lambda h: h[:, 1:]),
        "sdpa": chained(lambda h: F.scaled_dot_product_attention(h, h, h, is_causal=True), x=heads),
        "dropout": chained(lambda h: F.dropout(h, 0.1, True)),
        "embedding": embedding,
        "cross_entropy": cross_entropy,
    }


def operator_table(report: Report, mesh: DeviceMesh) -> None:
    """Time each operator, in microseconds over plain torch; the ratio is ours over torch's DTensor's."""
    for backward in (False, True):
        what = "forward and backward" if backward else "forward"
        report.heading(f"one operator, {what}: microseconds over plain torch, ours as a part of torch's DTensor's")
        builds = {
            name: operators(make, 1 if name == PLAIN else RANKS)
            for name, make in makers(mesh, requires_grad=backward).items()
        }
        for operator in builds[PLAIN]:
            built = {name: build[operator] for name, build in builds.items()}
            report.add(_operator_row(f"{operator} {'fwd+bwd' if backward else 'fwd'}", built, backward=backward))
    report.heading("reading metadata")
    x = {n: make(torch.zeros(BATCH, LENGTH), True) for n, make in makers(mesh, requires_grad=False).items()}
    report.add(_overhead("getters: shape, size(0), ndim, numel()", _getters(x, _read_shape), 4))
    other = _overhead("getters: dtype, device, requires_grad", _getters(x, _read_kind), 3)
    other.goal, other.ok = None, True
    report.add(other)


def _operator_row(name: str, built: dict[str, Callable[[], Operator]], *, backward: bool) -> Row:
    runs: dict[str, Callable[[], object]] = {}
    failures = {}
    calls = 1
    for contender, build in built.items():
        leaves, call, calls = build()
        run = _with_backward(call, leaves) if backward else torch.no_grad()(call)
        try:
            run()
        except (RuntimeError, NotImplementedError) as error:
            failures[contender] = str(error).strip().splitlines()[0][:60]
        else:
            runs[contender] = run
    if OURS in failures:
        return Row(name, None, 1 / 3, False, f"ours failed: {failures[OURS]}")
    times = interleave(runs, seconds=0.6)
    if TORCH in failures:
        spent = microseconds(times.median(PLAIN) / calls, times.extra(OURS, PLAIN) / calls)
        return Row(name, 0.0, 1 / 3, True, f"plain / +ours {spent}; torch's DTensor has no rule: {failures[TORCH]}")
    return _overhead(name, times, calls)


def _with_backward(call: Callable[[], Tensor], leaves: list[Tensor]) -> Callable[[], None]:
    def step() -> None:
        out = call()
        (out if out.ndim == 0 else out.sum()).backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def _overhead(name: str, times: Times, calls: int) -> Row:
    ours, theirs = times.extra(OURS, PLAIN), times.extra(TORCH, PLAIN)
    value = max(ours, 0.0) / max(theirs, 1e-9)  # no slower than plain: nothing to compare
    spent = microseconds(times.median(PLAIN) / calls, ours / calls, theirs / calls)
    return row(name, value, 1 / 3, f"plain / +ours / +torch's {spent}")


def _getters(x: dict[str, Tensor], read: Callable[[Tensor], object]) -> Times:
    return interleave({name: partial(read, tensor) for name, tensor in x.items()}, seconds=0.5)


def _read_shape(x: Tensor) -> object:
    return x.shape, x.size(0), x.ndim, x.numel()


def _read_kind(x: Tensor) -> object:
    return x.dtype, x.device, x.requires_grad


# ------------------------------------------------------------------ a transformer block


class Blocks:
    """The block of every contender, with what they train on."""

    def __init__(self, mesh: DeviceMesh, *, tensor_parallel: bool) -> None:
        self.mesh, self.tensor_parallel = mesh, tensor_parallel
        torch.manual_seed(0)
        self.base, self.explicit = Block(), Block(explicit_attention)
        dims = COLUMN_ROW if tensor_parallel else {}
        self.ours = sharded(self.base, self._our_parameter, dims)
        self.torchs = self._torchs()
        if tensor_parallel:
            group = mesh.get_group(0)
            self.local: nn.Module = HandParallelBlock(group, RANKS)
            self.local_explicit: nn.Module = HandParallelBlock(group, RANKS, explicit_attention)
        else:
            self.local, self.local_explicit = self.base, self.explicit

    def _our_parameter(self, parameter: Tensor, dim: int | None) -> Tensor:
        whole = Replicate() if self.tensor_parallel else Varying()
        return distribute_tensor(parameter, self.mesh, [whole if dim is None else Shard(dim)])

    def _torchs(self) -> nn.Module:
        module = Block(explicit_attention)
        if self.tensor_parallel:
            column = {n: ColwiseParallel(use_local_output=False) for n in ("q", "k", "v", "up")}
            rows = {n: RowwiseParallel(use_local_output=False) for n in ("o", "down")}
            torch_parallelize_module(module, self.mesh, {**column, **rows})
        for child in module.modules():
            for name, parameter in list(child.named_parameters(recurse=False)):
                if not isinstance(parameter, torch_tensor.DTensor):
                    made = torch_tensor.distribute_tensor(parameter.detach(), self.mesh, [Replicate()])
                    child.register_parameter(name, nn.Parameter(made))
        return module

    def inputs(self, length: int) -> dict[str, Tensor]:
        """Return the input of each contender at a sequence length."""
        local = torch.randn(4, length, WIDTH)
        placements = [Replicate() if self.tensor_parallel else Shard(0)]
        ours = DTensor.from_local(local.clone(), self.mesh, placements, run_check=False)
        torchs = torch_tensor.DTensor.from_local(local.clone(), self.mesh, placements, run_check=False)
        return {PLAIN: local.requires_grad_(), OURS: ours.requires_grad_(), TORCH: torchs.requires_grad_()}


def block_step(report: Report, mesh: DeviceMesh) -> None:
    """Time a train step of a block against the hand-written local program."""
    report.heading("transformer block (width 64, length 32, batch 4), train step, over the hand-written local program")
    for name, tensor_parallel, goal in (("no communication", False, 1.20), ("tensor parallel 4", True, 1.30)):
        blocks = Blocks(mesh, tensor_parallel=tensor_parallel)
        x = blocks.inputs(32)
        steps = {PLAIN: train_step(blocks.local, x[PLAIN]), OURS: train_step(blocks.ours, x[OURS])}
        times = interleave(steps, seconds=5.0, burst_seconds=2e-3, warm_up=20)
        spent = microseconds(times.median(PLAIN), times.median(OURS))
        report.add(row(f"block, {name}: ours", times.ratio(OURS, PLAIN), goal, f"local / ours {spent}"))
        steps = {PLAIN: train_step(blocks.local_explicit, x[PLAIN]), TORCH: train_step(blocks.torchs, x[TORCH])}
        times = interleave(steps, seconds=2.0)
        spent = microseconds(times.median(PLAIN), times.median(TORCH))
        note = f"local / torch's {spent}, both with explicit attention: its fused one has no rule on CPU"
        report.add(row(f"block, {name}: torch's DTensor", times.ratio(TORCH, PLAIN), None, note))


def new_shapes(report: Report, mesh: DeviceMesh) -> None:
    """Time a block at sequence lengths it has not met, over the same lengths met before."""
    report.heading("the same block at a new sequence length in every step, over the time at known lengths")
    for name, tensor_parallel in (("no communication", False), ("tensor parallel 4", True)):
        blocks = Blocks(mesh, tensor_parallel=tensor_parallel)
        modules = {PLAIN: blocks.local, OURS: blocks.ours, TORCH: blocks.torchs}
        first: dict[str, list[float]] = {n: [] for n in modules}
        again: dict[str, list[float]] = {n: [] for n in modules}
        for length in range(32, 80):
            x = blocks.inputs(length)
            for contender, module in modules.items():
                step = train_step(module, x[contender])
                spent = [_once(step) for _ in range(4)]
                first[contender].append(spent[0])
                again[contender].append(statistics.median(spent[1:]))
        # The first lengths also meet all operators for the first time.
        times = {n: Times({"first": first[n][4:], "again": again[n][4:]}) for n in modules}
        spent_ours = microseconds(times[OURS].median("first"), times[OURS].median("again"))
        value = times[OURS].ratio("first", "again")
        report.add(row(f"new lengths, {name}: ours", value, 3.0, f"new / known {spent_ours}"))
        for contender in (PLAIN, TORCH):
            report.add(row(f"new lengths, {name}: {contender}", times[contender].ratio("first", "again")))


def _once(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# ------------------------------------------------------------------ optimizers


def optimizer_step(report: Report, mesh: DeviceMesh) -> None:
    """Time AdamW on the 16 parameters of a tensor parallel block, over the same on local tensors."""
    report.heading("AdamW step, 16 parameters of a tensor parallel block, over plain local parameters")
    blocks = Blocks(mesh, tensor_parallel=True)
    x = blocks.inputs(32)
    modules = {PLAIN: blocks.local, OURS: blocks.ours, TORCH: blocks.torchs}
    for contender, module in modules.items():
        module(x[contender]).sum().backward()
    for name, foreach in (("foreach", True), ("loop", False)):
        steps = {n: torch.optim.AdamW(m.parameters(), lr=1e-4, foreach=foreach).step for n, m in modules.items()}
        times = interleave(steps, seconds=3.0)
        spent = microseconds(*(times.median(n) for n in modules))
        report.add(row(f"AdamW {name}: ours", times.ratio(OURS, PLAIN), 1.10, f"plain / ours / torch's {spent}"))
        report.add(row(f"AdamW {name}: torch's DTensor", times.ratio(TORCH, PLAIN)))


# ------------------------------------------------------------------ redistribution on real ranks

MOVES: dict[str, tuple[Placement, Placement]] = {
    "S(0) -> R": (Shard(0), Replicate()),
    "R -> S(0)": (Replicate(), Shard(0)),
    "P -> R": (Partial(), Replicate()),
    "P -> S(0)": (Partial(), Shard(0)),
    "S(0) -> S(1)": (Shard(0), Shard(1)),
}
SIZES = {"1 KB": (16, 100, 3), "4 MB": (1024, 40, 1)}
"""Rows and columns of a square float32 tensor, rounds, and calls per round."""


def redistributions(report: Report) -> None:
    """Time redistributions on gloo ranks of their own."""
    report.heading("redistribute on 4 gloo ranks, over torch's DTensor (goal within the error of measurement)")
    with tempfile.TemporaryDirectory(prefix="dtensor-overhead-") as folder:
        start_processes(_redistribution_rank, args=(folder,), nprocs=RANKS, start_method="fork")
        measured: dict[str, dict[str, list[float]]] = json.loads((Path(folder) / "times.json").read_text())
    for name, rounds in measured.items():
        times = Times(rounds)
        value, error = times.ratio(OURS, TORCH), times.spread(OURS, TORCH)
        spent = microseconds(times.median(OURS), times.median(TORCH))
        new = row(name, value, 1.0, f"+-{error:.3f}; ours / torch's {spent}")
        new.ok = value - error <= 1.0
        report.add(new)


def _redistribution_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    measured = {}
    for size, (side, num_rounds, calls) in SIZES.items():
        for move, (source, target) in MOVES.items():
            whole = torch.ones(side, side)
            local = whole.chunk(RANKS, source.dim)[rank].contiguous() if isinstance(source, Shard) else whole
            ours = DTensor.from_local(local, mesh, [source], run_check=False)
            theirs = torch_tensor.DTensor.from_local(local, mesh, [source], run_check=False)
            runs = {OURS: _redistribute(ours, target), TORCH: _redistribute(theirs, target)}
            measured[f"{move} {size}"] = _time_together(runs, num_rounds, calls)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def _redistribute(x: Any, target: Placement) -> Callable[[], object]:
    return lambda: x.redistribute(placements=[target])


def _time_together(runs: dict[str, Callable[[], object]], num_rounds: int, calls: int) -> dict[str, list[float]]:
    """Like `interleave`, with a fixed number of calls and a common start on all ranks."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    for number in range(-5, num_rounds):
        for name, run in order if number % 2 else order[::-1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            if number >= 0:
                times[name].append((time.perf_counter() - start) / calls)
    return times


def main() -> None:
    """Run all parts, or those named on the command line."""
    parts: dict[str, Callable[[Report, DeviceMesh], None]] = {
        "chain": chain,
        "operators": operator_table,
        "block": block_step,
        "shapes": new_shapes,
        "optimizer": optimizer_step,
    }
    command_line = parser(__doc__ or "")
    command_line.add_argument("parts", nargs="*", help=f"of {', '.join(parts)}, redistribute; default: all")
    options = command_line.parse_args()
    unknown = set(options.parts) - {*parts, "redistribute"}
    if unknown:
        command_line.error(f"unknown parts {sorted(unknown)}: choose from {', '.join(parts)}, redistribute")

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    report = Report(f"vescale_dtensor, torch {torch.__version__}, one thread")
    if not options.parts or "redistribute" in options.parts:
        redistributions(report)  # first: its ranks are forked, which must precede all threads and groups

    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    with implicit_communication("error"):  # what is timed is what it seems to be
        for name, part in parts.items():
            if not options.parts or name in options.parts:
                part(report, mesh)
    report.finish(options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
