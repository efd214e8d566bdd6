"""The process group of an emulated world: what torch.distributed, DDP and DTensor call, in this process.

torch calls these methods under several names, from Python and from C++, and the names change between versions: hence
the aliases at the end of the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from . import moves, recorder
from .combine import operation
from .exchange import Exchange, Message, Operation
from .orders import Order
from .work import EmulatedWork

__all__ = ["EmulatedGroup", "is_emulated"]

# The signatures of torch have overloads that change between versions.
ProcessGroup: Any = dist.ProcessGroup


class EmulatedGroup(ProcessGroup):  # type: ignore[misc]
    """One rank's handle of a group; the ranks meet in an `Exchange`."""

    def __init__(self, exchange: Exchange, rank: int, order: Order, store: Store, check: bool) -> None:
        """Take the meeting point.

        Args:
            exchange: shared by the ranks of the group.
            rank: in the group.
            order: in which sums add.
            store: of the group.
            check: whether buffers changed under way are found.
        """
        super().__init__(rank, len(exchange.ranks))
        self._exchange, self._place, self._order, self._check = exchange, rank, order, check
        self._store, self._description = store, ""
        self._sequence = 0
        self._batch: list[EmulatedWork] | None = None

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Sum one tensor; see `dist.all_reduce`."""
        name, factor = _reduction(opts, op)
        return self._start(moves.all_reduce(self._order, _single(tensors, "all_reduce"), name, factor, coalesced=False))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Sum several tensors; see `dist.all_reduce_coalesced`."""
        name, factor = _reduction(opts)
        return self._start(moves.all_reduce(self._order, list(tensors), name, factor, coalesced=True))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None, root: Any = None) -> Any:
        """Sum at one rank; see `dist.reduce`."""
        name, factor = _reduction(opts, op)
        (tensor,) = _single(tensors, "reduce")
        root = _root(opts, root)
        return self._start(moves.reduce(self._order, tensor, name, factor, root, self._place, self.size()))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None, root: Any = None) -> Any:
        """Copy from one rank; see `dist.broadcast`."""
        return self._start(moves.broadcast(_several(tensors), _root(opts, root), self._place))

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy from all to all; see `dist.all_gather`."""
        (tensor,) = _single(input_tensors, "all_gather")
        outputs = output_tensors[0] if isinstance(output_tensors[0], (list, tuple)) else output_tensors
        return self._start(moves.all_gather(outputs, tensor))

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        """Copy several tensors from all to all; see `dist.all_gather_coalesced`."""
        works = [self._start(moves.all_gather(outs, tensor)) for outs, tensor in _columns(output_lists, input_list)]
        return _together(works)

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Copy from all into one tensor on all; see `dist.all_gather_into_tensor`."""
        return self._start(moves.all_gather_tensors([output], [input], coalesced=False))

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Copy several tensors from all into one each; called by functional collectives."""
        return self._start(moves.all_gather_tensors(list(outputs), list(inputs), coalesced=True))

    def gather(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy from all to one; see `dist.gather`."""
        (tensor,) = _single(input_tensors, "gather")
        root = _root(opts, None)
        outputs = output_tensors[0] if output_tensors and self._place == root else []
        return self._start(moves.gather(outputs, tensor, root))

    def scatter(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Copy from one to each; see `dist.scatter`."""
        (output,) = _single(output_tensors, "scatter")
        root = _root(opts, None)
        inputs = input_tensors[0] if input_tensors and self._place == root else []
        return self._start(moves.scatter(output, inputs, root))

    def reduce_scatter(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None
    ) -> Any:
        """Sum lists and keep one tensor per rank; see `dist.reduce_scatter`."""
        name, factor = _reduction(opts, op)
        (output,) = _single(output_tensors, "reduce_scatter")
        inputs = input_tensors[0] if isinstance(input_tensors[0], (list, tuple)) else input_tensors
        return self._start(moves.reduce_scatter(self._order, output, inputs, name, factor))

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        """Sum tensors and keep one part per rank; see `dist.reduce_scatter_tensor`."""
        name, factor = _reduction(opts)
        return self._start(moves.reduce_scatter_tensors(self._order, [output], [input], name, factor, coalesced=False))

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Sum several tensors and keep one part of each per rank; called by functional collectives."""
        name, factor = _reduction(opts)
        return self._start(
            moves.reduce_scatter_tensors(self._order, list(outputs), list(inputs), name, factor, coalesced=True)
        )

    def alltoall(self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Exchange lists; see `dist.all_to_all`."""
        return self._start(moves.all_to_all("all_to_all", list(output_tensors), list(input_tensors)))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        opts: Any = None,
        timeout: Any = None,
    ) -> Any:
        """Exchange parts of one tensor; see `dist.all_to_all_single`."""
        parts = _split(input, input_split_sizes, self.size(), "input")
        places = _split(output, output_split_sizes, self.size(), "output")
        return self._start(moves.all_to_all("all_to_all_single", places, parts), (input, output))

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for all; see `dist.barrier`."""
        return self._start(moves.barrier())

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all; a rank that does not come is found as a deadlock."""
        self.barrier().wait()

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send to a rank; finished when the other one has asked for it, as on gloo."""
        tensor = _contiguous(tensors, "send")
        message = Message(self._place, dstRank, tag, tensor)
        token = recorder.begin("send", "", self._exchange.ranks, [tensor], self._exchange.ranks[dstRank])
        self._exchange.send(message)
        return self._message(message, f"rank {self._exchange.ranks[dstRank]} to receive with tag {tag}", token)

    def recv(self, tensors: Any, srcRank: int | None, tag: int = 0) -> Any:
        """Receive from a rank."""
        tensor = _contiguous(tensors, "recv")
        source = None if srcRank is None or srcRank < 0 else srcRank
        sender = "any rank" if source is None else f"rank {self._exchange.ranks[source]}"
        message = Message(source, self._place, tag, tensor)
        peer = -1 if source is None else self._exchange.ranks[source]
        token = recorder.begin("recv", "", self._exchange.ranks, [], peer)
        self._exchange.receive(message)
        return self._message(message, f"{sender} to send with tag {tag}", token)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from the rank that sent first; in an emulated world that is always the same one."""
        return self.recv(tensors, None, tag)

    def _message(self, message: Message, what: str, token: Any) -> EmulatedWork:
        def complete() -> list[Tensor]:
            self._exchange.finish_message(message, self._check)
            if message.copy is None and message.partner is not None and message.partner.source is not None:
                work._sender = message.partner.source
            recorder.end(token, [] if message.copy is not None else [message.tensor])
            return [message.tensor]

        work = EmulatedWork(
            lambda: message.partner is not None, complete, lambda: f"{what}, in group {self._exchange.describe()}"
        )
        return self._batched(work)

    def _start(self, started: Operation, whole: tuple[Tensor, Tensor] | None = None) -> EmulatedWork:
        sequence = self._sequence
        self._sequence += 1
        exchange = self._exchange
        for tensor in (*started.inputs, *started.outputs):
            if not self._order.carries(tensor.dtype):
                raise RuntimeError(
                    f"{started.name}: the collectives of {self._order.name} do not take {tensor.dtype}; "
                    "send its bytes, tensor.view(torch.uint8), where no numbers are added."
                )
        inputs = started.inputs if whole is None else whole[:1]
        token = recorder.begin(started.name, started.reduction, exchange.ranks, inputs)
        exchange.join(self._place, sequence, started)

        def complete() -> list[Tensor]:
            exchange.take(self._place, sequence, self._check)
            recorder.end(token, started.seen if whole is None else whole[1:])
            return list(started.outputs)

        def what() -> str:
            missing = exchange.missing(sequence)
            names = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return f"{started.agreed}, collective {sequence} of group {exchange.describe()}, missing ranks {names}"

        return self._batched(EmulatedWork(lambda: exchange.is_done(sequence), complete, what))

    def _batched(self, work: EmulatedWork) -> EmulatedWork:
        if self._batch is not None:
            self._batch.append(work)
        return work

    def start_coalescing(self, device: Any = None) -> None:
        """Collect works until `end_coalescing`."""
        self._batch = []

    def end_coalescing(self, device: Any = None) -> Any:
        """Return one work for all that was started since `start_coalescing`."""
        works, self._batch = self._batch or [], None
        return _together(works)

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def shutdown(self) -> None:
        """Hold nothing, so give back nothing."""

    def abort(self) -> None:
        """Hold nothing, so give back nothing."""

    @property
    def group_name(self) -> Any:
        """Name that torch gave the group."""
        return self._exchange.name

    @property
    def group_desc(self) -> str:
        """Description that torch gave the group."""
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    def getGroupName(self) -> str:
        """Return the name of the group; called from C++."""
        return self._exchange.name

    def getBackendName(self) -> str:
        """Return the name of the order."""
        return f"emulated:{self._order.name}"

    def __repr__(self) -> str:
        return f"EmulatedGroup({self._exchange.describe()}, rank {self._place}, {self._order.name})"

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing


def is_emulated(group: Any) -> bool:
    """Tell whether a process group is one of an emulated world.

    Args:
        group: a process group, or None for the default one.
    """
    if group is None:
        group = dist.group.WORLD
    return isinstance(group, EmulatedGroup)


def _reduction(opts: Any, op: Any = None) -> tuple[str, Any]:
    """Return the name of a reduction and its factor, whichever way it was passed."""
    chosen = op if op is not None else getattr(opts, "reduceOp", opts)
    chosen = dist.ReduceOp.SUM if chosen is None else chosen
    name = operation(chosen)
    return name, getattr(chosen, "factor", None) if name == "premul_sum" else None


def _root(opts: Any, root: Any) -> int:
    if root is not None:
        return int(root)
    return int(getattr(opts, "rootRank", opts if isinstance(opts, int) else 0))


def _several(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _single(tensors: Any, name: str) -> list[Tensor]:
    found = _several(tensors)
    if len(found) != 1:
        raise ValueError(f"{name}: takes one tensor; got {len(found)}.")
    return found


def _contiguous(tensors: Any, name: str) -> Tensor:
    (tensor,) = _single(tensors, name)
    if not tensor.is_contiguous():
        raise RuntimeError(f"{name}: needs a contiguous tensor; got strides {tensor.stride()}.")
    return tensor


def _columns(output_lists: Any, inputs: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
    """Turn outputs by rank and tensor into outputs by tensor and rank."""
    return [([outputs[index] for outputs in output_lists], tensor) for index, tensor in enumerate(inputs)]


def _split(tensor: Tensor, sizes: Any, world: int, name: str) -> list[Tensor]:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not sizes:
        if rows % world:
            raise ValueError(f"all_to_all_single: {name} has {rows} rows, which {world} ranks do not divide.")
        sizes = [rows // world] * world
    if len(sizes) != world or sum(sizes) != rows:
        raise ValueError(f"all_to_all_single: {name}_split_sizes {sizes} do not fit {rows} rows and {world} ranks.")
    return list(torch.split(tensor, list(sizes)))


def _together(works: Sequence[EmulatedWork]) -> EmulatedWork:
    """Return one work that is finished when all of them are."""

    def complete() -> list[Tensor]:
        return [tensor for work in works for tensor in work.result()]

    def what() -> str:
        return "; ".join(work._what() for work in works if not work._ready())

    ready: Callable[[], bool] = lambda: all(work._ready() for work in works)  # noqa: E731
    return EmulatedWork(ready, complete, what)
