"""Run the operators of `row_ops` on DTensors, on some ranks of this machine, and compare with one device.

pip install --no-deps examples/custom_op_plugin
python examples/custom_op_plugin/check.py --ranks 2
"""

from __future__ import annotations

import argparse
import socket

import row_ops
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from vescale_dtensor import Replicate, Shard, distribute_tensor, set_implicit_communication, verify_rule


def program(x: Tensor, w: Tensor) -> Tensor:
    """A program of one device."""
    y = row_ops.normalize_rows(x, 1e-6)
    y = row_ops.scale_columns(y, w)
    return row_ops.Quantize.apply(y, 0.125)  # type: ignore[no-any-return, no-untyped-call]


def run(rank: int, ranks: int, port: int) -> None:
    """One rank."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    x, w = torch.randn(5, 6, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    expected = [t.clone().requires_grad_() for t in (x, w)]
    program(*expected).square().sum().backward()

    set_implicit_communication("error")  # the rules must do without gathering
    for dim in (0, 1):
        ours = [
            distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_(),
            distribute_tensor(w, mesh, [Replicate()]).requires_grad_(),
        ]
        y = program(*ours)
        assert y.placements == (Shard(dim),)  # type: ignore[attr-defined]
        torch.testing.assert_close(y.full_tensor(), program(x, w))  # type: ignore[attr-defined]
        y.square().sum().backward()
        for e, o in zip(expected, ours, strict=True):
            torch.testing.assert_close(o.grad.full_tensor(), e.grad)  # type: ignore[union-attr]
    dist.destroy_process_group()


def main() -> None:
    """Check the rules by themselves, then on ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    ranks = parser.parse_args().ranks
    x, w = torch.randn(6, 5, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    samples = {
        row_ops.normalize_rows: [(x, 1e-6)],
        row_ops.Quantize.apply: [(x, 0.125)],
        row_ops.scale_columns: [(x, w)],
    }
    for fn, sample in samples.items():
        print(f"{verify_rule(fn, sample)} strategies checked")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(run, (ranks, port), nprocs=ranks, start_method="fork")
    print(f"equal to one device on {ranks} ranks")


if __name__ == "__main__":
    main()
