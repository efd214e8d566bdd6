"""Train steps of all contenders on the same parameters and batch, checked against one device, and their rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from _timing import Report, Times, microseconds, row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_dtensor import DTensor, static

from .programs import PLAN, ByHand, Model, Sizes, explicit, sharded, torch_parallel, torch_sharded

BUCKET, EACH = "by hand, one bucket", "by hand, each gradient"
STATIC, DYNAMIC, ALONE = "static", "dynamic", "one device"
INEXACT = "static, exact=False"
"""Adds gradients of more than two ranks in another order than the dynamic path, in fewer messages."""
HAND_EXPLICIT = "by hand, explicit attention"
TORCH_ALL, TORCH_PARALLEL = "torch's DTensor", "torch's parallelize_module"
GOALS = {STATIC: 1.00, DYNAMIC: 1.20}
WARM_UP = 3
"""Steps before the first measured one; `static` needs two to record."""


@dataclass
class Contender:
    """A model and its batch; a call is a train step without its optimizer."""

    model: nn.Module
    x: Tensor
    targets: Tensor
    whole: nn.Module
    """The same on one device."""
    local: bool = False
    """Whether the loss is this rank's part of the sum over dp."""
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = list(self.model.parameters())
        self.finish = self.model.finish if isinstance(self.model, ByHand) else None

    def backward(self) -> Tensor:
        """Forward, loss, backward, and the sum of gradients over dp."""
        loss: Tensor = self.model(self.x, self.targets)
        loss.backward()
        if self.finish is not None:
            self.finish()
        return loss

    def __call__(self) -> None:
        self.backward()
        for parameter in self.parameters:
            parameter.grad = None


class _WithPlainTensors(Contender):
    """Lets torch's DTensor take positions, which the model makes, as the same on all ranks, and adds gradients up."""

    def backward(self) -> Tensor:
        with implicit_replication():
            loss = super().backward()
        for parameter in self.parameters:  # torch leaves them as pending sums; ours and those by hand are added up
            if parameter.grad is not None:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        return loss


def contenders(sizes: Sizes, mesh: DeviceMesh, only: tuple[str, ...] = ()) -> dict[str, Contender]:
    """Make the contenders.

    The loss stays as it comes: what by hand is this rank's part, is a `Partial` with DTensors.

    Args:
        sizes: of the model and the batch.
        mesh: with axes "dp" and "tp".
        only: names of those that are wanted; all by default.
    """
    torch.manual_seed(0)
    whole, apart = Model(sizes), Model(sizes, explicit)
    apart.load_state_dict(whole.state_dict())
    dp, tp, ranks = mesh.get_local_rank("dp"), mesh.get_local_rank("tp"), mesh.size(1)
    data = sizes.data()
    mine = [t.chunk(mesh.size(0))[dp].contiguous() for t in data]
    placements = [Shard(0), Replicate()]

    def by_hand(bucket: bool = True) -> Contender:
        return Contender(ByHand(sizes, mesh, bucket=bucket).load(whole, tp, ranks), *mine, whole, local=True)

    def by_hand_explicit() -> Contender:
        return Contender(ByHand(sizes, mesh, explicit).load(apart, tp, ranks), *mine, apart, local=True)

    def ours(model: nn.Module) -> Contender:
        x, targets = (DTensor.from_local(t, mesh, placements, run_check=False) for t in mine)
        return Contender(model, x, targets, whole)

    def torchs() -> Contender:
        x, targets = (torch_tensor.DTensor.from_local(t, mesh, placements, run_check=False) for t in mine)
        return _WithPlainTensors(torch_sharded(apart, mesh), x, targets, apart)

    makers: dict[str, Callable[[], Contender]] = {
        BUCKET: by_hand,
        EACH: lambda: by_hand(bucket=False),
        STATIC: lambda: ours(static(sharded(whole, mesh))),
        INEXACT: lambda: ours(static(sharded(whole, mesh), exact=False)),
        DYNAMIC: lambda: ours(sharded(whole, mesh)),
        TORCH_PARALLEL: lambda: Contender(torch_parallel(whole, mesh), *mine, whole),
        HAND_EXPLICIT: by_hand_explicit,
        TORCH_ALL: torchs,
        ALONE: lambda: Contender(whole, *data, whole),
    }
    if mesh.size(0) == 1:  # there are no gradients to sum
        del makers[EACH]
    if mesh.size(0) <= 2:
        del makers[INEXACT]
    return {name: make() for name, make in makers.items() if not only or name in only}


