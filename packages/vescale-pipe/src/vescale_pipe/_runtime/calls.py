"""From a program to the flat list of calls of one rank.

Messages are asked for in the order in which they are taken, a few ahead, and awaited right before what takes them.
A send is let go when a message proves that it has arrived: one that its receiver sent after it took ours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .._schedule import Kind
from .._schedule.lower import Op, Program, Step
from .._transport import Receiving
from .rank import Call, Calls, Rank
from .tags import Tags
from .tied import TiedRank, settle_points

__all__ = ["make_calls"]

_SENDS = (Op.SEND_F, Op.SEND_B)
_RECEIVES = (Op.RECV_F, Op.RECV_B)
Key = tuple[int, int]


class _Take:
    """Takes the next message on an edge."""

    __slots__ = ("_into", "_microbatch", "_rank", "_settled")

    def __init__(self, rank: Rank, into: dict[int, list[Any]], microbatch: int, settled: tuple[Key, ...]) -> None:
        self._rank = rank
        self._into = into
        self._microbatch = microbatch
        self._settled = settled

    def ready(self) -> bool:
        return self._rank.expected[0].ready()

    def __call__(self) -> None:
        rank = self._rank
        self._into[self._microbatch] = rank.expected.popleft().wait()
        rank.post()
        for key in self._settled:
            rank.sending.pop(key).wait()


class _Await:
    """Takes one message that is not on an edge."""

    __slots__ = ("_expected", "_rank", "_src", "_tag", "_use")

    def __init__(self, rank: Rank, src: int, tag: int, use: Callable[[list[Any]], None]) -> None:
        self._rank = rank
        self._src = src
        self._tag = tag
        self._use = use
        self._expected: Receiving | None = None

    def _ask(self) -> Receiving:
        if self._expected is None:
            self._expected = self._rank.transport.recv(self._src, self._tag)
        return self._expected

    def ready(self) -> bool:
        return self._ask().ready()

    def __call__(self) -> None:
        expected = self._ask()
        self._expected = None
        self._use(expected.wait())


def _send(rank: Rank, out: dict[int, list[Any]], microbatch: int, dst: int, tag: int) -> None:
    rank.sending[dst, tag] = rank.transport.send(dst, tag, out.pop(microbatch))


def _nothing(microbatch: int) -> None:
    """What W does where I did all."""


def make_calls(rank: Rank, program: Program, *, training: bool, base: int = 0, loss_everywhere: bool = True) -> Calls:
    """Work out what a rank does in a step.

    Args:
        rank: the rank.
        program: the schedule with its messages.
        training: whether gradients are made; else the program has forwards only.
        base: first tag that is free.
        loss_everywhere: whether all ranks get the loss.
    """
    tags = tags_of(rank, program, base)
    build = _Builder(rank, program, tags, training)
    build.steps()
    if training:
        build.share_tied()
    build.share_loss(loss_everywhere)
    build.add(rank.drain, "the end of sends")
    return Calls(tuple(build.calls), tuple(build.receives), tags.label, training)


def tags_of(rank: Rank, program: Program, base: int) -> Tags:
    """Return the tags of a program."""
    sizes = [len(group.members) for group in rank.groups]
    return Tags(program.edges, program.schedule.num_microbatches, sizes, base)


class _Builder:
    """Makes the list, front to back."""

    def __init__(self, rank: Rank, program: Program, tags: Tags, training: bool) -> None:
        self.rank = rank
        self.program = program
        self.tags = tags
        self.training = training
        self.steps_here = program.steps[rank.rank]
        self.calls: list[Call] = []
        self.receives: list[tuple[int, int]] = []

    def add(self, run: Callable[[], None], name: str, ready: Callable[[], bool] | None = None) -> None:
        """Add a call that computes nothing."""
        self.calls.append(Call(run, name, ready))

    def steps(self) -> None:
        """Add the steps of the schedule, with receives right before what takes them."""
        rank = self.rank
        waiting: dict[tuple[bool, int, int], list[Step]] = {}
        order = [step for step in self.steps_here if not step.op.is_message]
        settle = self._settle(order)
        part_of = self._tied_parts(order)
        self._split = self._splits(order)
        settled = self._settled()
        done = 0
        for step in self.steps_here:
            if step.op in _RECEIVES:
                waiting.setdefault((step.op is Op.RECV_F, step.stage, step.microbatch), []).append(step)
            elif step.op in _SENDS:
                self._send(step)
            else:
                for group, microbatch in settle.get(done, ()):
                    self._add_settle(group, microbatch)
                done += 1
                if step.op is not Op.W:
                    for one in waiting.pop((step.op is Op.F, step.stage, step.microbatch), ()):
                        self._take(one, settled.get((one.peer, self._tag(one)), ()))
                self._compute(step)
                for group, place in part_of.get(step, ()):
                    self._send_tied(group, place, step.microbatch)
        for group, microbatch in settle.get(done, ()):
            self._add_settle(group, microbatch)
        assert not rank.expected

    def _tag(self, step: Step) -> int:
        down = (step.stage, step.other) if step.op in (Op.SEND_F, Op.RECV_B) else (step.other, step.stage)
        kind = self.tags.value if step.op in (Op.SEND_F, Op.RECV_F) else self.tags.grad
        return kind(down, step.microbatch)

    def _compute(self, step: Step) -> None:
        stage = self.rank.stages[step.stage]
        run = {
            Op.F: stage.forward if self.training else stage.forward_only,
            Op.B: stage.backward,
            Op.I: stage.backward,
            Op.W: _nothing,
        }[step.op]
        if (step.stage, step.microbatch) in self._split:
            run = {Op.F: stage.forward_split, Op.I: stage.input_backward, Op.W: stage.weight_backward}[step.op]
        kind = Kind(int(step.op))
        self.calls.append(Call(partial(run, step.microbatch), str(step), None, kind, step.stage, step.microbatch))

    def _send(self, step: Step) -> None:
        if step.op is Op.SEND_F:
            out = self.rank.edges[step.stage, step.other].values
        else:
            out = self.rank.edges[step.other, step.stage].grads
        self.add(partial(_send, self.rank, out, step.microbatch, step.peer, self._tag(step)), str(step))

    def _take(self, step: Step, settled: tuple[Key, ...]) -> None:
        if step.op is Op.RECV_F:
            into = self.rank.edges[step.other, step.stage].values
        else:
            into = self.rank.edges[step.stage, step.other].grads
        self.receives.append((step.peer, self._tag(step)))
        take = _Take(self.rank, into, step.microbatch, settled)
        self.add(take, str(step), take.ready)

    def _settled(self) -> dict[Key, tuple[Key, ...]]:
        """Return per message that comes which of the sends to the same rank are over when it is here."""
        mine = self.rank.rank
        found: dict[Key, tuple[Key, ...]] = {}
        for peer in {step.peer for step in self.steps_here if step.op.is_message}:
            # The other rank takes our message right before what it computes of it.
            taken: list[Key] = []
            waiting: dict[tuple[bool, int, int], list[Key]] = {}
            for step in self.program.steps[peer]:
                if step.op in _RECEIVES:
                    if step.peer == mine:
                        place = (step.op is Op.RECV_F, step.stage, step.microbatch)
                        waiting.setdefault(place, []).append((peer, self._tag(step)))
                elif step.op in _SENDS:
                    if step.peer == mine:
                        found[peer, self._tag(step)] = tuple(taken)
                        taken = []
                elif step.op is not Op.W:
                    taken += waiting.pop((step.op is Op.F, step.stage, step.microbatch), ())
        return found

    def _splits(self, order: list[Step]) -> set[tuple[int, int]]:
        """Return (stage, micro-batch) whose backward is in two parts, and ready their stages for it.

        Where a B comes before a W of an earlier micro-batch, gradients of weights would not be added in the order of
        the micro-batches; such a stage does all in its I.
        """
        found: dict[int, set[tuple[int, int]]] = {}
        last: dict[int, int] = {}
        broken: set[int] = set()
        for step in order:
            if step.op is Op.W:
                found.setdefault(step.stage, set()).add((step.stage, step.microbatch))
            if step.op in (Op.B, Op.W):
                if step.microbatch < last.get(step.stage, -1):
                    broken.add(step.stage)
                last[step.stage] = step.microbatch
        for stage in found.keys() - broken:
            self.rank.stages[stage].split()
        return set().union(*(pairs for stage, pairs in found.items() if stage not in broken))

    # -- tied parameters

    def _exact(self) -> list[TiedRank]:
        return [group for group in self.rank.tied if group.exact] if self.training else []

    def _settle(self, order: list[Step]) -> dict[int, list[tuple[TiedRank, int]]]:
        """Return per number of computations that are done which micro-batches of tied gradients are added then."""
        own = [group for group in self._exact() if group.owns]
        found: dict[int, list[tuple[TiedRank, int]]] = {}
        if own:
            program = self.program
            points = settle_points(
                program.schedule, program.edges, program.grad_edges, [one.group for one in own], self.rank.rank
            )
            for group, column in zip(own, points, strict=True):
                for microbatch, point in enumerate(column):
                    found.setdefault(min(point, len(order)), []).append((group, microbatch))
        return found

    def _tied_parts(self, order: list[Step]) -> dict[Step, list[tuple[TiedRank, int]]]:
        """Return per last backward of a stage which members' gradients leave this rank after it."""
        final: dict[tuple[int, int], Step] = {}
        for step in order:
            if step.op is not Op.F:
                final[step.stage, step.microbatch] = step
        found: dict[Step, list[tuple[TiedRank, int]]] = {}
        for group in self._exact():
            if group.owns:
                continue
            for place, (stage, _) in enumerate(group.group.members):
                if group.group.ranks[place] != self.rank.rank:
                    continue
                for microbatch in range(self.program.schedule.num_microbatches):
                    found.setdefault(final[stage, microbatch], []).append((group, place))
        return found

    def _add_settle(self, group: TiedRank, microbatch: int) -> None:
        self.add(
            partial(group.settle, microbatch, self.tags),
            f"the gradient of a tied parameter, micro-batch {microbatch}",
            partial(group.ready, microbatch, self.tags),
        )

    def _send_tied(self, group: TiedRank, place: int, microbatch: int) -> None:
        rank, tags = self.rank, self.tags

        def send() -> None:
            key = group.group.owner, tags.tied(group.group.number, place, microbatch)
            rank.sending[key] = rank.transport.send(*key, [group.part(place, microbatch)])

        self.add(send, f"the gradient of a tied parameter, micro-batch {microbatch}")

    def share_tied(self) -> None:
        """Add what gives all members of tied groups their gradient."""
        rank, tags = self.rank, self.tags
        for group in rank.tied:
            number, name = group.group.number, "the gradient of a tied parameter"
            tag = tags.tied_sum(number, 0)
            if not group.owns:
                owner = group.group.owner
                if not group.exact:
                    self.add(partial(rank.send_now, owner, tag, group.partial), name)
                take = _Await(rank, owner, tag, group.take_message)
                self.add(take, name, take.ready)
                continue
            if not group.exact:
                for other in group.others():
                    take = _Await(rank, other, tag, group.collect_message)
                    self.add(take, name, take.ready)
                self.add(group.add_up, name)
            self.add(group.spread, name)
            for other in group.others():
                self.add(partial(rank.send_now, other, tag, group.result), name)

    # -- losses

    def share_loss(self, everywhere: bool) -> None:
        """Add what makes the loss of the step, and gives it to all ranks."""
        rank, tags = self.rank, self.tags
        owner = rank.placement[rank.last]
        others = [one for one in range(rank.transport.size) if one != owner]
        if rank.rank != owner:
            if rank.added:
                self.add(partial(rank.send_now, owner, tags.added(), rank.added_here), "the added losses")
            if everywhere:
                take = _Await(rank, owner, tags.loss(), rank.set_loss)
                self.add(take, "the loss", take.ready)
            return
        if rank.added:
            for other in others:
                take = _Await(rank, other, tags.added(), rank.added_values.extend)
                self.add(take, "the added losses", take.ready)
        self.add(rank.total, "the loss")
        if everywhere:
            for other in others:
                self.add(partial(rank.send_now, other, tags.loss(), rank.get_loss), "the loss")
