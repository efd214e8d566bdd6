"""The parameters of one bucket: views of one flat buffer, of which this rank owns a shard, and how they stay fresh.

After an update only the owner of an element has its new value. The gather that brings it to the others is started at
once and waited for where a parameter is used next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._plan import BufferPlan
from .._report.watch import label, watch
from .._transport import Transport, Work
from ..errors import CommError, TransportError
from .partition import Entry
from .parts import Part

__all__ = ["ParameterBuffer"]


class ParameterBuffer:
    """Parameters of a bucket."""

    def __init__(
        self,
        plan: BufferPlan,
        entries: Sequence[Entry],
        parameters: Sequence[Tensor],
        parts: Sequence[Part],
        transport: Transport,
        *,
        main_dtype: torch.dtype | None,
        common: Tensor | None = None,
    ) -> None:
        """Move the parameters into a buffer.

        Args:
            plan: their places.
            entries: what stands in the slots.
            parameters: in the order of the slots.
            parts: what is here of each.
            transport: over the ranks that share the buffer.
            main_dtype: dtype of the values that are updated; None: that of the parameters.
            common: memory for the buffer that all ranks share; None: each rank has its own.
        """
        self.plan, self.entries = plan, entries
        self.parameters, self._parts = list(parameters), list(parts)
        self._transport = transport
        self._common = common is not None
        dtype, device = entries[0].dtype, entries[0].device
        self.flat = transport.allocate(plan.numel, dtype, device) if common is None else common
        """All parameters; views of it are what the model computes with."""
        self.own = self.flat[transport.rank * plan.shard : (transport.rank + 1) * plan.shard]
        """This rank's shard of it."""
        self._work: Work | None = None
        self._copies: list[tuple[Part, Tensor]] = []
        self._views: list[tuple[Part, Tensor, int]] = []
        writes = not self._common or transport.rank == 0
        with torch.no_grad():
            for slot, part in zip(plan.slots, parts, strict=True):
                view = self.flat[slot.offset : slot.stop].view(slot.shape)
                if writes:
                    view.copy_(part.local())
        # Ranks go on from the values of the first one, as a sum of their gradients supposes.
        transport.broadcast(self.flat, 0).wait()
        for slot, part in zip(plan.slots, parts, strict=True):
            self._place(part, self.flat[slot.offset : slot.stop].view(slot.shape))
        same = main_dtype is None or main_dtype == dtype
        self.main = self.own if same else self.own.to(main_dtype)
        """The values that are updated: the shard itself, or its copy in another dtype."""
        self._versions = self._current()

    def _place(self, part: Part, view: Tensor) -> None:
        local = part.local()
        local.data = view
        if part.local().data_ptr() == view.data_ptr():
            self._views.append((part, view, view.data_ptr()))
        else:
            with torch.no_grad():
                part.local().copy_(view)
            self._copies.append((part, view))

    def _current(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def accept(self) -> None:
        """Take the values that parameters have now as given, without a check of who changed them."""
        self._versions = self._current()

    def take_changes(self) -> None:
        """Before an update: take over what the user has written into the parameters since the last one.

        Raises:
            CommError: a parameter has other memory now, or memory common to the ranks was written.
        """
        for number, (part, view, address) in enumerate(self._views):
            local = part.local()
            if local.data_ptr() != address or local.dtype != view.dtype:
                raise CommError(
                    f"The parameter {self._name(view, number)} has left the buffer of its optimizer: it was moved, "
                    f"converted or got new data (module.to(), parameter.data = ...), so updates no longer reach it. "
                    f"Do that first and make the optimizer after it."
                )
        versions = self._current()
        if versions == self._versions:
            return
        if self._common:
            changed = next(n for n, (a, b) in enumerate(zip(versions, self._versions, strict=True)) if a != b)
            raise CommError(
                f"The parameter {self.entries[changed].name} was changed in place, but all ranks of this host share "
                f"its memory, so that each rank's change counts. Make the optimizer with share_parameters=False, or "
                f"call its accept_changes() where the change gives the same however often it is done."
            )
        self.refresh()

    def refresh(self) -> None:
        """Take over values that the parameters have now; where the main copy rounds to them, it is kept."""
        with torch.no_grad():
            for part, view in self._copies:
                view.copy_(part.local())
            if self.main is not self.own:
                kept = self.main.to(self.own.dtype) == self.own
                self.main.copy_(torch.where(kept, self.main, self.own.to(self.main.dtype)))
        self.accept()

    def _name(self, view: Tensor, number: int) -> str:
        offset = view.storage_offset() - self.flat.storage_offset()
        for slot in self.plan.slots:
            if slot.offset == offset and slot.numel == view.numel():
                return slot.name
        return self.entries[number].name

    @property
    def is_fresh(self) -> bool:
        """Whether the newest values are here."""
        return self._work is None

    def publish(self) -> None:
        """After an update: start to bring the new values to all ranks."""
        if self.main is not self.own:
            self.own.copy_(self.main)
        try:
            work = self._transport.all_gather(self.flat)
        except TransportError as error:
            raise self._failed(error) from error
        self._work = watch(work, "all_gather", self._label, self.flat.nbytes)
        # Graphs that saved the old values must not go through backward any more.
        torch.autograd.graph.increment_version(self.parameters)
        self.accept()

    def _failed(self, error: TransportError) -> TransportError:
        return TransportError(f"While new values of {self._label()} were gathered: {error}")

    def _label(self) -> str:
        return label([slot.name for slot in self.plan.slots])

    def wait(self) -> None:
        """Wait until the newest values are here.

        Raises:
            TransportError: they do not come; the text names the parameters.
        """
        work = self._work
        if work is None:
            return
        try:
            work.wait()
        except TransportError as error:
            raise self._failed(error) from error
        self._work = None
        if self._copies:
            with torch.no_grad():
                for part, view in self._copies:
                    part.local().copy_(view)
            self.accept()