def check(steps: Mapping[str, Contender], mesh: DeviceMesh) -> None:
    """Run all steps until `static` has its programs, and refuse to time what does not compute one device's gradients.

    Args:
        steps: of `contenders`, on real ranks.
        mesh: theirs.
    """
    for name, step in steps.items():
        step.whole.zero_grad()
        step.whole(*step.whole.sizes.data()).backward()  # type: ignore[operator, union-attr]
        wanted = {n: p.grad for n, p in step.whole.named_parameters()}
        step.whole.zero_grad()
        if step.model is step.whole:
            continue
        for _ in range(WARM_UP):
            step()
        step.backward()
        for parameter, own in step.model.named_parameters():
            _compare(f"{name}: gradient of {parameter}", own.grad, _part(wanted[parameter], parameter, step, mesh))
            own.grad = None


def _part(grad: Tensor | None, parameter: str, step: Contender, mesh: DeviceMesh) -> Tensor:
    """What of the whole gradient a contender should have, once it is gathered."""
    assert grad is not None
    for pattern, placements in PLAN["parameter"].items():
        if isinstance(step.model, ByHand) and re.fullmatch(pattern, parameter):
            return grad.chunk(mesh.size(1), placements["tp"].dim)[mesh.get_local_rank("tp")]
    return grad


def _compare(what: str, found: Tensor | None, wanted: Tensor) -> None:
    if isinstance(found, DTensor | torch_tensor.DTensor):
        found = found.full_tensor()
    if found is None or not torch.allclose(found, wanted, rtol=1e-3, atol=1e-5):
        raise RuntimeError(f"{what} is not one device's on rank {dist.get_rank()}; there is nothing to time.")


class _Count(TorchDispatchMode):
    """Counts collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, torch_tensor.DTensor) for t in types):
            return NotImplemented  # what it calls comes by here
        kind = func._schema.name.rpartition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in kind and "wrap" not in kind:
            self.found[kind] += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def collectives(step: Callable[[], object]) -> Counter[str]:
    """Count the collectives that one step begins, by kind."""
    with _Count() as count:
        step()
    return count.found


def report_times(report: Report, label: str, times: Times, note: str) -> None:
    """Add the rows of one model.

    Args:
        report: takes them.
        label: of the model.
        times: of all contenders.
        note: about the row of `static`.
    """
    hand = best_hand(times)
    spent = f"{hand} / static / dynamic {microseconds(*map(times.median, (hand, STATIC, DYNAMIC)))}"
    report.add(row(f"{label}: static", times.ratio(STATIC, hand), GOALS[STATIC], f"{spent}; {note}"))
    report.add(row(f"{label}: dynamic", times.ratio(DYNAMIC, hand), GOALS[DYNAMIC]))
    for other in (INEXACT, BUCKET, EACH):
        if other in times.rounds and other != hand:
            report.add(row(f"{label}: {other}", times.ratio(other, hand)))
    report.add(row(f"{label}: one device, whole batch", times.ratio(ALONE, hand)))
    report.add(row(f"{label}: {TORCH_PARALLEL}", times.ratio(TORCH_PARALLEL, hand)))
    report.add(row(f"{label}: {TORCH_PARALLEL} over static", times.ratio(TORCH_PARALLEL, STATIC)))
    ratio = times.ratio(TORCH_ALL, HAND_EXPLICIT)
    report.add(row(f"{label}: {TORCH_ALL}", ratio, None, "over by hand, both with explicit attention"))
    over = ratio / times.ratio(STATIC, hand)
    report.add(row(f"{label}: {TORCH_ALL} over static", over, None, "of the two ratios to by hand"))


def best_hand(times: Times) -> str:
    """Which of the programs by hand is the fastest."""
    return EACH if EACH in times.rounds and times.ratio(EACH, BUCKET) < 1 else BUCKET
