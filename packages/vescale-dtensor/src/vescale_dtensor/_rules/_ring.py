"""Attention over a sequence that is cut over ranks: blocks of keys and values go round, queries stay.

Every rank keeps its queries and meets one block of keys and values after the other, while the next one
is under way. Parts of a softmax are merged by their maxima and sums (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018; Liu et al., "Ring Attention with Blockwise Transformers", 2023).
A causal mask would leave the first ranks idle, so the sequence is dealt out anew for it: with n ranks,
rank i takes the pieces i and 2n - 1 - i of 2n, and all ranks have the same work in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm.record import note
from .._mesh import Axes, MeshInfo
from .._spec import chunk
from ._across import first_order_only

Piece = tuple[int, int]
"""First position and length."""
Pieces = tuple[Piece, ...]
"""What one rank holds of a sequence, in order of memory."""

_NARROW = (torch.float16, torch.bfloat16)


def dealt(length: int, ranks: int) -> list[Pieces]:
    """Pieces of each rank such that a causal mask leaves all the same work.

    >>> dealt(8, 2)
    [((0, 2), (6, 2)), ((2, 2), (4, 2))]
    """
    parts = [chunk(length, 2 * ranks, i) for i in range(2 * ranks)]
    return [(parts[i], parts[2 * ranks - 1 - i]) for i in range(ranks)]


def _common(a: Piece, b: Piece) -> Piece | None:
    start, stop = max(a[0], b[0]), min(a[0] + a[1], b[0] + b[1])
    return (start, stop - start) if stop > start else None


def _places(pieces: Pieces, others: Pieces) -> list[Piece]:
    """Where in the memory of `pieces` the positions lie that `others` has too, in order of position."""
    found, at = [], 0
    for piece in pieces:
        for other in others:
            both = _common(piece, other)
            if both is not None:
                found.append((both[0], at + both[0] - piece[0], both[1]))
        at += piece[1]
    return [(place, length) for _, place, length in sorted(found)]


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks that a sequence goes round, and what each of them holds."""

    mesh: MeshInfo
    axes: Axes
    """Mesh axes that cut the keys."""
    me: int
    """Place of this rank among them."""
    queries: Pieces
    """What this rank holds of the queries."""
    keys: tuple[Pieces, ...]
    """What each rank holds of the keys."""
    causal: bool
    scale: float
    groups: int
    """Query heads per key head."""


# ------------------------------------------------------------------ dealing out anew


