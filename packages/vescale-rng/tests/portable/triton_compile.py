"""Compiles the Triton kernel for a GPU that need not be there, and prints the floating-point instructions it uses."""

from __future__ import annotations

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vescale_rng._portable import triton_kernel
from vescale_rng._portable.laws import make_law

TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
}
CASES = [
    *(("uniform_", dtype, ()) for dtype in list(TYPES)[:4]),
    *(("normal_", dtype, ()) for dtype in list(TYPES)[:4]),
    ("bernoulli_", torch.float32, (0.5,)),
    ("bernoulli_", torch.bfloat16, (1e-6,)),
    ("random_", torch.int64, (0, 9)),
    ("random_", torch.float32, (0, 9)),
]


def instructions(op: str, dtype: torch.dtype, args: tuple[float, ...]) -> list[str]:
    """Compile the kernel for a law, and find what computes in floating point."""
    law = make_law(op, dtype, args)
    constants = {
        "LAW": triton_kernel._parameters(law)[0],
        "GRAIN": law.grain,
        "FLOATING": dtype.is_floating_point,
        "BLOCK": triton_kernel._BLOCK,
    }
    signature = {"out": "*" + TYPES[dtype], **dict.fromkeys(triton_kernel._SCALARS, "i32")}
    signature |= dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(triton_kernel._kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options=triton_kernel.OPTIONS,
    )
    ptx = compiled.asm["ptx"]
    return sorted(set(re.findall(r"\b(?:fma|add|sub|mul|div|sqrt|ex2|lg2|sin|cos)\.\S*f(?:16|32|64)\b", ptx)))


if __name__ == "__main__":
    for case in CASES:
        print(case[0], *instructions(*case))
