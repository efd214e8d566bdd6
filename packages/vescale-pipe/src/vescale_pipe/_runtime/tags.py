"""Numbers of messages: the same on all ranks, without talk."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Tags"]


class Tags:
    """Tags of one program.

    Args:
        edges: (from, to) stages of messages with values.
        microbatches: of a step.
        tied: per group of tied parameters its number of members.
        base: first tag that is free.

    Example:
        >>> tags = Tags([(0, 1)], 4, [])
        >>> tags.label(tags.value((0, 1), 2))
        'the values of stage 0 for stage 1, micro-batch 2'
    """

    def __init__(self, edges: Sequence[tuple[int, int]], microbatches: int, tied: Sequence[int], base: int = 0) -> None:
        self._edges = tuple(edges)
        self._index = {edge: number for number, edge in enumerate(edges)}
        self._microbatches = microbatches
        self._base = base
        self._extra = base + 2 * len(self._edges) * microbatches
        self._tied = self._extra + 2
        self._first = [sum(tied[:group]) for group in range(len(tied))]
        self.end = self._tied + (sum(tied) + len(tied)) * (microbatches + 1)
        """First tag after these."""

    def value(self, edge: tuple[int, int], microbatch: int) -> int:
        """Return the tag of values on an edge."""
        return self._base + 2 * self._index[edge] * self._microbatches + microbatch

    def grad(self, edge: tuple[int, int], microbatch: int) -> int:
        """Return the tag of gradients that come back on an edge."""
        return self._base + (2 * self._index[edge] + 1) * self._microbatches + microbatch

    def loss(self) -> int:
        """Return the tag of the loss of a step."""
        return self._extra

    def added(self) -> int:
        """Return the tag of the losses that a rank's stages added."""
        return self._extra + 1

    def tied(self, group: int, member: int, microbatch: int) -> int:
        """Return the tag of the gradient of one member of a tied group for one micro-batch."""
        return self._tied + (self._first[group] + group + member) * (self._microbatches + 1) + microbatch

    def tied_sum(self, group: int, member: int) -> int:
        """Return the tag of the gradient of a tied group over all micro-batches."""
        return self.tied(group, member, self._microbatches)

    def label(self, tag: int) -> str:
        """Say what the message of a tag is."""
        if not self._base <= tag < self.end:
            return f"message {tag}"
        if tag < self._extra:
            row, microbatch = divmod(tag - self._base, self._microbatches)
            producer, consumer = self._edges[row // 2]
            if row % 2:
                return f"the gradients of stage {consumer} for stage {producer}, micro-batch {microbatch}"
            return f"the values of stage {producer} for stage {consumer}, micro-batch {microbatch}"
        if tag < self._tied:
            return "the loss of the step" if tag == self._extra else "the added losses of the step"
        microbatch = (tag - self._tied) % (self._microbatches + 1)
        if microbatch == self._microbatches:
            return "the gradient of a tied parameter"
        return f"the gradient of a tied parameter for micro-batch {microbatch}"