class Deal(torch.autograd.Function):
    """Bring a dim, of which each rank holds the pieces `before`, to the pieces `after`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, before: list[Pieces], after: list[Pieces], me: int, mesh: MeshInfo, axes: Axes
    ) -> Tensor:
        ctx.how = dim, after, before, me, mesh, axes
        return _deal(x, dim, before, after, me, mesh, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return (Deal.apply(grad, *ctx.how), *(None,) * 6)  # type: ignore[no-untyped-call]


def _deal(
    x: Tensor, dim: int, before: list[Pieces], after: list[Pieces], me: int, mesh: MeshInfo, axes: Axes
) -> Tensor:
    rows = x.movedim(dim, 0)
    width = math.prod(rows.shape[1:])
    sends = [_places(before[me], theirs) for theirs in after]
    takes = [_places(after[me], theirs) for theirs in before]
    out_splits = [sum(n for _, n in places) for places in sends]
    in_splits = [sum(n for _, n in places) for places in takes]
    parts = [rows.narrow(0, at, n).reshape(-1) for places in sends for at, n in places]
    flat = torch.cat(parts) if parts else x.new_empty(0)
    got = x.new_empty(sum(in_splits) * width)
    note("all_to_all", flat.numel() * flat.element_size(), mesh, axes)
    dist.all_to_all_single(
        got, flat, [n * width for n in in_splits], [n * width for n in out_splits], group=mesh.group(axes)
    )
    out = x.new_empty((sum(in_splits), *rows.shape[1:]))
    start = 0
    for places in takes:
        for at, n in places:
            out.narrow(0, at, n).copy_(got.narrow(0, start, n * width).view(n, *rows.shape[1:]))
            start += n * width
    return out.movedim(0, dim).contiguous()


# ------------------------------------------------------------------ going round


class _Round:
    """Tensors under way from the rank before to the rank after."""

    def __init__(self, ring: Ring, tensors: list[Tensor], shapes: list[torch.Size]) -> None:
        ranks = len(ring.keys)
        flat = torch.cat([t.reshape(-1) for t in tensors])
        self._shapes = shapes
        self._got = flat.new_empty(sum(map(torch.Size.numel, shapes)))
        give, take = [0] * ranks, [0] * ranks
        give[(ring.me + 1) % ranks], take[(ring.me - 1) % ranks] = flat.numel(), self._got.numel()
        note("all_to_all", flat.numel() * flat.element_size(), ring.mesh, ring.axes)
        self._flat = flat  # kept until it is sent
        self._work = dist.all_to_all_single(
            self._got, flat, take, give, group=ring.mesh.group(ring.axes), async_op=True
        )

    def wait(self) -> list[Tensor]:
        assert self._work is not None
        self._work.wait()
        parts = torch.split(self._got, [s.numel() for s in self._shapes])
        return [p.view(s) for p, s in zip(parts, self._shapes, strict=True)]


def _resized(x: Tensor, length: int) -> torch.Size:
    return torch.Size((*x.shape[:-2], length, x.shape[-1]))


def _length(pieces: Pieces) -> int:
    return sum(n for _, n in pieces)


class RingAttention(torch.autograd.Function):
    """Attention of this rank's queries to all keys, from this rank's keys and values.

    Args of `forward`: queries ``[..., heads, queries, width]``, keys and values ``[..., heads, keys, width]``, a mask
    ``[..., queries, all keys]`` or None, and the ring.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: Ring) -> Tensor:
        dtype = torch.float32 if q.dtype in _NARROW else q.dtype
        wide = q.to(dtype)
        state = _Softmax(wide, v.shape[-1])
        block = [k, v]
        for step, owner in enumerate(_owners(ring)):
            ahead = None
            if step + 1 < len(ring.keys):
                following = _length(ring.keys[(owner - 1) % len(ring.keys)])
                ahead = _Round(ring, block, [_resized(t, following) for t in (k, v)])
            keys, values = (_per_query_head(t.to(dtype), ring.groups) for t in block)
            for pair in _pairs(ring, owner):
                scores = _scores(wide[..., pair.rows, :], keys[..., pair.columns, :], mask, pair, ring.scale)
                state.add(pair.rows, scores, values[..., pair.columns, :])
            if ahead is not None:
                block = ahead.wait()
        out, normalizer = state.result()
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, mask, out, normalizer)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        first_order_only("attention over a sharded sequence", "keys and values")
        q, k, v, mask, out, normalizer = ctx.saved_tensors
        ring: Ring = ctx.ring
        dtype = out.dtype
        wide, grad = q.to(dtype), grad.to(dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        of_q = torch.zeros_like(wide)
        of_mask = torch.zeros_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        block = [k.to(dtype), v.to(dtype), torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)]
        for step, owner in enumerate(_owners(ring)):
            keys, values = (_per_query_head(t, ring.groups) for t in block[:2])
            of_k, of_v = torch.zeros_like(keys), torch.zeros_like(values)
            for pair in _pairs(ring, owner):
                rows, columns = pair.rows, pair.columns
                scores = _scores(wide[..., rows, :], keys[..., columns, :], mask, pair, ring.scale)
                weights = (scores - normalizer[..., rows, :]).exp_()
                weights.masked_fill_(normalizer[..., rows, :] == -torch.inf, 0)
                of_v[..., columns, :] += weights.mT @ grad[..., rows, :]
                of_scores = weights.mul_(grad[..., rows, :] @ values[..., columns, :].mT - delta[..., rows, :])
                of_q[..., rows, :] += of_scores @ keys[..., columns, :] * ring.scale
                of_k[..., columns, :] += of_scores.mT @ wide[..., rows, :] * ring.scale
                if of_mask is not None:
                    own = _of_mask(of_mask, pair)
                    own += of_scores.sum_to_size(own.shape).to(own.dtype)
            block[2] += _per_key_head(of_k, ring.groups)
            block[3] += _per_key_head(of_v, ring.groups)
            if step + 1 < len(ring.keys):
                following = _length(ring.keys[(owner - 1) % len(ring.keys)])
            else:  # the gradients go home; keys and values need not
                block, following = block[2:], _length(ring.keys[ring.me])
            if len(ring.keys) > 1:
                block = _Round(ring, block, [_resized(t, following) for t in block]).wait()
        return of_q.to(q.dtype), block[-2].to(k.dtype), block[-1].to(v.dtype), of_mask, None


