"""Sums of small tensors without gradients: begun now, waited for later."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_dtensor import Replicate, Shard, distribute_tensor, explain, static
from vescale_dtensor._comm.totals import Total, begin_sum, end_sum, reducer_over, sum_over
from vescale_dtensor._mesh import mesh_info
from vescale_testing import cached_mesh

RANKS = pytest.mark.ranks(4, pool=True)


@RANKS
def test_sums_over_axes() -> None:
    info = mesh_info(cached_mesh(2, 2, names=("dp", "tp")))
    own = torch.tensor([dist.get_rank(), 1])
    for axes, wanted in (((0,), [2 * (dist.get_rank() % 2) + 2, 2]), ((0, 1), [6, 4]), ((), own.tolist())):
        reducer = reducer_over(info, axes)
        total = Total(own, reducer)
        assert total.wait().tolist() == total.wait().tolist() == wanted
        assert sum_over(own, reducer).tolist() == wanted
        if reducer is not None:
            assert end_sum(begin_sum(own, reducer)).tolist() == wanted
    assert own.tolist() == [dist.get_rank(), 1]
    assert reducer_over(mesh_info(cached_mesh(4, 1, names=("dp", "tp"))), (1,)) is None


@RANKS
@pytest.mark.parametrize("ignored", [0, 3, 8])
def test_the_tokens_of_a_loss_are_counted_while_the_model_runs(ignored: int) -> None:
    """In a program; and what is divided by is the number of all ranks, of whom some have none."""
    mesh = cached_mesh(4, names=("dp",))
    torch.manual_seed(0)
    weight, x, targets = torch.randn(5, 6), torch.randn(8, 6), torch.randint(0, 5, (8,))
    targets[8 - ignored :] = -100

    def loss_of(weight: torch.Tensor, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.tanh(x @ weight.T), targets)

    wanted = loss_of(weight, x, targets)
    given = [distribute_tensor(weight, mesh, [Replicate()])]
    given += [distribute_tensor(t, mesh, [Shard(0)]) for t in (x, targets)]
    fixed = static(loss_of)
    for function in (loss_of, *[fixed] * 4):
        torch.testing.assert_close(function(*given).full_tensor(), wanted, equal_nan=True)
    lines = fixed.static_code().splitlines()
    begun = next(i for i, line in enumerate(lines) if "= begin_sum(" in line)
    ended = next(i for i, line in enumerate(lines) if "= end_sum(" in line)
    between = "".join(lines[begun:ended])
    for name in ("matmul", "tanh", "log_softmax", "nll_loss"):
        assert name in between, fixed.static_code()
    with explain() as seen:
        loss_of(*given)
    assert [record.kind for record in seen.records].count("all_reduce") == 1
