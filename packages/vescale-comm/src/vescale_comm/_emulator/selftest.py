"""Compare the order of gloo that this package knows with the gloo of the torch at hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from ..errors import CommError
from . import sums
from .exchange import bits
from .gloo import GlooOrder

__all__ = ["OrderCheck", "check_order", "require_gloo_order"]

# One element, an odd number, one above the smallest pieces, and one with pieces at the limit of 1 MiB.
SIZES = (1, 31, 4099, 1_700_003)
WORLD = 3
TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """What a comparison with a real backend found."""

    world_size: int
    """Number of ranks."""
    sizes: tuple[int, ...]
    """Numbers of elements that were reduced."""
    differing: tuple[str, ...]
    """Cases in which bits differ; empty if none."""

    def __bool__(self) -> bool:
        return not self.differing


def check_order(
    group: dist.ProcessGroup | None = None,
    *,
    world_size: int = WORLD,
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> OrderCheck:
    """Compare the emulated all_reduce and reduce of gloo with the real ones, bit for bit.

    Args:
        group: a gloo group; all of its ranks call this. None: a group is made in threads of this process.
        world_size: number of ranks of the group that is made.
        sizes: numbers of elements.
        dtypes: of the elements.

    Returns:
        What differed; true where nothing did.

    Raises:
        CommError: this torch has no gloo.

    Example:
        >>> bool(check_order(sizes=[1, 100]))
        True
    """
    if group is not None:
        return _compare(group, group.rank(), _cases(group.size(), sizes, dtypes))
    if not dist.is_gloo_available():
        raise CommError("check_order: this torch has no gloo to compare with.")
    cases = _cases(world_size, sizes, dtypes)
    results = _in_threads(world_size, lambda rank, real: _compare(real, rank, cases))
    return next((result for result in results if not result), results[0])


@cache
def require_gloo_order() -> None:
    """Raise an error unless the gloo of this torch adds as expected; compared once per process.

    Raises:
        CommError: bits differ.
    """
    if not dist.is_gloo_available():
        return
    result = check_order(dtypes=[torch.float32])
    if not result:
        raise CommError(
            f"The gloo of torch {torch.__version__} adds in another order than vescale_comm knows: "
            f"{'; '.join(result.differing)}. Emulated results would not be those of real processes; pass "
            'self_test=False to use the order of older versions, or backend="canonical".'
        )


@dataclass(frozen=True, slots=True)
class _Case:
    """One size and dtype."""

    name: str
    terms: list[Tensor]
    total: Tensor
    root: int
    at_root: Tensor | None


def _cases(world_size: int, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[_Case]:
    order, found = GlooOrder(), []
    for dtype in dtypes:
        for size in sizes:
            terms = [_numbers(size, rank, dtype) for rank in range(world_size)]
            root = size % world_size
            name = f"of {size} elements of {dtype} on {world_size} ranks"
            at_root = sums.reduce(order, terms, root)[root]
            found.append(_Case(name, terms, sums.all_reduce(order, terms), root, at_root))
    return found


def _in_threads(world_size: int, function: Callable[[int, Any], OrderCheck]) -> list[OrderCheck]:
    """Call `function(rank, group)` in one thread per rank, with a real gloo group among them."""
    store = HashStore()
    results: dict[int, OrderCheck] = {}
    errors: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            group = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
            results[rank] = function(rank, group)
        except BaseException as error:  # noqa: BLE001  raised below
            errors.append(error)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


def _compare(group: Any, rank: int, cases: Sequence[_Case]) -> OrderCheck:
    differing = []
    for case in cases:
        total = case.terms[rank].clone()
        group.allreduce([total]).wait()
        if not torch.equal(bits(total), bits(case.total)):
            differing.append(f"all_reduce {case.name}")
        total = case.terms[rank].clone()
        options = dist.ReduceOptions()
        options.rootRank = case.root
        group.reduce([total], options).wait()
        if rank == case.root and case.at_root is not None and not torch.equal(bits(total), bits(case.at_root)):
            differing.append(f"reduce {case.name}")
    return OrderCheck(group.size(), tuple(dict.fromkeys(case.terms[0].numel() for case in cases)), tuple(differing))


def _numbers(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Return numbers between 2**-15 and 2 of both signs, for which the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(size * 1000 + rank)
    words = torch.randint(-(1 << 31), 1 << 31, (size,), dtype=torch.int32, generator=generator)
    # Random sign, fraction and last four bits of the exponent.
    return (words.bitwise_and_(~0x78000000).bitwise_or_(0x38000000)).view(torch.float32).to(dtype)
