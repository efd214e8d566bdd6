"""One flat buffer of parameters: the shard that stays, the whole that is gathered when needed, and the gradients.

The whole keeps its storage object for good, since autograd refers to it; giving memory back means to make the storage
empty. Parameters are views of the whole, gradients are copied once into a buffer of the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .._plan import BufferPlan, Piece
from .._report.watch import label, watch
from .._transport import Transport, Work
from ..errors import StaleParameterError
from .entry import Entry
from .info import ShardInfo

__all__ = ["Dtypes", "Flat"]


class Dtypes:
    """Dtypes of one flat buffer."""

    __slots__ = ("accumulate", "compute", "reduce", "store")

    def __init__(self, store: torch.dtype, compute: torch.dtype | None, reduce: torch.dtype | None) -> None:
        """Choose them.

        Args:
            store: of the shards.
            compute: of the gathered parameters and of what is sent to gather them; None: `store`.
            reduce: in which gradients are kept and sent; None: `store`.
        """
        floating = store.is_floating_point
        self.store = store
        self.compute = compute if compute is not None and floating else store
        self.reduce = reduce if reduce is not None and floating else store
        # Sums of many ranks in 16 bits lose what single ranks add.
        self.accumulate = torch.float32 if floating and self.reduce.itemsize < 4 else None


class Flat:
    """The parameters of one unit that share dtypes."""

    def __init__(
        self,
        plan: BufferPlan,
        entries: Sequence[Entry],
        dtypes: Dtypes,
        rank: int,
        groups: tuple[ProcessGroup, ...],
        copies: tuple[ProcessGroup, ...],
        device: torch.device,
        store_device: torch.device,
        pin: bool = False,
    ) -> None:
        """Cut the parameters.

        Args:
            plan: the places.
            entries: one per slot, in the order of the slots.
            dtypes: of shards, parameters and gradients.
            rank: whose shard this process keeps.
            groups: over which the parameters are cut.
            copies: whose ranks keep the same shards.
            device: where the parameters are gathered.
            store_device: where the shards are kept.
            pin: keep the shards in page-locked memory, from which copies to an accelerator are asynchronous.
        """
        self.plan, self.entries, self.dtypes, self.rank = plan, tuple(entries), dtypes, rank
        self.device = device
        self.shard = torch.zeros(plan.shard, dtype=dtypes.store, device=store_device, pin_memory=pin)
        """This rank's part."""
        self.whole = torch.empty(plan.numel, dtype=dtypes.compute, device=device)
        """The gathered buffer; it has memory only while it is needed."""
        self._storage = self.whole.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.pieces: list[Piece | None] = self._own_pieces()
        self.full: list[nn.Parameter] = []
        """What modules see while the buffer is gathered."""
        self.shards: list[nn.Parameter] = []
        """What the optimizer sees."""
        for entry, piece, slot in zip(self.entries, self.pieces, plan.slots, strict=True):
            kind = entry.kind
            start, stop = (piece.start, piece.stop) if piece else (0, 0)
            # Without elements it has memory of its own: in a state dict only tied parameters are the same memory.
            local = self.shard[piece.offset : piece.offset + stop - start] if piece else self.shard.new_empty(0)
            if piece and kind.local.device.type != "meta":
                local.copy_(kind.local.reshape(-1)[start:stop])
            whole = kind.whole  # of the parameter as it is, which becomes the shard below
            # `data` has a count of changes of its own: gathering again is no change of the parameter.
            full = kind.full(self.whole[slot.offset : slot.stop].view(slot.shape).data)
            shard = kind.shard(local.data)
            info = ShardInfo(entry.name, whole.shape, whole, start, stop, groups + kind.spread, copies + kind.copies)
            shard.vescale = info  # type: ignore[attr-defined]
            for use in entry.uses:
                use.module._parameters[use.attribute] = shard
            self.full.append(full)
            self.shards.append(shard)
        self._places = [shard.data_ptr() for shard in self.shards]
        self.free()

    def _own_pieces(self) -> list[Piece | None]:
        mine = {piece.slot.name: piece for piece in self.plan.pieces(self.rank)}
        return [mine.get(slot.name) for slot in self.plan.slots]

    @property
    def own(self) -> Tensor:
        """This rank's part of the gathered buffer."""
        return self.whole[self.rank * self.plan.shard : (self.rank + 1) * self.plan.shard]

    @property
    def trained(self) -> bool:
        """Whether any of the parameters needs a gradient."""
        return any(shard.requires_grad for shard in self.shards)

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in the memory of the gathered buffer."""
        return bool(tensor.untyped_storage()._cdata == self._storage._cdata)

    def allocate(self) -> None:
        """Give the gathered buffer memory; what it holds is undefined."""
        if self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Give the memory of the gathered buffer back."""
        if self._storage.nbytes():
            self._storage.resize_(0)

    def gather(self, transport: Transport) -> Work:
        """Begin to gather the parameters."""
        self.allocate()
        with torch.no_grad():
            self.own.copy_(self.shard, non_blocking=True)
        return watch(transport.all_gather(self.whole), "all_gather", self.label, self.whole.nbytes)

    def label(self) -> str:
        """Return a short name for the parameters."""
        return label([entry.name for entry in self.entries])

    def keep_own(self, module: nn.Module | None = None) -> None:
        """Take over into the shards what was written to the gathered parameters, or to those of one module."""
        with torch.no_grad():
            for entry, piece, shard in zip(self.entries, self.pieces, self.shards, strict=True):
                if piece and (module is None or any(use.module is module for use in entry.uses)):
                    shard.copy_(self.own[piece.offset : piece.offset + shard.numel()])

    def check_places(self) -> None:
        """Refuse to gather what nobody updates any more.

        Raises:
            StaleParameterError: a shard parameter was replaced, or its memory was.
        """
        for entry, shard, place in zip(self.entries, self.shards, self._places, strict=True):
            use = entry.uses[0]
            if use.module._parameters.get(use.attribute) is not shard:
                raise StaleParameterError(
                    f"{entry.name}: the parameter of the module was replaced after fully_shard, so what is gathered "
                    f"would not be it. Change values in place (with torch.no_grad(): p.copy_(...)), or load them by "
                    f"load_state_dict(..., assign=False)."
                )
            if shard.data_ptr() != place:
                raise StaleParameterError(
                    f"{entry.name}: its memory was replaced after fully_shard, such as by module.to(), .half() or "
                    f"p.data = ...; what is gathered would be the old values. Convert the module before fully_shard."
                )

    def versions(self) -> int:
        """Return a number that grows when a shard is changed."""
        return sum(shard._version for shard in self.shards)

    def full_versions(self) -> list[int]:
        """Return numbers that grow when a gathered parameter is changed."""
        return [full._version for full in self.full]

    def show(self) -> None:
        """Let the modules see the gathered parameters."""
        for entry, full, shard in zip(self.entries, self.full, self.shards, strict=True):
            if full.requires_grad != shard.requires_grad:
                full.requires_grad_(shard.requires_grad)
            for use in entry.uses:
                use.show(full)

    def hide(self) -> None:
        """Let the modules see the shards."""
        for entry, shard in zip(self.entries, self.shards, strict=True):
            for use in entry.uses:
                use.hide(shard)

    def gaps(self) -> Iterator[slice]:
        """Yield the parts of the buffer that belong to no parameter."""
        end = 0
        for slot in self.plan.slots:
            if slot.offset > end:
                yield slice(end, slot.offset)
            end = max(end, slot.stop)
        if end < self.plan.numel:
            yield slice(end, self.plan.numel)
