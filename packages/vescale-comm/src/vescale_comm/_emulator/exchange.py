"""Where the ranks of one emulated group meet: calls of one collective are matched, checked and carried out.

Inputs are copied when a call is made and outputs are written when it is waited for: a program that forgets to wait
sees old values every time, and one that changes a buffer under way is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MismatchError, TransportError

__all__ = ["Exchange", "Message", "Operation", "bits", "memory", "write"]

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
Finish = Callable[[list[list[Tensor]]], list[list[Tensor]]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a collective by one rank."""

    name: str
    """What the user called, such as "all_reduce"."""
    agreed: str
    """What all ranks must give alike, in words."""
    inputs: Sequence[Tensor]
    """What the rank contributes."""
    outputs: Sequence[Tensor]
    """What is written on it."""
    finish: Finish
    """Makes of the inputs of all ranks the results of all ranks."""
    reduction: str = ""
    """Name of the reduction, where there is one."""
    shown: Sequence[Tensor] | None = None
    """What a recording shows as results; None: the outputs."""
    by_memory: bool = False
    """Whether elements count in the order of memory, as backends do where they work in place."""

    @property
    def seen(self) -> Sequence[Tensor]:
        """What a recording shows as results."""
        return self.outputs if self.shown is None else self.shown


@dataclass(slots=True)
class _Call:
    """A collective that is being gathered."""

    operations: list[Operation | None]
    """By rank; None: has not called yet."""
    copies: list[list[Tensor]]
    """Inputs by rank, as they were when it called."""
    results: list[list[Tensor]] | None = None
    """By rank; None: not all have called yet."""
    read: int = 0
    """How many ranks have taken their results."""


@dataclass(slots=True, eq=False)
class Message:
    """A send or a receive."""

    source: int | None
    """Rank in the group that sends; None: any."""
    target: int
    """Rank in the group that receives."""
    tag: int
    """Both must give the same."""
    tensor: Tensor
    """What is sent, or where it goes."""
    copy: Tensor | None = None
    """What is sent, as it was when it was sent."""
    partner: Message | None = None
    """The other half, once it is there."""


