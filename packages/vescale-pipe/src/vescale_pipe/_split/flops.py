"""Estimated cost of what runs on meta: FLOPs of matrix products and convolutions, plus one per number made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .tree import leaves
from .values import Node

__all__ = ["counted"]


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += float(formula(*args, **(kwargs or {}), out_val=out))
        elif not any(result.alias_info for result in func._schema.returns):  # views cost nothing
            self.total += sum(leaf.numel() for leaf in leaves(out) if isinstance(leaf, Tensor))
        return out


@contextlib.contextmanager
def counted(node: Node, wanted: bool) -> Iterator[None]:
    """Add to `node.cost` what runs inside, if wanted."""
    if not wanted:
        yield
        return
    counter = _Counter()
    with counter:
        yield
    node.cost += counter.total