def _owners(ring: Ring) -> list[int]:
    """Whose keys this rank has in each round."""
    ranks = len(ring.keys)
    return [(ring.me - step) % ranks for step in range(ranks)]


def _per_query_head(x: Tensor, groups: int) -> Tensor:
    return x if groups == 1 else x.repeat_interleave(groups, -3)


def _per_key_head(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    return x.view(*x.shape[:-3], x.shape[-3] // groups, groups, *x.shape[-2:]).sum(-3)


class _Pair(NamedTuple):
    """A piece of queries and a piece of keys that it sees."""

    rows: slice
    """Of this rank's queries."""
    columns: slice
    """Of the block of keys."""
    positions: slice
    """Of the keys among all keys."""
    diagonal: int | None
    """Where a causal mask cuts, as `triu` counts; None where all is seen."""


def _pairs(ring: Ring, owner: int) -> list[_Pair]:
    """What this rank's queries see of a block of keys."""
    found, row = [], 0
    for start, count in ring.queries:
        rows, column = slice(row, row + count), 0
        for first, length in ring.keys[owner]:
            if count and length and not (ring.causal and first > start + count - 1):
                diagonal = start - first + 1 if ring.causal and first + length - 1 > start else None
                columns, positions = slice(column, column + length), slice(first, first + length)
                found.append(_Pair(rows, columns, positions, diagonal))
            column += length
        row += count
    return found


def _of_mask(mask: Tensor, pair: _Pair) -> Tensor:
    """View of the part of a mask for some rows and columns; a dim of length 1 serves all."""
    mask = mask[..., pair.positions] if mask.shape[-1] != 1 else mask
    return mask[..., pair.rows, :] if mask.shape[-2] != 1 else mask


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, pair: _Pair, scale: float) -> Tensor:
    scores = q @ k.mT * scale
    if mask is not None and mask.dtype is torch.bool:
        scores.masked_fill_(_of_mask(mask, pair).logical_not(), -torch.inf)
    elif mask is not None:
        scores += _of_mask(mask, pair)
    if pair.diagonal is not None:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(pair.diagonal)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


class _Softmax:
    """A softmax-weighted sum that is put together from parts of the scores."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        self.total = q.new_zeros((*q.shape[:-1], 1))
        self.sums = q.new_zeros((*q.shape[:-1], width))

    def add(self, rows: slice, scores: Tensor, values: Tensor) -> None:
        old = self.top[..., rows, :]
        new = torch.maximum(old, scores.amax(-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0)
        kept = (old - shift).exp_()
        weights = (scores - shift).exp_()
        self.total[..., rows, :] = self.total[..., rows, :] * kept + weights.sum(-1, keepdim=True)
        self.sums[..., rows, :] = self.sums[..., rows, :] * kept + weights @ values
        self.top[..., rows, :] = new

    def result(self) -> tuple[Tensor, Tensor]:
        """The weighted mean, zero where nothing is seen, and the logarithm of the sum of exponentials."""
        nothing = self.total == 0
        return self.sums / self.total.masked_fill(nothing, 1), self.top + self.total.log()


__all__ = ["Deal", "Ring", "RingAttention", "dealt"]
