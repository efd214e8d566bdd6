"""Collectives through memory that the ranks of one host share: each rank reads the numbers of the others in place.

A buffer from `allocate` is summed or gathered where it is; any other goes through a copy in shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MismatchError, TransportError
from .call import Call, broadcast_of, flat_buffer, flat_equal_parts, reduction
from .interface import Work
from .peer import PeerTransport
from .shared_board import ARRIVED, COMMON, DIRECT, NOWHERE, REDUCED, STAGED, Place, Post
from .shared_engine import Collective, Engine, Steps, group_timeout
from .shared_places import Places
from .shared_setup import meet
from .sums import BLOCK, add_in_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SharedTransport"]

SMALL = 1 << 15
"""Bytes up to which every rank sums a whole all_reduce by itself, which saves a meeting of the ranks."""

logger = logging.getLogger(__name__)


class SharedTransport:
    """Ranks of one host on CPU.

    Nothing happens in the background: sums are computed in `wait`, and in calls that start other collectives.
    """

    name = "shared"
    canonical = True

    def __init__(self, group: ProcessGroup, *, timeout: timedelta | None = None) -> None:
        """Meet the other ranks; all of them must call this.

        Args:
            group: of torch.distributed, with a backend that sends from the CPU, all of its ranks on one host.
            timeout: how long a `wait` may take; None: the time-out of the group.

        Raises:
            TransportError: on all ranks, if ranks are on different hosts or one of them cannot make shared memory.
        """
        self.rank, self.size = group.rank(), group.size()
        carrier = PeerTransport(group)
        try:
            board = meet(carrier)
        finally:
            carrier.close()
        self._places = Places(board.pids)
        self._engine = Engine(board, self._places, (timeout or group_timeout(group)).total_seconds())

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in shared memory, or in private memory where there is no more of it (which is logged)."""
        if device.type != "cpu":
            raise ValueError(f"device: transport shared is for the CPU; got {device}.")
        if not numel:
            return torch.zeros(0, dtype=dtype)
        try:
            with self._engine.lock:
                return self._places.allocate(numel * dtype.itemsize).view(dtype)
        except (OSError, MemoryError) as error:
            logger.warning("rank %d: no shared memory for %d x %s: %s", self.rank, numel, dtype, error)
            return torch.zeros(numel, dtype=dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros that are the same memory on all ranks; every rank must call this at the same place.

        What one rank writes the others see, at an unknown time. `all_gather` and `broadcast` of such a buffer, or of
        a part of it, copy nothing: after `wait` everybody sees what the ranks wrote to their parts before. A rank
        must not write again before it knows that all others have read.

        Args:
            numel: number of elements.
            dtype: of the elements.

        Raises:
            TransportError: rank 0 of the group could not make it.
        """
        nbytes = max(numel, 1) * dtype.itemsize
        call = Call("allocate_common", numel, dtype)
        made: list[Tensor] = []

        def steps(run: Collective) -> Steps:
            posts = yield from self._engine.arrive(run)
            if self.rank:
                made.append(self._places.join_common(0, posts[0].place, nbytes))
            yield from self._engine.leave(run, free=False)

        with self._engine.lock:
            self._engine.check()
            place = Place(NOWHERE)
            if self.rank == 0:
                try:
                    memory, place = self._places.make_common(nbytes)
                except (OSError, MemoryError) as error:
                    raise self._engine.fail(TransportError(f"rank 0: {call}: {error}")) from error
                made.append(memory)
            run = self._engine.start(call, place, steps)
        run.wait()
        return made[0].view(dtype)[:numel]

    def reduce_scatter(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum the own part of all buffers; see `Transport`."""
        call = reduction("reduce_scatter", buffer, divisor, accumulate)
        own = flat_equal_parts(buffer, self.size)[self.rank]
        flat = buffer.detach()
        start, stop = self.rank * own.numel(), (self.rank + 1) * own.numel()

        def fill(staging: Tensor) -> None:
            # The own part is read where it is.
            staging[:start].copy_(flat[:start])
            staging[stop:].copy_(flat[stop:])

        def steps(run: Collective) -> Steps:
            posts = yield from self._engine.arrive(run)
            terms = [own if q == self.rank else self._view(q, posts[q], call, start, stop) for q in range(self.size)]
            add_in_order(terms, own, divisor, accumulate)
            yield from self._engine.leave(run, free=run.staging is not None)

        return self._start(call, flat, steps, fill)

    def all_gather(self, buffer: Tensor) -> Work:
        """Copy the parts of others; see `Transport`."""
        call = Call("all_gather", buffer.numel(), buffer.dtype)
        parts = flat_equal_parts(buffer, self.size)
        own = parts[self.rank]
        numel = own.numel()

        def steps(run: Collective) -> Steps:
            posts = yield from self._engine.arrive(run)
            common = self._is_common(run, posts)
            for q in [] if common else self._engine.others:
                start = 0 if posts[q].place.kind == STAGED else q * numel
                parts[q].copy_(self._view(q, posts[q], call, start, start + numel))
            yield from self._engine.leave(run, free=common or run.staging is not None)

        return self._start(call, buffer.detach(), steps, lambda staging: staging.copy_(own), numel)

    def all_reduce(self, buffer: Tensor, *, divisor: float = 1, accumulate: torch.dtype | None = None) -> Work:
        """Sum a part of all buffers, and write it to all; see `Transport`."""
        call = reduction("all_reduce", buffer, divisor, accumulate)
        flat = flat_buffer(buffer)

        def whole(run: Collective) -> Steps:
            posts = yield from self._engine.arrive(run)
            add_in_order(self._views(run, posts, flat), flat, divisor, accumulate)
            yield from self._engine.leave(run, free=True)

        def by_parts(run: Collective) -> Steps:
            posts = yield from self._engine.arrive(run)
            places = [view.tensor_split(self.size) for view in self._views(run, posts, flat)]
            terms = [parts[self.rank] for parts in places]
            if all(post.place.kind == DIRECT for post in posts):
                self._sum_to_all(terms, call)
            else:
                add_in_order(terms, terms[self.rank], divisor, accumulate)
                goals = flat.tensor_split(self.size)
                if run.staging is not None:
                    goals[self.rank].copy_(terms[self.rank])
                self._engine.board.mark(run.number, REDUCED)
                for q in self._engine.others:
                    yield from self._engine.until(q, run, REDUCED)
                    goals[q].copy_(places[q][q])
            yield from self._engine.leave(run, free=run.staging is not None)

        if call.nbytes <= SMALL:
            return self._start(call, flat, whole, lambda staging: staging.copy_(flat), stage=True)
        return self._start(call, flat, by_parts, lambda staging: staging.copy_(flat))

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Copy the buffer of one rank; see `Transport`."""
        call, flat = broadcast_of(buffer, source, self.size)

        def sending(run: Collective) -> Steps:
            yield from self._engine.leave(run, free=run.staging is not None or run.place.kind == COMMON)

        def receiving(run: Collective) -> Steps:
            yield from self._engine.until(source, run, ARRIVED)
            post = self._engine.read(source, run)
            if post.place.kind != COMMON or post.place != self._places.find(flat):
                flat.copy_(self._engine.view(source, post, 0, flat.numel(), torch.uint8))
            yield from self._engine.leave(run, free=True)

        if self.rank != source and flat.numel():
            return self._engine.start(call, Place(NOWHERE), receiving)
        return self._start(call, flat, sending, lambda staging: staging.copy_(flat))

    def close(self) -> None:
        """Let go of shared memory; collectives under way must be finished."""
        self._engine.close()

    def _start(
        self,
        call: Call,
        flat: Tensor,
        steps: Callable[[Collective], Steps],
        fill: Callable[[Tensor], object],
        numel: int | None = None,
        stage: bool = False,
    ) -> Work:
        if flat.device.type != "cpu":
            raise ValueError(f"buffer: transport shared is for the CPU; got a tensor on {flat.device}.")
        if not flat.numel():
            return _Nothing()
        with self._engine.lock:
            self._engine.check()
            place, staging = self._places.find(flat), None
            if place is not None and place.kind == COMMON and call.operation not in ("all_gather", "broadcast"):
                raise ValueError(
                    f"buffer: {call.operation} of memory that all ranks have in common makes no sense: "
                    "there is one buffer, not one per rank. Use a buffer from allocate."
                )
            if place is None or stage:
                nbytes = (flat.numel() if numel is None else numel) * flat.dtype.itemsize
                try:
                    staging, place = self._places.stage(nbytes)
                except (OSError, MemoryError) as error:
                    raise self._engine.fail(TransportError(f"rank {self.rank}: {call}: {error}")) from error
                fill(staging[:nbytes].view(flat.dtype))
            return self._engine.start(call, place, steps, staging)

    def _view(self, peer: int, post: Post, call: Call, start: int, stop: int) -> Tensor:
        return self._engine.view(peer, post, start, stop, call.dtype)

    def _views(self, run: Collective, posts: list[Post], flat: Tensor) -> list[Tensor]:
        own = flat if run.staging is None else run.staging[: flat.nbytes].view(flat.dtype)
        ranks = range(self.size)
        return [own if q == self.rank else self._view(q, posts[q], run.call, 0, flat.numel()) for q in ranks]

    def _sum_to_all(self, terms: list[Tensor], call: Call) -> None:
        # Nobody else touches this part of any buffer, so sums can go to all of them at once, from the cache.
        block = BLOCK * torch.get_num_threads()
        for at in range(0, terms[0].numel(), block):
            blocks = [term[at : at + block] for term in terms]
            add_in_order(blocks, blocks[self.rank], call.divisor, call.accumulate)
            for q in self._engine.others:
                blocks[q].copy_(blocks[self.rank])

    def _is_common(self, run: Collective, posts: list[Post]) -> bool:
        own = run.place
        for q, post in enumerate(posts):
            if COMMON in (own.kind, post.place.kind) and (own.serial, own.offset) != (
                post.place.serial,
                post.place.offset,
            ):
                raise MismatchError(
                    f"Collective {run.number}, {run.call}: rank {self.rank} and rank {q} gave buffers of which one is "
                    "in memory that all ranks have in common, and the other is not, or elsewhere in it."
                )
        return own.kind == COMMON


class _Nothing:
    """A collective of no numbers."""

    def wait(self) -> None:
        """Return at once."""
