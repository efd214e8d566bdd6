"""A parameter of a sharded module: where the module looks for it, and how it is shown there while it is gathered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .kinds import Kind

__all__ = ["Entry", "Use"]


@dataclass(frozen=True, slots=True)
class Use:
    """An attribute of a module that is the parameter."""

    module: nn.Module
    """The module."""
    attribute: str
    """Name of the attribute."""

    def show(self, full: nn.Parameter) -> None:
        """Let the attribute be the gathered parameter; `module.parameters()` goes on giving the shard."""
        # An attribute of the instance comes before what nn.Module looks up, and costs less.
        self.module.__dict__[self.attribute] = full
        self._refresh(full)

    def hide(self, shard: nn.Parameter) -> None:
        """Let the attribute be the shard again."""
        self.module.__dict__.pop(self.attribute, None)
        self._refresh(shard)

    def _refresh(self, parameter: nn.Parameter) -> None:
        # Recurrent layers of torch keep a list of their weights besides the attributes.
        names: Any = self.module.__dict__.get("_flat_weights_names")
        if names is not None and self.attribute in names:
            self.module.__dict__["_flat_weights"][names.index(self.attribute)] = parameter


@dataclass(slots=True)
class Entry:
    """A parameter, once for all modules that share it."""

    name: str
    """Fully qualified name, the first of several."""
    parameter: nn.Parameter
    """The parameter as it was before."""
    kind: Kind
    """What is to be known about its class."""
    granularity: int = 1
    """Elements that stay on one rank."""
    uses: list[Use] = field(default_factory=list)
    """Who has it as an attribute."""
