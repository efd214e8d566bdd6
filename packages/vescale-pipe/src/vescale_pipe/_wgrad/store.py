"""The store: from recorded forwards to gradients of weights, micro-batch by micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PipeError
from .compiled import compiled_modules
from .kept import Kept, Share
from .mode import RecordingMode

__all__ = ["WeightGradStore"]

_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
_AT_ONCE = 64 << 20
"""Bytes of gradients that wait to be accumulated together."""


class WeightGradStore:
    """Puts off the gradients of a stage's weights.

    Recorded are `F.linear`, `conv1d`, `conv2d`, `conv3d`, `embedding` (dense), and `matmul`, `mm`, `bmm`, `addmm`,
    `baddbmm` with a weight (`nn.Parameter`, also transposed) on either side; `nn.MultiheadAttention` by its linears.
    Gradients of everything else (biases but those of convolutions, norms, recurrent layers, sparse embeddings, weights
    inside `torch.compile` or a user's `autograd.Function`, weights that are computed) come in I, as autograd makes
    them. Both together are bitwise what one backward gives, and each hook fires as it would then: hooks of a weight
    (`register_hook`, `register_post_accumulate_grad_hook`) once per micro-batch, in W, since autograd itself
    accumulates.

    Where one weight has uses of several kinds in a stage, all of its gradient comes in I if a use that is not recorded
    was the first, else in W. Its last bits may then differ in two cases: a function of several steps uses it again
    (`F.normalize(weight)`), or autocast is on and an operator that is not recorded uses it again. A use that torch does
    not show (in a compiled module, in a user's `autograd.Function`) is accumulated in I apart: then the weight's hooks
    fire twice too.

    Between I and W the store holds inputs and gradients of outputs, nothing else; after an exception, nothing.

    Args:
        module: the stage, looked through once for compiled modules, to warn of them.

    Example:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> store = WeightGradStore(layer)
        >>> x = torch.ones(3, 2, requires_grad=True)
        >>> with store.recording(0):
        ...     y = layer(x)
        >>> with store.backward(0):
        ...     y.sum().backward()
        >>> x.grad is None, layer.weight.grad
        (False, None)
        >>> store.run(0)
        >>> layer.weight.grad
        tensor([[3., 3.]])

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, https://arxiv.org/abs/2401.10241
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._mode = RecordingMode()
        self._kept: dict[int, Kept] = {}

    def recording(self, microbatch: int) -> _Within:
        """Return a context for the forward of a micro-batch whose backward is in two parts.

        Args:
            microbatch: number of it.

        Raises:
            PipeError: the forward of that micro-batch was recorded already, and its W has not come.
        """
        if microbatch in self._kept:
            raise PipeError(
                f"micro-batch {microbatch}: its forward is recorded twice; its weight gradients must be run (W) or "
                "dropped (`clear`) in between."
            )
        if self._module is not None:
            self._warn(self._module)
        kept = self._kept[microbatch] = Kept()
        return _Within(self, kept, True)

    def backward(self, microbatch: int) -> _Within:
        """Return a context for the backward of a micro-batch (I); checkpoints inside of it record what they run again.

        Args:
            microbatch: number of it.

        Raises:
            PipeError: the forward of that micro-batch was not recorded.
        """
        kept = self._kept.get(microbatch)
        if kept is None:
            raise PipeError(f"micro-batch {microbatch}: nothing is recorded for its backward (I).")
        return _Within(self, kept, kept.again)

    def run(self, microbatch: int) -> None:
        """Add the gradients of the weights of a micro-batch, and forget it.

        Args:
            microbatch: number of it.

        Raises:
            PipeError: the forward of that micro-batch was not recorded, or an input changed since.
        """
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            raise PipeError(f"micro-batch {microbatch}: nothing is recorded for its weight gradients (W).")
        kept.closed = True
        try:
            if kept.shares:
                with torch.no_grad():
                    _accumulate(kept.shares, microbatch)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Drop all that is kept."""
        for kept in self._kept.values():
            kept.shares.clear()
            kept.closed = True
        self._kept.clear()

    def pending(self) -> list[tuple[int, list[Tensor]]]:
        """Return per micro-batch what is kept for its W: inputs and gradients of outputs."""
        return [(number, [one for s in kept.shares for one in (s.x, s.dy)]) for number, kept in self._kept.items()]

    def _warn(self, module: nn.Module) -> None:
        self._module = None
        names = compiled_modules(module)
        if names:
            shown = ", ".join(repr(name) if name else "the stage itself" for name in names[:5])
            warnings.warn(
                f"torch.compile has made one piece of the backward of {len(names)} module(s): {shown}. The gradients "
                "of their weights come with those of inputs (I), not in W; a schedule without W may be faster.",
                stacklevel=3,
            )


class _Within:
    """The mode on for one micro-batch."""

    __slots__ = ("_before", "_kept", "_on", "_store")

    def __init__(self, store: WeightGradStore, kept: Kept, on: bool) -> None:
        self._store = store
        self._kept = kept
        self._on = on

    def __enter__(self) -> None:
        if self._on:
            mode = self._store._mode
            self._before = mode.kept
            mode.kept = self._kept
            mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._on:
            mode = self._store._mode
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
            mode.kept = self._before
            self._kept.end_forward()
        if kind is not None:
            self._store.clear()


def _accumulate(shares: list[Share], microbatch: int) -> None:
    """Make the gradients, and let autograd add them: it knows what hooks there are, and how `.grad` is laid out."""
    shares[:] = _in_order(shares)
    shares.reverse()
    roots: list[Tensor] = []
    grads: list[Tensor] = []
    size = 0
    key: tuple[int, int] | None = None
    before = 0
    seen: set[int] = set()
    while shares:
        formula, root, now, _, turned, extra, x, version, dy = shares.pop()
        if now != key:
            before = 0
            if size > _AT_ONCE or now[0] in seen:
                _add(roots, grads)
                roots.clear()
                grads.clear()
                seen.clear()
                size = 0
            key = now
            seen.add(now[0])
        if x._version != version:
            raise PipeError(
                f"micro-batch {microbatch}: an input (shape {tuple(x.shape)}) of an operator with a weight (shape "
                f"{tuple(root[0].shape)}) was changed in place after the operator used it; the weight's gradient needs "
                "it as it was. Change a copy."
            )
        grad = formula(x, dy, root[0], extra)
        made = [grad] if len(root) == 1 else list(grad)
        if turned >= 0:
            made = [_as(one, to) for one, to in zip(made, root, strict=True)]
        if turned and turned == before:
            last = len(grads) - len(made)
            grads[last:] = [old + new for old, new in zip(grads[last:], made, strict=True)]
            continue
        before = turned
        roots += root
        grads += made
        size += made[0].nbytes
    _add(roots, grads)


def _add(roots: list[Tensor], grads: list[Tensor]) -> None:
    cast = tuple(_as(grad, root) for grad, root in zip(grads, roots, strict=True))
    _run_backward(tuple(roots), cast, False, False, (), True, True)


def _as(grad: Tensor, weight: Tensor) -> Tensor:
    return grad if grad.dtype is weight.dtype else grad.to(weight.dtype)


def _in_order(shares: list[Share]) -> list[Share]:
    """Return shares with those of one key together, keys as their last share came: so autograd accumulates."""
    groups: dict[tuple[int, int], list[Share]] = {}
    for share in shares:
        groups.setdefault(share.key, []).append(share)
    if len(groups) == len(shares):
        return shares
    ends = {share.key: place for place, share in enumerate(shares)}
    ordered = []
    for key in sorted(groups, key=ends.__getitem__):
        ordered += sorted(groups[key], key=_place)
    return ordered


def _place(share: Share) -> tuple[int, int, int]:
    return share.place
