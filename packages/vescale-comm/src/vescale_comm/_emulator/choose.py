"""Orders by name."""

from __future__ import annotations

from .gloo import GlooOrder
from .nccl import NcclRing, NcclTree
from .orders import CanonicalOrder, Order

__all__ = ["ORDERS", "order_named"]

ORDERS: dict[str, Order] = {order.name: order for order in (GlooOrder(), CanonicalOrder(), NcclRing(), NcclTree())}


def order_named(order: str | Order) -> Order:
    """Return an order by its name, or the order itself.

    Raises:
        ValueError: there is none of this name.

    Example:
        >>> order_named("gloo").verified, order_named("nccl_ring").verified
        (True, False)
    """
    if isinstance(order, Order):
        return order
    if order not in ORDERS:
        raise ValueError(f"backend: {order!r} is no order; choose one of {', '.join(ORDERS)}, or pass an Order.")
    return ORDERS[order]
