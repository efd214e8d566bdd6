"""What vescale_ckpt gives: its own storage on fsspec, through the hook that other plugins use too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .hookspecs import StorageRegistry

_for_ckpt = pluggy.HookimplMarker("vescale_ckpt")


@_for_ckpt
def vescale_register_storage(registry: StorageRegistry) -> None:
    """Register fsspec for the schemes that nobody else takes, where fsspec is installed."""
    from importlib.util import find_spec

    if find_spec("fsspec") is not None:
        from ._storage.registry import ANY, open_fsspec

        registry.register(ANY, open_fsspec)
