"""What happens when an operation needs more than its inputs' layouts allow.

*Implicit communication*: sharded data that must be gathered or re-cut for an operation. The
default is ``"warn"``: an unmodified model runs and gives the single-device result, and each place
that moves data says so once, on the first rank, with the redistribution that makes it explicit.
Reducing a partial value where the value itself is needed is part of its meaning, and slicing a
replicated one costs nothing; neither counts.

*Plain tensors*: beside a DTensor only scalars are accepted, because the ranks may hold different
data (a batch of their own). `parallelize_module` switches to ``"replicate"`` inside the module.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Literal, get_args

import torch

from ..errors import ImplicitCommunicationError, ImplicitCommunicationWarning, PlainTensorError
from ..placements import short

if TYPE_CHECKING:
    from .._spec import Spec
    from ..placements import AxisTypes

CommunicationPolicy = Literal["error", "warn", "allow"]
PlainPolicy = Literal["error", "replicate"]


class _State:
    """Process-wide, not per thread: autograd runs parts of a step in threads of its own."""

    def __init__(self) -> None:
        self.communication: CommunicationPolicy = "warn"
        self.plain: PlainPolicy = "error"
        self.inside_modules = 0
        self.modules_exist = 0


state = _State()
_seen: set[str] = set()


def set_implicit_communication(policy: CommunicationPolicy) -> None:
    """Set the policy for implicit communication: ``"error"``, ``"warn"`` (default) or ``"allow"``."""
    if policy not in get_args(CommunicationPolicy):
        raise ValueError(f'policy = {policy!r}: expected "error", "warn" or "allow"')
    state.communication = policy


@contextlib.contextmanager
def implicit_communication(policy: CommunicationPolicy) -> Iterator[None]:
    """Set the policy for implicit communication within a ``with`` block."""
    before = state.communication
    set_implicit_communication(policy)
    try:
        yield
    finally:
        state.communication = before


@contextlib.contextmanager
def plain_tensors(policy: PlainPolicy) -> Iterator[None]:
    """Say what a plain tensor beside a DTensor means within a ``with`` block.

    Args:
        policy: ``"error"`` (default) refuses all but scalars; ``"replicate"`` takes it as the same
            on every rank. You vouch for that: ranks with different data get different results.
    """
    if policy not in get_args(PlainPolicy):
        raise ValueError(f'policy = {policy!r}: expected "error" or "replicate"')
    before = state.plain
    state.plain = policy
    try:
        yield
    finally:
        state.plain = before


def check_plain(function: str, shape: tuple[int, ...]) -> None:
    """Raise unless plain tensors are taken as replicated here."""
    if state.plain == "replicate" or state.inside_modules:
        return
    raise PlainTensorError(
        f"{function} got a plain tensor of shape {list(shape)} beside a DTensor. The ranks may hold different data, "
        "so it is not taken for the whole tensor. Use distribute_tensor(tensor, mesh, placements) if every rank holds "
        "the whole, "
        'DTensor.from_local(tensor, mesh, placements) if each holds its part, or `with plain_tensors("replicate"):`'
    )


def report(function: str, moves: list[tuple[Spec, AxisTypes]], reason: str = "") -> None:
    """Apply the policy to one operation that is about to move sharded data."""
    if state.communication == "allow":
        return
    what = "; ".join(f"{spec!r} to ({short(types)})" for spec, types in moves)
    text = f"{function} moves sharded data implicitly{reason}: {what} on {moves[0][0].mesh!r}. "
    if state.communication == "error":
        raise ImplicitCommunicationError(
            text
            + "Redistribute the input explicitly, name the redistribution in the plan, or choose another policy with "
            'implicit_communication("warn" | "allow")'
        )
    if any(moves[0][0].mesh.coordinate):
        return  # the first rank speaks for all
    file, line = user_frame()
    key = f"{file}:{line}: {text}"
    if key not in _seen:
        _seen.add(key)
        warnings.warn_explicit(
            f"{text}Redistribute it explicitly or in the plan to place this communication yourself.",
            ImplicitCommunicationWarning,
            file,
            line,
        )


_LIBRARIES = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))


def user_frame() -> tuple[str, int]:
    """File and line of the code that called into torch or this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "<unknown>", 0
