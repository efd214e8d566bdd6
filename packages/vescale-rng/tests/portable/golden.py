"""Draws whose bits are frozen: `python golden.py` prints their hashes for `test_golden`, on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from vescale_rng import PortableGenerator

FLOATS = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
INTEGERS = {"i64": torch.int64, "i32": torch.int32, "i8": torch.int8}
DRAWS = {
    "uniform_": ((), FLOATS),
    "normal_": ((0.5, 1.5), FLOATS),
    "log_normal_": ((), FLOATS),
    "exponential_": ((1.25,), FLOATS),
    "cauchy_": ((0.0, 1.0), FLOATS),
    "geometric_": ((0.01,), FLOATS | INTEGERS),
    "bernoulli_": ((0.3,), {"f32": torch.float32}),
    "random_": ((0, 100), FLOATS | INTEGERS),
}
N = 100_003


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def hashes(operators: Sequence[str] = tuple(DRAWS)) -> dict[str, str]:
    """Hashes of one call per operator and dtype."""
    found = {}
    for op in operators:
        args, dtypes = DRAWS[op]
        for name, dtype in dtypes.items():
            out = torch.empty(N, dtype=dtype)
            PortableGenerator(2026, counter=3).source(op, dtype, out.device, (N,), (1,), args).emit(out, 0, args)
            found[f"{op} {name}"] = digest(out)
    p = torch.arange(1, 101, dtype=torch.float64).sqrt_().round_().expand(3, 100)
    g = PortableGenerator(2026)
    found["randperm"] = digest(g.whole("randperm", (50_000,), {}))
    found["multinomial"] = digest(g.whole("multinomial", (p, 20), {}))
    found["multinomial with replacement"] = digest(g.whole("multinomial", (p, 5000, True), {}))
    return found


if __name__ == "__main__":
    first = hashes()
    torch.set_num_threads(1 if torch.get_num_threads() > 1 else 2)
    assert hashes(["normal_"]).items() <= first.items(), "the number of threads matters"
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "hashes": first}))
