"""The buckets of a sharded optimizer: gradients reduced to shards, parameters gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._compress.saved import give_state, state_of
from .._gradients.agree import check_same
from .._gradients.flags import USED
from .._gradients.reducer import GradientReducer
from .._plan import BufferPlan
from .._shards import ShardTensor, Whole, run_boxes
from .._transport import Transport
from .._transport.choose import transport as make_transport
from ..errors import CommError, PlanError, StaleParameterError
from .groups import Group
from .norms import Term
from .partition import Entry, granularity_of, is_elementwise, partition
from .parts import Part, part_of
from .segments import Member, Segment, cut, used_parts
from .storage import ParameterBuffer

__all__ = ["Buckets"]


class Buckets:
    """Buckets of gradients and parameters over one group of ranks."""

    def __init__(
        self,
        group_or_mesh: dist.ProcessGroup | DeviceMesh | None,
        transport: str | Transport,
        order: str | None,
        *,
        zero: int,
        main_dtype: torch.dtype | None,
        accumulate_dtype: torch.dtype | None,
        bucket_bytes: int,
        average: bool,
        share_parameters: bool,
        compressor: Callable[..., Any] | None = None,
    ) -> None:
        self.group = _group_of(group_or_mesh)
        self.size = self.group.size()
        self._given, self._order = transport, order
        self._zero, self._main_dtype, self._accumulate = zero, main_dtype, accumulate_dtype or main_dtype
        self._bucket_bytes, self._average, self._share = bucket_bytes, average, share_parameters
        self._compressor = compressor
        self._transport: Transport | None = None
        self._named: list[tuple[str, Tensor]] = []
        self._reduced = False
        self.parameters: list[ParameterBuffer] = []
        """Per bucket the buffer of its parameters."""
        self.wholes: dict[str, Whole] = {}
        """Each parameter as a whole, by name."""
        self.number_of: dict[int, int] = {}
        """Bucket of each parameter, by its id."""
        self._parts: dict[str, Part] = {}
        self._slots: dict[str, tuple[int, int]] = {}
        self._names: dict[int, str] = {}

    def add(self, groups: Sequence[Group], first: int, cls: type[torch.optim.Optimizer], plan: Any) -> list[Segment]:
        """Make buckets for groups, and take the parameters into them.

        Args:
            groups: the groups.
            first: number of the first one.
            cls: optimizer of the groups that name none.
            plan: how groups that do not tell are cut.

        Returns:
            This rank's segments.
        """
        named: dict[str, Tensor] = {}
        entries = []
        for number, group in enumerate(groups, first):
            for name, parameter in zip(group.names, group.parameters, strict=True):
                named[name] = parameter
                part = self._parts[name] = part_of(parameter, name)
                local = part.local()
                wanted = plan if group.plan is None else group.plan
                grain = granularity_of(wanted, group.optimizer or cls, name, tuple(local.shape))
                if grain and part.groups:
                    _refuse_parts(group.optimizer or cls, name, part)
                entries.append(Entry(name, tuple(local.shape), local.dtype, local.device, number, grain))
                self.wholes[name] = part.whole
                self._names[id(parameter)] = name
        transport = self._transport
        if transport is None:
            transport = make_transport(self.group, self._given, order=self._order, device=entries[0].device)
            self._transport = transport
        lines = [f"{e.name} {list(e.shape)} {e.dtype} in group {e.group}, blocks of {e.granularity}" for e in entries]
        advice = "Build the model and its groups alike on all ranks."
        check_same(transport, entries[0].device, lines, "the parameters of the optimizer", advice)
        segments: list[Segment] = []
        for bucket_plan, placed in partition(entries, self.size, self._bucket_bytes):
            segments += self._add_bucket(bucket_plan, placed, named, transport)
        self._named += named.items()
        self._make_reducer(transport)
        return segments

    def _add_bucket(
        self, plan: BufferPlan, entries: Sequence[Entry], named: dict[str, Tensor], transport: Transport
    ) -> list[Segment]:
        number = len(self.parameters)
        parameters = [named[entry.name] for entry in entries]
        buffer = ParameterBuffer(
            plan,
            entries,
            parameters,
            [self._parts[entry.name] for entry in entries],
            transport,
            main_dtype=self._main_dtype if entries[0].dtype.is_floating_point else None,
            common=self._common(transport, plan.numel, entries[0]) if self._share else None,
        )
        self.parameters.append(buffer)
        for place, (entry, parameter) in enumerate(zip(entries, parameters, strict=True)):
            self.number_of[id(parameter)] = number
            self._slots[entry.name] = (number, place)
        segments = cut(number, plan, entries, transport.rank)
        for segment in segments:
            segment.attach(buffer.main)
        return segments

    @staticmethod
    def _common(transport: Transport, numel: int, entry: Entry) -> Tensor:
        allocate = getattr(transport, "allocate_common", None)
        if allocate is None or entry.device.type != "cpu":
            raise ValueError(
                f"share_parameters: the transport {transport.name} on {entry.device.type} has no memory that all ranks "
                f'share; pass transport="shared" on one host, or leave share_parameters out.'
            )
        made: Tensor = allocate(numel, entry.dtype)
        return made

    def _make_reducer(self, transport: Transport) -> None:
        old: GradientReducer | None = getattr(self, "reducer", None)
        if old is not None:
            self.drop_gradients()
            old.close()
        self.reducer = GradientReducer(
            self._named,  # type: ignore[arg-type]
            self.group,
            mode="reduce_scatter",
            transport=transport,
            accumulate=self._accumulate,
            divisor=self.size if self._average else 1,
            compressor=self._compressor,
            plans=[buffer.plan for buffer in self.parameters],
            adds=True,
            release=self._zero == 2,
        )
        if old is not None:
            give_state(self.reducer.buckets, state_of(old.buckets))
        at = {id(bucket.plan): bucket for bucket in self.reducer.buckets}
        self._gradients = [at[id(buffer.plan)] for buffer in self.parameters]

    @property
    def with_main(self) -> list[bool]:
        """Return per bucket whether its main parameters are a copy."""
        return [buffer.main is not buffer.own for buffer in self.parameters]

    def finish_gradients(self) -> None:
        """Wait for the sums of gradients; a rank without any takes part with zeros."""
        if self._reduced and not self.reducer.is_open:
            return
        self.reducer.prepare()
        self.reducer.finish()
        self._reduced = True

    def drop_gradients(self) -> None:
        """Forget reduced gradients; what is under way is waited for, since other ranks count on it."""
        if self.reducer.is_launched:
            self.reducer.finish()
        self.reducer.clear()
        self._reduced = False

    def gradient(self, segment: Segment) -> Tensor:
        """Return the gradient of a segment, in the dtype of its tensor."""
        return segment.of(self._gradients[segment.bucket].shard).to(segment.tensor.dtype)

    def used_parts(self, segment: Segment, used: Sequence[Sequence[bool]]) -> tuple[bool, bool]:
        """Return whether some, and whether all parameters of a segment have a gradient."""
        return used_parts(segment, used[segment.bucket])

    def gradient_terms(self, segments: Sequence[Segment], parameters: Sequence[Tensor] | None) -> list[Term]:
        """Return gradients for norms.

        Args:
            segments: all segments.
            parameters: of which; None: all.
        """
        plain = all(not part.groups for part in self._parts.values())
        if plain and (parameters is None or len(parameters) == len(self._named)):
            found = [Term(segment.of(self._gradients[segment.bucket].shard), (self.group,)) for segment in segments]
            return [*found, Term(None, (self.group,))]
        names = list(self._parts) if parameters is None else [self._names[id(parameter)] for parameter in parameters]
        pieces = {member.name: (segment, member) for segment in segments for member in segment.members}
        found = []
        for name in names:
            local = None
            if name in pieces:
                segment, member = pieces[name]
                shard = segment.of(self._gradients[segment.bucket].shard).view(-1)
                local = shard[member.offset : member.offset + member.numel]
            found.append(Term(local, (self.group, *self._parts[name].groups)))
        return found

    def begin_update(self) -> list[list[bool]]:
        """Get gradients and parameters ready for an update.

        Returns:
            Per bucket and slot, whether any rank has a gradient.

        Raises:
            StaleParameterError: a parameter with a gradient was not waited for after the last update.
            CommError: a parameter left its buffer.
        """
        self.finish_gradients()
        self._check_fresh()
        self.wait_all()
        for buffer in self.parameters:
            buffer.take_changes()
        if self._share and self._transport is not None:
            # Nobody may write while another rank still reads.
            self._transport.all_reduce(torch.zeros(1)).wait()
        return [list(bucket.used) for bucket in self._gradients]

    def _check_fresh(self) -> None:
        """Refuse gradients of this rank for parameters whose newest values nobody waited for."""
        used = self.reducer.lanes[0].used
        for buffer, bucket in zip(self.parameters, self._gradients, strict=True):
            if buffer.is_fresh:
                continue
            names = [member.name for member in bucket.members if used[member.index] & USED]
            if names:
                raise StaleParameterError(
                    f"{names[0]} was used in a forward, perhaps with values from before the last step: it was not read "
                    f"from its module, but kept from before. Call finish_param_sync() before such a forward, or make "
                    f"the optimizer with overlap=False."
                )

    def end_update(self, wait: bool) -> None:
        """Send the new values; the gradients are used up.

        Args:
            wait: until all values are here.
        """
        self.publish(wait)
        self.reducer.clear()
        self._reduced = False

    def publish(self, wait: bool) -> None:
        """Send new values of parameters, in the order in which a forward will need them."""
        for buffer in reversed(self.parameters):
            buffer.publish()
        if wait:
            self.wait_all()

    def wait(self, numbers: Sequence[int]) -> None:
        """Wait for the parameters of some buckets."""
        for number in numbers:
            self.parameters[number].wait()

    def wait_all(self) -> None:
        """Wait for all parameters."""
        for buffer in reversed(self.parameters):
            buffer.wait()

    def allocate(
        self, segments: Sequence[Segment], name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """Return an uninitialized tensor for the elements of a parameter here; None if it is not of its shape."""
        whole = self.wholes[name]
        if whole.shape != shape:
            return None
        here: Member | None = None
        for segment in segments:
            here = next((member for member in segment.members if member.name == name), here)
        start, stop = (here.start, here.stop) if here is not None else (0, 0)
        device = self.parameters[self._slots[name][0]].flat.device
        empty = torch.empty(stop - start, dtype=dtype, device=device)
        return ShardTensor.of_boxes(empty, shape, run_boxes(whole.boxes, start, stop))

    def close(self) -> None:
        """Take the hooks away."""
        self.reducer.close()


def _refuse_parts(cls: type[torch.optim.Optimizer], name: str, part: Part) -> None:
    """Refuse to hand a part of a matrix to an optimizer that takes it for the whole."""
    if not is_elementwise(cls):
        raise PlanError(
            f"plan: {name} of shape {list(part.whole.shape)} is sharded over other ranks as well, so {cls.__name__} "
            f"would take this rank's part of it for the whole matrix. Leave it to an elementwise optimizer, or pass "
            f'plan="flat" if {cls.__name__} is one.'
        )


def _group_of(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if given is None:
        if not dist.is_initialized():
            raise CommError(
                "group_or_mesh: there is no default group; call torch.distributed.init_process_group first."
            )
        found = dist.group.WORLD
        assert found is not None
        return found
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(
                f"group_or_mesh: a mesh of {given.ndim} dims; pass the data parallel one of them, such as mesh['dp']."
            )
        return given.get_group()
    return given
