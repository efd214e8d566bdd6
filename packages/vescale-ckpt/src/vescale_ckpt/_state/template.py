"""A state that is to be loaded into, and what a load does with it.

`match` compares the state with the tree of a checkpoint and changes nothing; it tells all that does not fit at once.
Then the loader writes tensors, and `Match.fill` puts values back, rebuilds tuples and calls `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from .items import Item, leaf_names
from .scan import scan
from .stateful import missing_like
from .tree import Row, row_of

__all__ = ["Match", "Record", "Target", "Template", "template"]

Reader = Callable[[int], Any]
"""Gets the local value with a number."""
Action = Callable[[Reader], Any]
"""Returns what is to stand at a place of the state, which may be what stands there."""


class Record(Protocol):
    """A tensor of a checkpoint."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def dtype(self) -> str:
        """Name of its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""


@dataclass(slots=True)
class Template:
    """A state that is to be loaded into."""

    root: Item
    """The state, taken apart; `state_dict` of its objects has been called."""
    leaf_names: dict[int, str]
    """Id of a leaf -> its name."""
    row: Row
    """The distinct tensors."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their first name."""
        return dict(self.row.tensors)

    @property
    def names(self) -> list[str]:
        """Return the names of all leaves."""
        return list(self.leaf_names.values())


def template(state: Any) -> Template:
    """Take a state apart that is to be loaded into.

    Args:
        state: as for saving.

    Raises:
        StateError: something in it cannot be loaded into; the message names the key.

    Example:
        >>> template({"w": torch.zeros(2), "step": 0}).names
        ['w', 'step']
    """
    root = scan(state)
    names = leaf_names(root)
    return Template(root, names, row_of(root, names))


@dataclass(slots=True, eq=False)
class Target:
    """A tensor of the checkpoint, and the memory it goes to."""

    record: int
    """Number of the tensor in the checkpoint."""
    name: str
    """Name in the state."""
    tensor: Tensor | None
    """Where to; None until `Match.allocate`, for a tensor that the state does not have yet."""
    numpy: bool = False
    """Whether the state has a numpy array there."""
    shape: tuple[int, ...] = ()
    """Shape in the checkpoint."""
    dtype: torch.dtype = torch.float32
    """Dtype in the checkpoint."""
    owner: Any = None
    """The object of whose state it is to be a part."""
    path: tuple[Any, ...] = ()
    """Keys within the state_dict of that object."""


@dataclass(slots=True)
class Match:
    """What a load has to do, and what does not fit."""

    targets: list[Target] = field(default_factory=list)
    """Which tensors go where; a tensor may go to several places."""
    missing: list[str] = field(default_factory=list)
    """Names of the state that the checkpoint lacks."""
    unexpected: list[str] = field(default_factory=list)
    """Names of the checkpoint that the state lacks."""
    kinds: list[str] = field(default_factory=list)
    """One line for each place where state and checkpoint have things of different kinds."""
    shared: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of tensors of the checkpoint that would go to one memory."""
    locals: dict[int, str] = field(default_factory=dict)
    """Numbers of the local values that are needed, with their names."""
    kept: set[int] = field(default_factory=set)
    """Numbers of the local values that are not to be filled in."""
    idle: bool = False
    """Whether no name of the state or of the checkpoint is to be loaded, though there are some."""
    action: Action = lambda _: None
    """Fills the state."""

    def allocate(self) -> None:
        """Make the tensors that the state does not have yet."""
        for target in self.targets:
            if target.tensor is None:
                like = missing_like(target.owner, target.path, target.shape, target.dtype)
                target.tensor = torch.empty(target.shape, dtype=target.dtype) if like is None else like

    def keep_locals(self) -> None:
        """Leave this rank's own values as they are."""
        self.kept.update(self.locals)

    def fill(self, local: Reader) -> Any:
        """Put values and objects back, after all tensors have been written.

        Args:
            local: returns this rank's own value of a number.

        Returns:
            The state; another object only where it is itself a tuple or a plain value.
        """
        with torch.no_grad():
            return self.action(local)
