"""From parameters to reduced gradients: hooks count what backward finishes, and complete buckets are launched in order.

A *window* is what is reduced at once: one backward, or several of which all but the last ran under `no_sync`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from .. import _hooks
from .._plan import BufferPlan
from .._transport import Transport
from ..errors import CommError, TransportError
from .backward import NO_TASK, BackwardWatch, current_task
from .bucket import Bucket
from .flags import LATE, ORDER, USED, Row
from .hooks import Hooks, in_one_order
from .lane import BucketOptions, Lane, LaneState, check_agreement, check_lanes, check_mode, digest_of, lines_of
from .member import Member
from .memory import IN_FLIGHT
from .rows import judge, late_buckets, mark_bad, refuse_lost, row_of, used_somewhere
from .settle import lanes_in_new_order, lanes_of_others, learned_order

__all__ = ["GradientReducer"]


class GradientReducer:
    """Reduces the gradients of parameters over ranks, while backward runs.

    All ranks make the same reducers with the same parameters, and run the same number of windows; which parameters a
    backward uses may differ. Results add the ranks in their order (with a canonical transport), whatever the buckets.

    Args:
        parameters: names and parameters, each once, whoever shares it.
        group: the process group of the transport; kept for who asks.
        mode: "all_reduce": every rank gets all results, in `param.grad`; "reduce_scatter": each gets its shard of every
            bucket, in `bucket.shard`, and `param.grad` is None.
        transport: over the ranks of the group.
        bucket_bytes: limit of a bucket.
        accumulate: dtype of buffers, sums and of additions under `no_sync`; None: that of each gradient.
        divisor: by which sums are divided; None: the number of ranks.
        compressor: called with plan, dtype and device of a bucket; what it returns reduces in place of the transport.
        view: let autograd add in the buffers from the start, in place of one copy at the end: less memory where there
            are several backwards per window, slower by a pass of zeroing and adding where there is one.
        plans: of the buckets, in the order of backward; their slots name all parameters. None: made here.
        wait: finish inside `backward()`; else `finish` is called by whoever needs the results.
        adds: in mode "reduce_scatter", what `param.grad` does in the other one: a window adds to the shards that are
            there, until `clear` is called. Off: each window replaces them.
        learn: plan the buckets anew after the first window, in the order in which backward finished the parameters on
            the first rank; in mode "all_reduce" only.
        check_finite: look for gradients that are not finite, before they are summed.
        release: in mode "reduce_scatter", give the memory of a bucket's buffer back when its reduction is over; a
            launch waits if too many are under way, so gradients take the memory of a few buckets.
        others: further lanes: parameters that are reduced over other ranks, or with another divisor.

    Raises:
        MismatchError: the ranks have different parameters.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        group: dist.ProcessGroup | None = None,
        *,
        mode: Literal["all_reduce", "reduce_scatter"] = "all_reduce",
        transport: Transport,
        bucket_bytes: int = 8 << 20,
        accumulate: torch.dtype | None = None,
        divisor: float | None = None,
        compressor: Any = None,
        view: bool = False,
        plans: Sequence[BufferPlan] | None = None,
        wait: bool = False,
        adds: bool = False,
        learn: bool = False,
        check_finite: bool = False,
        release: bool = False,
        others: Sequence[Lane] = (),
    ) -> None:
        check_mode(mode, learn or view)
        self.group = group
        self._options = BucketOptions(mode == "reduce_scatter", bucket_bytes, accumulate, compressor, release)
        self._view, self._wait, self._adds = view, wait, adds
        self._check_finite, self._learning = check_finite, learn
        lanes = [Lane(parameters, transport, transport.size if divisor is None else divisor), *others]
        self._changes = 0
        self._digests = [bytes(8)] * len(lanes)
        check_lanes(lanes)
        check_agreement(lanes, compressor)
        self.lanes = [LaneState(lane, self._options, plans=None if n else plans) for n, lane in enumerate(lanes)]
        """The lanes, the one of `parameters` first."""
        self.weight: float | None = None
        """Factor of this rank's gradients in this window; a number on all ranks, or None on all."""
        self.divides = True
        """Whether weighted sums are divided by the sum of the weights of the first lane's ranks."""
        self._watch = BackwardWatch(self._backward_begins, self._backward_ends, self._backward_broke)
        self._timeline = _hooks.timeline()
        self._sync = True
        self._open = self._flushed = self._prepared = self._failed = False
        self._interrupted, self._next = "", 0
        # The first window launches at its end, to learn what backwards inside backwards add to; not if memory is short.
        self._arrived: list[Member] | None = None if release else []
        self._orders: list[list[str] | None] = []
        self._wanted: list[Lane] | None = None
        self._hooks = Hooks()
        self.buckets: list[Bucket] = []
        """In the order in which they are launched."""
        self._install()

    # -- hooks

    def _install(self) -> None:
        """Put hooks on all parameters, and buckets in their order."""
        self._hooks.renew([member for state in self.lanes for member in state.members])
        self.buckets = in_one_order([state.buckets for state in self.lanes])
        self._state_of = {id(bucket): state for state in self.lanes for bucket in state.buckets}
        for bucket in self.buckets:
            state = self._state_of[id(bucket)]
            for member in bucket.members:
                self._hooks.put(bucket, member, self._hook(state, bucket, member))

    def _hook(self, state: LaneState, bucket: Bucket, member: Member) -> Any:
        watch, touched, index, task_now = self._watch, state.touched, member.index, current_task

        def accumulated(_: Tensor) -> None:
            task = task_now()
            if task != watch.task:
                watch.enter(task)
            if self._flushed:
                self._backward_begins()
            if not self._open:
                self._begin_window()
            touched[index] = 1
            if self._arrived is not None:
                self._arrived.append(member)
            if self._sync and bucket.launched:
                state.used[index] |= LATE
                return
            bucket.place(member)
            if not self._sync:
                return
            if watch.nested:
                bucket.held = member.hold = True
            else:
                bucket.left -= 1
                if bucket.left <= 0 and self._arrived is None:
                    self._advance()

        return accumulated

    def _begin_window(self) -> None:
        refuse_lost(self._interrupted)
        self._open = True
        self._next = 0
        for state in self.lanes:
            state.clear()
        for bucket in self.buckets:
            bucket.open()

    def _backward_begins(self) -> None:
        if self._flushed:
            # Nobody fetched the results of the window before. Gradients that are there belong to the new one already.
            fresh = [(bucket, member, member.param.grad) for bucket in self.buckets for member in bucket.members]
            self._finish()
            for bucket, member, grad in fresh:
                if grad is not None:
                    bucket.add_fresh(member, grad)
        elif self._open:
            for bucket in self.buckets:
                bucket.open()

    def _backward_ends(self) -> None:
        if not (self._sync and self._open):
            return
        try:
            self.flush()
        except TransportError:
            raise
        except Exception:
            self._backward_broke()
            raise
        if self._wait:
            self._finish()

    def _backward_broke(self) -> None:
        """The backward before left with an error. If it had launched buckets, other ranks count on the others, too."""
        if self._sync and self._open and self._next > 0 and not self._flushed:
            self._failed = True
            for bucket in self.buckets[self._next :]:
                bucket.leave_none()
                bucket.launch(bucket.divisor, 1)
            self._send_flags()
            self._finish()

    # -- windows

    def prepare(self) -> None:
        """Get ready for a forward in which gradients are recorded; optional.

        It says that a window is due even if no backward reaches the parameters, and ends one whose backward failed.
        """
        if current_task() != NO_TASK:
            return  # a checkpoint computes something once more
        refuse_lost(self._interrupted)
        if self._watch.left:
            self._watch.forget()
            self._backward_broke()
        self._prepared = True
        if self._view and not self._flushed:
            for bucket in self.buckets:
                bucket.point_at_buffer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only add up gradients on this rank in backwards that run inside; the next one outside reduces all."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @property
    def idle(self) -> bool:
        """Whether nothing happened since the last window."""
        return not (self._open or self._prepared)

    @property
    def syncs(self) -> bool:
        """Whether a backward that ran now would reduce."""
        return self._sync

    def _advance(self) -> None:
        """Launch what is ready, in the order that all ranks keep."""
        while self._next < len(self.buckets) and self.buckets[self._next].ready():
            self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        self._next += 1
        state = self._state_of[id(bucket)]
        if self._adds and bucket.finished:
            bucket.keep_result()
        bucket.gather(state.touched, state.used, USED)
        if self._check_finite:
            mark_bad(bucket, state.used)
        self._start(bucket)
        if self._options.release and self._next > IN_FLIGHT:
            self._wait_for(self.buckets[self._next - 1 - IN_FLIGHT])

    def _start(self, bucket: Bucket) -> None:
        if self._timeline is not None:
            bucket.token = self._timeline.begin("comm", f"bucket of {bucket.names[0]}")
        bucket.launch(bucket.divisor, 1 if self.weight is None else self.weight)

    def flush(self) -> None:
        """Launch all that is not launched yet; what has no gradient counts as zero."""
        if self._flushed:
            return
        if not self._open:
            self._begin_window()
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._send_flags()

    def _send_flags(self) -> None:
        self._orders = [None] * len(self.lanes)
        if self._learning and self._arrived and not self._failed:
            self._orders = [learned_order(state, self._arrived, self._options) for state in self.lanes]
        for state, order, digest in zip(self.lanes, self._orders, self._digests, strict=True):
            state.flags.send(row_of(state, digest, self.weight, failed=self._failed, ordered=order is not None))
        self._flushed = True

    def finish(self, now: bool = False) -> None:
        """Wait for the results; without a backward since `prepare`, take part in the window of the others with zeros.

        Args:
            now: even under `no_sync`.

        Raises:
            TransportError: a rank is gone, or did not come within the time-out.
            MismatchError: a rank's backward failed, or a rank has other parameters; the gradients are dropped.
            NotFiniteError: a gradient is not finite, and was to be looked for; the gradients are dropped.
        """
        if self._open or self._prepared:
            if not (self._sync or now):
                raise CommError("finish() inside no_sync(): a backward outside of it has to come first.")
            self.flush()
            self._finish()

    def _finish(self) -> None:
        failed = self._failed
        try:
            for bucket in self.buckets:
                self._wait_for(bucket)
            rows = [state.flags.receive() for state in self.lanes]
        except CommError:
            raise
        except BaseException as error:
            self._interrupted = type(error).__name__
            raise
        finally:
            self._open = self._flushed = self._prepared = self._failed = False
        try:
            if not failed:
                lanes = [state.lane for state in self.lanes] if self._wanted is None else self._wanted
                for state, told, lane in zip(self.lanes, rows, lanes, strict=True):
                    judge(state, told, partial(lines_of, [lane], self._changes))
        except CommError:
            failed = True
            raise
        finally:
            if failed:
                for bucket in self.buckets:
                    bucket.drop()
        if failed:
            return
        self._reduce_late(rows)
        total = sum(row.weight for row in rows[0])
        for bucket in self.buckets if self.weight is not None and self.divides else ():
            bucket.divide_by_weights(total)
        for state, told in zip(self.lanes, rows, strict=True):
            used = used_somewhere(told)
            for bucket in state.buckets:
                bucket.give(used)
        self._settle(rows, total if self.weight is not None and self.divides else None)

    def _wait_for(self, bucket: Bucket) -> None:
        try:
            bucket.wait()
        finally:
            if self._timeline is not None and bucket.token is not None:
                self._timeline.end(bucket.token)
                bucket.token = None

    def _reduce_late(self, rows: Sequence[Sequence[Row]]) -> None:
        """Add what came after a launch: a parameter was used in a backward inside another one, for the first time."""
        for state, bucket in late_buckets(self.lanes, rows):
            bucket.keep_sum()
            bucket.gather(state.touched, state.used, USED)
            self._start(bucket)
            self._wait_for(bucket)

    @property
    def is_open(self) -> bool:
        """Whether gradients came, or were reduced, since the last `finish`."""
        return self._open

    @property
    def is_launched(self) -> bool:
        """Whether all buckets of the window are under way, so that other ranks count on its `finish`."""
        return self._flushed

    def clear(self) -> None:
        """Forget the results: the next window replaces those in the shards, see `adds`."""
        for bucket in self.buckets:
            bucket.finished = False

    # -- changes

    def update(self, lanes: Sequence[Lane]) -> None:
        """Take other parameters; to be called on all ranks before the same backward. What is new is reduced in it, too.

        Args:
            lanes: as many as there are, over the same transports, with all parameters that are trainable now.
        """
        if self._options.scatter:
            raise CommError("Shards belong to an optimizer: make a new one when parameters come or go.")
        check_lanes(lanes)
        self._wanted = list(lanes)
        self._changes += 1
        self._digests = [digest_of(lines_of([lane], self._changes)) for lane in lanes]

    def _settle(self, rows: Sequence[Sequence[Row]], total: float | None) -> None:
        """At the end of a window, make the buckets that the next ones need, on all ranks alike."""
        wanted, self._wanted = self._wanted, None
        learning, self._learning = self._learning, False
        self._arrived = None
        if wanted is not None:
            self.lanes = lanes_of_others(self.lanes, wanted, self._options, self.weight, total)
        elif learning and any(told[0].state & ORDER for told in rows):
            self.lanes = lanes_in_new_order(self.lanes, self._orders, rows, self._options)
        else:
            return
        self._install()

    def close(self) -> None:
        """Remove the hooks; gradients stay where they are."""
        self._hooks.remove()
        self._watch.forget()
