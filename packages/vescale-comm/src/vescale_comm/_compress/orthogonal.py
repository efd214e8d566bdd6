"""Linear algebra with the same bits on every rank, whatever its device and threads.

Operations are elementwise, and sums are sums of integers, which do not depend on the order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["orthonormal", "outer"]


def orthonormal(matrix: Tensor) -> Tensor:
    """Return the matrix with orthonormal columns that span the same space.

    Columns that depend on earlier ones, to rounding, become zero. One number that is not finite makes all NaN in its
    column and the later ones.

    Args:
        matrix: a few columns, of float32 or float64.

    Source:
        Gram-Schmidt, twice: Giraud et al., "The loss of orthogonality in the Gram-Schmidt process" (2005).

    Example:
        >>> orthonormal(torch.tensor([[3.0, 1.0], [4.0, 0.0]]))
        tensor([[ 0.6000,  0.8000],
                [ 0.8000, -0.6000]])
    """
    if not matrix.numel():
        return matrix.clone()
    largest = matrix.abs().amax(0)
    scaled = matrix / torch.where(largest == 0, torch.ones_like(largest), largest)
    before = _dots(scaled, scaled).sqrt()
    least = 10 * torch.finfo(matrix.dtype).eps
    done: list[Tensor] = []
    for i in range(matrix.shape[1]):
        left, length = scaled[:, i : i + 1], before[i]
        if done:
            earlier = torch.cat(done, dim=1)
            for _ in range(2):
                left = left - outer(earlier, _dots(earlier, left).view(1, -1))
            length = _dots(left, left)[0].sqrt()
        # NaN is not <= anything, and so stays.
        done.append(torch.where(length <= least * before[i], torch.zeros_like(left), left / length))
    return torch.cat(done, dim=1)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right.t()`, added column by column.

    Args:
        left: rows x few.
        right: columns x few.
    """
    total = left[:, :1] * right[:, 0]
    for i in range(1, left.shape[1]):
        total.add_(left[:, i : i + 1] * right[:, i])
    return total


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products of columns.

    Products are counted in units so small that as many as there are of the largest one just fit into 64 bits.
    """
    terms = left * right
    largest = terms.abs().amax(0)
    unit = torch.where(largest == 0, torch.ones_like(largest), largest) * 2.0 ** (terms.shape[0].bit_length() - 62)
    total = terms.div(unit).round_().to(torch.int64).sum(0).to(terms.dtype).mul_(unit)
    return torch.where(largest.isfinite(), total, torch.nan)
