"""Compares the Triton kernel with the torch operations, bit by bit; run with TRITON_INTERPRET=1 on a CPU."""

from __future__ import annotations

import sys

import torch

from vescale_rng._portable.laws import make_law
from vescale_rng._portable.source import PortableSource
from vescale_rng._portable.triton_kernel import launch, supports

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
CASES = [
    ("uniform_", (), (F32, F64, F16, BF16)),
    ("uniform_", (-1.5, 2.25), (F32, F64, F16, BF16)),
    ("normal_", (), (F32, F64, F16, BF16)),
    ("normal_", (0.1, 3.3), (F32, F64, F16, BF16)),
    ("bernoulli_", (0.3,), (F32, BF16, torch.bool, torch.int64)),
    ("bernoulli_", (1.0,), (F32,)),
    ("bernoulli_", (1e-6,), (F64, torch.int8)),
    ("dropout", (0.1,), (F16,)),
    ("random_", (0, 1000), (torch.int64, torch.int32, torch.int16)),
    ("random_", (-5, 100), (F32, F64, F16, BF16, torch.int8)),
    ("random_", (), (F32, BF16, torch.int32, torch.bool, torch.uint8)),
    ("random_", (0, 2**32), (torch.int64,)),
    ("random_", (-(2**40), 3 - 2**40), (torch.int64,)),
    ("random_", (0, 2**24 + 77), (F32,)),
]
# Seeds, calls and starts whose halves have their sign bits set.
PLACES = [(5, 3, 0), (2**64 - 3, 2**63 + 7, 2**34 - 8)]
N = 1021


def main(device: str) -> None:
    """Compare all cases on a device."""
    compared = 0
    for op, args, dtypes in CASES:
        for dtype in dtypes:
            law = make_law(op, dtype, args)
            assert supports(law), (op, dtype, args)
            for seed, call, start in PLACES:
                expected, found = torch.empty(N, dtype=dtype), torch.empty(N, dtype=dtype, device=device)
                PortableSource(law, 2**40, seed, call, lambda: None).emit(expected, start, args)
                launch(law, found, start, seed, call)
                assert torch.equal(found.cpu(), expected), f"{op}{args} of {dtype}, seed {seed}, call {call}"
                compared += 1
    assert not supports(make_law("random_", torch.int64, ()))
    assert not supports(make_law("cauchy_", F32, ()))
    assert not supports(make_law("bernoulli_", F32, (torch.ones(3),)))
    print(f"compared {compared}")


if __name__ == "__main__":
    main(sys.argv[1])
