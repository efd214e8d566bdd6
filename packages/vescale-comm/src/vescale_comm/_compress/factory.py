"""How a user says which compressor is wanted: a name, a factory, or none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._plan import BufferPlan
from .interface import MEMBERS
from .registry import compressor_named

__all__ = ["compressor_factory"]


def compressor_factory(compressor: Any, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return what makes the compressor of a bucket from its plan, dtype and device; None for none.

    Args:
        compressor: a name, such as "int8", a factory, or None.
        options: of the factory.

    Raises:
        TypeError: it is none of them, or the factory has no such options, or there are options for nothing.
        ValueError: there is no compressor of that name.
    """
    if compressor is None:
        if options:
            raise TypeError(f"compressor_options: {dict(options)} were given without a compressor.")
        return None
    factory = compressor_named(compressor) if isinstance(compressor, str) else compressor
    if not callable(factory):
        raise TypeError(f"compressor: needs a name or a function of plan, dtype and device; got {compressor!r}.")
    _check_options(factory, compressor, options)
    return _Factory(factory, compressor, options)


class _Factory:
    """Makes compressors with the options of the user."""

    def __init__(self, factory: Callable[..., Any], given: Any, options: Mapping[str, Any]) -> None:
        self._factory, self._given, self._options = factory, given, options
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        self.label = f"{name} {dict(sorted(options.items()))}" if options else name
        """What ranks must agree on."""

    def __call__(self, plan: BufferPlan, dtype: torch.dtype, device: torch.device) -> Any:
        """Make the compressor of a bucket."""
        made = self._factory(plan, dtype, device, **self._options)
        missing = [member for member in MEMBERS if not hasattr(made, member)]
        if missing:
            raise TypeError(f"compressor: {self._given!r} made {made!r:.200}, which lacks {', '.join(missing)}.")
        return made


def _check_options(factory: Callable[..., Any], compressor: Any, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters if parameter.kind is not parameter.POSITIONAL_ONLY][3:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"compressor_options: {compressor!r} has no option {', '.join(unknown)}; "
            f"it has {', '.join(known) or 'none'}."
        )