class Exchange:
    """The meeting point of one group."""

    def __init__(self, name: str, ranks: Sequence[int], progress: Callable[[], None]) -> None:
        """Start empty.

        Args:
            name: of the group, for errors.
            ranks: global rank of each rank of the group.
            progress: called when a rank contributes something.
        """
        self.name, self.ranks = name, tuple(ranks)
        self._progress = progress
        self._calls: dict[int, _Call] = {}
        self._sent: list[Message] = []
        self._awaited: list[Message] = []

    def join(self, rank: int, sequence: int, operation: Operation) -> None:
        """Contribute to a collective; the last rank carries it out.

        Args:
            rank: in the group.
            sequence: how many collectives this rank called before on this group.
            operation: what it calls.

        Raises:
            MismatchError: another rank called something else.
        """
        self._progress()
        size = len(self.ranks)
        call = self._calls.setdefault(sequence, _Call([None] * size, [[] for _ in range(size)]))
        for other, earlier in enumerate(call.operations):
            if earlier is not None and earlier.agreed != operation.agreed:
                raise MismatchError(
                    f"Collective {sequence} of group {self.describe()}: rank {self.ranks[rank]} calls "
                    f"{operation.agreed}, but rank {self.ranks[other]} called {earlier.agreed}. All ranks of a group "
                    "must call the same collectives in the same order, with the same shapes and dtypes."
                )
        call.operations[rank] = operation
        call.copies[rank] = [_copy(_seen(tensor, operation)) for tensor in operation.inputs]
        if all(earlier is not None for earlier in call.operations):
            call.results = operation.finish(call.copies)

    def is_done(self, sequence: int) -> bool:
        """Tell whether all ranks have called."""
        call = self._calls.get(sequence)
        return call is None or call.results is not None

    def take(self, rank: int, sequence: int, check: bool) -> None:
        """Write the results of a finished collective into the outputs of a rank.

        Args:
            rank: in the group.
            sequence: which collective.
            check: whether to compare the inputs with what they were when the rank called.

        Raises:
            MismatchError: an input was changed before the rank waited.
        """
        call = self._calls[sequence]
        operation = call.operations[rank]
        if operation is None or call.results is None:
            raise TransportError(f"Collective {sequence} of group {self.describe()} is not finished.")
        if check:
            for index, (tensor, copy) in enumerate(zip(operation.inputs, call.copies[rank], strict=True)):
                if not torch.equal(bits(_seen(tensor, operation)), bits(copy)):
                    raise MismatchError(self._changed(rank, f"input {index} of {operation.agreed}"))
        for tensor, result in zip(operation.outputs, call.results[rank], strict=True):
            write(_seen(tensor, operation), result)
        call.read += 1
        if call.read == len(self.ranks):
            del self._calls[sequence]

    def missing(self, sequence: int) -> list[int]:
        """Return the global ranks that have not called a collective yet."""
        call = self._calls.get(sequence)
        called: Sequence[Any] = call.operations if call is not None else [None] * len(self.ranks)
        return [rank for rank, operation in zip(self.ranks, called, strict=True) if operation is None]

    def send(self, message: Message) -> None:
        """Offer a message; the first receive that fits takes it."""
        self._progress()
        message.copy = _copy(message.tensor)
        self._match(message, self._awaited, self._sent)

    def receive(self, message: Message) -> None:
        """Wait for a message; the first send that fits is taken."""
        self._progress()
        self._match(message, self._sent, self._awaited)

    def _match(self, message: Message, others: list[Message], own: list[Message]) -> None:
        for other in others:
            fits = other.source is None or message.source is None or other.source == message.source
            if fits and other.target == message.target and other.tag == message.tag:
                sent, awaited = (message, other) if message.copy is not None else (other, message)
                if sent.tensor.nbytes != awaited.tensor.nbytes:
                    raise MismatchError(
                        f"Group {self.describe()}, tag {message.tag}: rank {self.ranks[sent.source or 0]} sends "
                        f"{sent.tensor.nbytes} bytes, but rank {self.ranks[sent.target]} receives "
                        f"{awaited.tensor.nbytes}. Both must give tensors of the same size."
                    )
                others.remove(other)
                message.partner, other.partner = other, message
                return
        own.append(message)

    def finish_message(self, message: Message, check: bool) -> None:
        """Complete one half of a matched message: write what came, or check that what was sent is unchanged.

        Raises:
            MismatchError: the tensor was changed before its send was waited for.
        """
        partner = message.partner
        if partner is None:
            raise TransportError("A message is not matched yet.")
        if message.copy is None:
            if partner.copy is not None:
                message.tensor.data.copy_(_as(partner.copy, message.tensor))
        elif check and not torch.equal(bits(message.tensor), bits(message.copy)):
            rank = message.source or 0
            raise MismatchError(self._changed(rank, f"what was sent to rank {self.ranks[message.target]}"))

    def describe(self) -> str:
        """Return the ranks of the group in short words."""
        ranks = ", ".join(map(str, self.ranks)) if len(self.ranks) <= 8 else f"{self.ranks[0]}..{self.ranks[-1]}"
        return f"{self.name} (ranks {ranks})"

    def _changed(self, rank: int, what: str) -> str:
        return (
            f"Group {self.describe()}, rank {self.ranks[rank]}: {what} was changed after the call and before its "
            "wait. On a real backend that is a race; wait for the work first."
        )


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers of the same size, flat: equal bits compare equal, unlike numbers."""
    return tensor.detach().contiguous().reshape(-1).view(WORDS[tensor.element_size()])


def write(tensor: Tensor, result: Tensor) -> None:
    """Copy a result into an output, behind the back of autograd, as a real backend does.

    Raises:
        MismatchError: the sizes or dtypes differ.
    """
    if tensor.numel() != result.numel() or tensor.dtype != result.dtype:
        raise MismatchError(
            f"An output is {tensor.dtype} {tuple(tensor.shape)}, but the result is {result.dtype} "
            f"{tuple(result.shape)}. They must have the same dtype and number of elements."
        )
    # Not `detach`, which shares the version counter: real backends do not count as changes either.
    tensor.data.copy_(result.view(tensor.shape))


def memory(tensor: Tensor, name: str) -> Tensor:
    """Return a flat view of a tensor in the order of its memory.

    Raises:
        ValueError: its memory has gaps, which real backends overwrite.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    strides = tensor.stride()
    if not tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).is_contiguous():
        raise ValueError(
            f"{name}: needs a tensor without gaps in memory; got shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}. Real backends change the elements between them; pass a contiguous copy."
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _seen(tensor: Tensor, operation: Operation) -> Tensor:
    """Return a tensor as the backend sees it."""
    return memory(tensor, operation.name) if operation.by_memory else tensor


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _as(sent: Tensor, like: Tensor) -> Tensor:
    """Return bits that were sent as numbers of another dtype, if they have another one."""
    return sent.reshape(-1).view(like.dtype).view(like.shape)
