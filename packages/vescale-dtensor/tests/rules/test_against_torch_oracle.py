"""Every layout that needs no move, judged by torch's brute-force validator of sharding strategies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import DTensor, Partial, Replicate, Shard, Varying, distribute_tensor, implicit_communication
from vescale_dtensor._comm import move
from vescale_dtensor.errors import DTensorError

pytest.importorskip("expecttest", reason="torch's validator needs it")
validation = pytest.importorskip("torch.distributed.tensor._ops.strategy_validation", reason="of torch 2.13")
local_tensor = pytest.importorskip("torch.distributed._local_tensor")
samples = pytest.importorskip("torch.testing._internal.opinfo.core")


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def _matrices(*batch: int) -> torch.Tensor:
    return 3 * torch.eye(4, dtype=torch.float64) + 0.1 * _values(*batch, 4, 4)


A, B, INDEX = _values(4, 6, 2), _values(4, 6, 2), torch.tensor([[0, 3], [1, 2], [3, 0], [2, 1]])
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add": (torch.add, (A, B)),
    "mul": (torch.mul, (A, B)),
    "mul-broadcast": (torch.mul, (A, _values(6, 1))),
    "div": (torch.div, (A, B)),
    "neg": (torch.neg, (A,)),
    "exp": (torch.exp, (A,)),
    "where": (torch.where, (A > 0, A, B)),
    "sum": (torch.sum, (A, 1)),
    "transpose": (torch.transpose, (A, 0, 2)),
    "permute": (torch.permute, (A, (2, 0, 1))),
    "unsqueeze": (torch.unsqueeze, (A, 1)),
    "flip": (torch.flip, (A, (1,))),
    "roll": (torch.roll, (A, 1, 0)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (A, B)),
    "stack": (lambda x, y: torch.stack([x, y], 1), (A, B)),
    "matmul": (torch.matmul, (A, _values(4, 2, 6))),
    "mm": (torch.mm, (_values(4, 6), _values(6, 2))),
    "addmm": (torch.addmm, (_values(4, 2), _values(4, 6), _values(6, 2))),
    "linear": (F.linear, (A, _values(4, 2), _values(4))),
    "outer": (torch.outer, (_values(4), _values(6))),
    "einsum": (lambda x, y: torch.einsum("abk,akc->abc", x, y), (A, _values(4, 2, 6))),
    "tensordot": (lambda x, y: torch.tensordot(x, y, 1), (A, _values(2, 4))),
    "inner": (torch.inner, (_values(4, 6), _values(2, 6))),
    "vecdot": (torch.linalg.vecdot, (A, B)),
    "kron": (torch.kron, (_values(4, 2), _values(2, 6))),
    "bilinear": (F.bilinear, (_values(4, 6), _values(4, 2), _values(2, 6, 2))),
    "softmax": (lambda x: x.softmax(1), (A,)),
    "gather": (lambda x, i: x.gather(1, i), (_values(4, 4), INDEX)),
    "index_select": (lambda x, i: x.index_select(1, i), (A, torch.tensor([0, 2]))),
    "index_add": (lambda x, i, y: x.index_add(1, i, y), (A, torch.tensor([0, 2]), _values(4, 2, 2))),
    "sort": (lambda x: x.sort(1).values, (A,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (2,), w), (A, _values(2))),
    "conv1d": (F.conv1d, (_values(4, 2, 6), _values(4, 2, 3))),
    "embedding": (F.embedding, (INDEX, _values(4, 6))),
    "cholesky": (torch.linalg.cholesky, (_matrices(2) @ _matrices(2).mT,)),
    "solve": (torch.linalg.solve, (_matrices(2), _values(2, 4, 6))),
    "fft": (torch.fft.fft, (A,)),
    "cross": (lambda x, y: torch.linalg.cross(x, y), (_values(4, 2, 3), _values(4, 2, 3))),
    "glu": (F.glu, (A,)),
    "trapezoid": (lambda y, x: torch.trapezoid(y, x), (_values(4, 6), _values(4, 6))),
    "diag_embed": (torch.diag_embed, (A,)),
    "slice_scatter": (lambda x, y: torch.slice_scatter(x, y, 1, 2, 4), (A, _values(4, 2, 2))),
}

INSTEAD = {"softmax": (0, 1), "gather": (0, 1), "index_select": (0, 1), "index_add": (0, 1), "embedding": (1, 0)}
"""(Operand, dim) whose shards a rule serves by running something else, which the validator does not know."""


def _choices(x: torch.Tensor) -> list[Any]:
    pending = [Partial()] if x.is_floating_point() else []
    return [Varying(), *[Shard(d) for d, n in enumerate(x.shape) if n % 2 == 0], *pending]


def _claims(fn: Callable[..., Any], args: tuple[Any, ...], mesh: Any) -> dict[tuple[Any, ...], Any]:
    """Layouts of the tensors from which `fn` moves nothing, and the layout that it then gives its result."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    combinations = list(itertools.product(*map(_choices, tensors)))
    random.Random(0).shuffle(combinations)
    found = {}
    moved: list[bool] = []
    move.watchers.append(lambda: moved.append(True))
    try:
        for combination in combinations[:40]:
            layouts = iter(combination)
            ours = [distribute_tensor(a, mesh, [next(layouts)]) if isinstance(a, torch.Tensor) else a for a in args]
            moved.clear()
            try:
                with torch.no_grad(), implicit_communication("error"):
                    result = fn(*ours)
            except DTensorError:
                continue
            if not moved:
                assert isinstance(result, DTensor)
                found[combination] = result.placements[0]
    finally:
        move.watchers.pop()
    return found


@pytest.mark.fake_ranks(2, ranks=[0])
def test_layouts_that_need_no_move_are_valid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    wrong, judged, lean = [], 0, []
    for name, (fn, args) in CASES.items():
        claims = _claims(fn, args, mesh)
        sample = samples.SampleInput(args[0], args=args[1:])
        tensors = validation.extract_tensors_from_sample(sample)
        truth = fn(*args)
        sharded = 0
        for ins, out in claims.items():
            if name in INSTEAD and ins[INSTEAD[name][0]] == Shard(INSTEAD[name][1]):
                continue
            plain = tuple(Replicate() if isinstance(p, Replicate) else p for p in (*ins, out))
            with local_tensor.LocalTensorMode(frozenset(range(2))):
                valid, message = validation.validate_combination(
                    fn, sample, tensors, (plain[:-1], plain[-1:]), truth, 2, mesh
                )
            judged += valid is not None
            sharded += any(isinstance(p, Shard) for p in ins)
            if valid is False:
                wrong.append(f"{name} {ins} -> {out}: {message}")
        if not sharded:
            lean.append(name)
    assert not wrong, "\n".join(wrong)
    assert not lean, f"no way to shard: {lean}"
    assert judged > 3 * len(CASES)
