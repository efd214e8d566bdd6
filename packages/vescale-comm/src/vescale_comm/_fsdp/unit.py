"""A unit: a module whose parameters are gathered together, just before it runs, and given back after it."""

from __future__ import annotations

import weakref
from enum import Enum

from torch import nn

from .._transport import Transport, Work
from ..errors import StaleParameterError, TransportError
from .flat import Flat
from .gradients import Gradients

__all__ = ["State", "Unit"]


class State(Enum):
    """Where the parameters of a unit are."""

    SHARDED = "sharded"
    """Each rank has its shard only."""
    GATHERING = "gathering"
    """They are on their way."""
    GATHERED = "gathered"
    """They are here, and the modules see them."""


class Unit:
    """Parameters that are gathered together."""

    def __init__(self, index: int, name: str, module: nn.Module, keep: bool) -> None:
        """Describe it; `flats` and `gradients` are filled later.

        Args:
            index: number among the units.
            name: of the module in the root.
            module: whose forward needs the parameters.
            keep: leave the parameters gathered from forward to backward.
        """
        self.index, self.name, self.module, self.keep = index, name, module, keep
        self.modules: list[nn.Module] = []
        """Modules inside that belong to no unit further in."""
        self.flats: list[Flat] = []
        """Their parameters."""
        self.gradients: list[Gradients] = []
        """One for each of `flats`."""
        self.state = State.SHARDED
        self.calls: weakref.WeakSet[object] = weakref.WeakSet()
        """Forwards whose backward may still come: they die with the graph."""
        self.recomputed = 0
        """Forwards since the last backward that autograd did not record, though it recorded what is around them."""
        self.repeats = False
        """Whether it was needed again after its parameters had been given back."""
        self.task = -1
        """The run of autograd in which its backward goes on."""
        self.is_deferred = False
        """Whether more gradients may come in after all of them came once: then it is reduced at the end."""
        self.active: set[object] = set()
        """Calls whose backward has begun and not ended."""
        self.missing: set[tuple[int, int]] = set()
        """Gradients, as (flat, index), that have not come in during this backward."""
        self._works: list[Work] = []
        self._written: list[list[int]] = []

    def __str__(self) -> str:
        return self.name or "the root"

    def gather(self, transport: Transport) -> None:
        """Begin to gather the parameters.

        Raises:
            TransportError: the transport has failed.
        """
        self.state = State.GATHERING
        try:
            for flat in self.flats:
                self._works.append(flat.gather(transport))
        except TransportError as error:
            raise self._lost(error) from error

    def wait(self) -> None:
        """Finish gathering, and let the modules see the parameters.

        Raises:
            TransportError: they do not come; the text names the unit.
        """
        if self.state is not State.GATHERING:
            return
        try:
            for work in self._works:
                work.wait()
        except TransportError as error:
            raise self._lost(error) from error
        self._works.clear()  # not if the wait was interrupted: they still go on then
        self.show()

    def _lost(self, error: TransportError) -> TransportError:
        """Give up gathering, and return the error to raise."""
        # The memory stays, for what is under way may still write to it.
        self._works.clear()
        self.state = State.SHARDED
        return TransportError(f"While the parameters of {self} were gathered: {error}")

    def show(self) -> None:
        """Let the modules see the parameters, which are here."""
        self.state = State.GATHERED
        self._written = [flat.full_versions() for flat in self.flats]
        for flat in self.flats:
            flat.show()

    def free(self) -> None:
        """Give the memory of the parameters back.

        Raises:
            StaleParameterError: a gathered parameter was written to, which would be lost.
        """
        if self.state is State.GATHERING:
            self.wait()
        if self.state is State.SHARDED:
            return
        for flat in self.flats:
            flat.hide()
            flat.free()
        self.state = State.SHARDED
        self.check_written()

    def check_written(self) -> None:
        """Refuse writes to gathered parameters, once.

        Raises:
            StaleParameterError: one was written to, which would be lost.
        """
        before, self._written = self._written, [flat.full_versions() for flat in self.flats]
        if before == self._written:
            return
        names = [
            entry.name
            for flat, old, new in zip(self.flats, before, self._written, strict=True)
            for entry, a, b in zip(flat.entries, old, new, strict=True)
            if a != b
        ]
        raise StaleParameterError(
            f"{', '.join(names)}: the gathered parameter was written to, which the shards do not see. Write inside of "
            f"`with full_parameters(module, write=True):`."
        )

    def accept_writes(self, module: nn.Module | None = None) -> None:
        """Take over into the shards what was written to the gathered parameters, or to those of one module."""
        for flat in self.flats:
            flat.keep_own(module)
        self._written = [flat.full_versions() for flat in self.flats]

    def check_places(self) -> None:
        """Refuse to gather what nobody updates any more; see `Flat.check_places`."""
        for flat in self.flats:
            flat.check_places()

    def versions(self) -> int:
        """Return a number that grows when a shard is changed."""
        return sum(flat.versions() for flat in self.flats)

    @property
    def is_frozen_partly(self) -> bool:
        """Whether backward may need parameters that bring no gradient, by which one would see that it is done."""
        return any(not s.requires_grad and s.is_floating_point() for flat in self.flats for s in flat.shards)

    def expected(self) -> set[tuple[int, int]]:
        """Return the gradients that backward can bring, as (flat, index)."""
        return {
            (number, index)
            for number, flat in enumerate(self.flats)
            for index, shard in enumerate(flat.shards)
            if shard.requires_grad
        }
