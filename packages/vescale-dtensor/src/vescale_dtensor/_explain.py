"""`explain`: what a piece of a program communicates, and which line of it is the reason.

Inside the block a `TorchFunctionMode` notes, for every torch call, autograd's sequence number, the module,
and the user's line. A collective in the backward pass belongs to the autograd node that runs, whose
sequence number finds the forward call that made it.
"""

from __future__ import annotations

import bisect
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ._comm import move as _move
from ._comm.gradients import Bucket
from ._comm.record import Collective, listeners
from ._dispatch import engine, fallback
from ._dispatch.call import function_name
from ._dispatch.solve import unwanted
from ._experts.forward import run_experts
from ._experts.lists import run_block
from ._modules.forward import Converter
from ._static.moves import cast, shift
from ._static.overlap import begin
from ._tensor import DTensor

_sequence_number = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_LEAF = 1 << 60
"""Nodes that accumulate into leaves have numbers beyond this."""
_OURS = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`."""
    num_bytes: int
    """Bytes of this rank's input."""
    axes: tuple[str, ...]
    """Names of the mesh axes that it spans."""
    num_ranks: int
    """Number of ranks that take part."""
    phase: str
    """`forward` or `backward`."""
    op: str
    """The function that caused it; in the backward, the function of the forward."""
    module: str
    """Name of the innermost module that was running, from the outermost one on; empty outside of modules."""
    module_class: str
    """Class of that module."""
    line: str
    """`file:line` of the user's code that called the function."""
    cause: str
    """`operator` (part of its meaning), `redistribute` (asked for), `plan`, `implicit` or `fallback` (nobody asked),
    `gradients` (of parameters, in a bucket), `static` (a line of a static program)."""


@dataclass(frozen=True, slots=True)
class _Site:
    op: str
    module: str
    module_class: str
    line: str


class explain:
    """Context manager that records every collective of the block, forward and backward, on this rank.

    ::

        with explain() as seen:
            loss = model(x).mean()
            loss.backward()
        print(seen.table())

    Attributes:
        records: the collectives as `Communication` objects, in order.
        passes: what was done about the communications of the static programs that ran, by their names.
    """

    def __init__(self) -> None:
        self.records: list[Communication] = []
        self.passes: dict[str, list[str]] = {}
        self._numbers: list[int] = []
        self._sites: list[tuple[_Site, str]] = []
        self._stack: list[tuple[str, str]] = []
        self._names: dict[int, str] = {}
        self._handles: list[Any] = []
        self._mode = _Tracer(self)

    def __enter__(self) -> explain:
        hooks = nn.modules.module
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        listeners.append(self._record)
        _move.watchers.append(self._moving)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, value, trace)  # type: ignore[no-untyped-call]
        listeners.remove(self._record)
        _move.watchers.remove(self._moving)
        for handle in self._handles:
            handle.remove()
        self._stack.clear()

    # ---------------------------------------------------------------- what is going on

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._stack:
            self._names = {id(m): n for n, m in module.named_modules()}
        self._stack.append((self._names.get(id(module), "?"), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _here(self, op: str) -> _Site:
        place = 0 if op == "bucket" else -1  # it is the outermost module's, not of whoever used it first
        module, module_class = self._stack[place] if self._stack else ("", "")
        return _Site(op, module, module_class, _user_line())

    def _called(self, op: str, cause: str = "operator") -> None:
        """Note a call, so that autograd nodes made from here on are known to be its."""
        number, site = _sequence_number(), self._here(op)
        if self._numbers and self._numbers[-1] == number:
            self._sites[-1] = site, cause
        elif not self._numbers or self._numbers[-1] < number:  # another thread counts for itself
            self._numbers.append(number)
            self._sites.append((site, cause))

    def _moving(self) -> None:
        """Note a move, whose backward may communicate though its forward does not."""
        cause, op = _cause()
        if op:
            self._called(op, cause)

    def _record(self, event: Collective) -> None:
        node = _current_node()
        cause, op = _cause()
        if op:
            site = self._here(op)
        else:
            site, cause = self._site_of(node)
        mesh = event.mesh
        self.records.append(
            Communication(
                event.name,
                event.num_bytes,
                tuple(mesh.axis_name(a) for a in event.axes),
                mesh.size_of(event.axes),
                "forward" if node is None else "backward",
                site.op,
                site.module,
                site.module_class,
                site.line,
                cause,
            )
        )

    def _site_of(self, node: Any) -> tuple[_Site, str]:
        """The call that made an autograd node; the last call where there is none."""
        position = len(self._sites) - 1
        if node is not None:
            number = node._sequence_nr()
            position = bisect.bisect_right(self._numbers, number) - 1 if number < _LEAF else -1
        elif self._sites:
            return self._here(self._sites[-1][0].op), "operator"
        return self._sites[position] if position >= 0 else (self._here(""), "operator")

    # ---------------------------------------------------------------- what came out

    @property
    def implicit(self) -> list[Communication]:
        """Those that nobody asked for: operands gathered or re-cut, and functions without a rule."""
        return [r for r in self.records if r.cause in ("implicit", "fallback")]

    def totals(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        """Number and bytes by kind and mesh axes."""
        count: Counter[tuple[str, tuple[str, ...]]] = Counter()
        size: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for r in self.records:
            count[r.kind, r.axes] += 1
            size[r.kind, r.axes] += r.num_bytes
        return {key: (count[key], size[key]) for key in count}

    def table(self) -> str:
        """Return the records as a table, equal ones counted, followed by the totals."""
        counted = Counter(self.records)
        rows = [("", "phase", "collective", "axes", "bytes", "cause", "op", "module", "line")]
        for r, n in counted.items():
            module = f"{r.module} ({r.module_class})" if r.module_class else ""
            mark = "! " if r.cause in ("implicit", "fallback") else ""
            rows.append(
                (
                    f"{n}x",
                    r.phase,
                    r.kind,
                    "+".join(r.axes),
                    str(r.num_bytes),
                    mark + r.cause,
                    r.op,
                    module.strip(),
                    _short(r.line),
                )
            )
        lines = _aligned(rows)
        totals = [
            (f"{n}x", kind, "+".join(axes), f"{size} bytes")
            for (kind, axes), (n, size) in sorted(self.totals().items())
        ]
        lines += ["", f"{len(self.records)} collectives on this rank", *_aligned(totals)]
        if self.implicit:
            lines.append(f"! {len(self.implicit)} were implicit: nobody asked for them; see implicit_communication")
        for name, notes in self.passes.items():
            lines += ["", f"static program of {name}", *(notes or ["no pass found anything to do"])]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def print(self) -> None:
        """Print the table."""
        print(self.table())  # noqa: T201  (its purpose)


class _Tracer(TorchFunctionMode):
    """Tells an `explain` of every torch call of the user's program."""

    def __init__(self, owner: explain) -> None:
        super().__init__()
        self._owner = owner

    def program_runs(self, name: str, notes: list[str]) -> None:
        """Take note of a static program; that there is this method tells that the mode only looks on."""
        self._owner.passes[name] = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _from_inside():
            self._owner._called(function_name(func))
        return func(*args, **(kwargs or {}))


_CAUSES = {
    fallback.gather_fallback.__code__: "fallback",
    fallback.inplace_fallback.__code__: "fallback",
    DTensor.redistribute.__code__: "redistribute",
    DTensor.full_tensor.__code__: "redistribute",
    Converter.tensor.__code__: "plan",
    run_experts.__code__: "operator",
    run_block.__code__: "operator",
    shift.__code__: "static",
    cast.__code__: "static",
    begin.__code__: "static",
    Bucket.__call__.__code__: "gradients",
}


def _cause() -> tuple[str, str]:
    """Why a collective is issued, and for which function, by who is on the call stack; "" where nobody there knows."""
    frame: FrameType | None = sys._getframe(2)
    moved: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if code is _move.move.__code__:
            moved = frame
        elif code in _CAUSES:
            cause = _CAUSES[code]
            if cause == "plan":
                return cause, frame.f_locals["self"].title
            if cause == "fallback":
                return cause, function_name(frame.f_locals["func"])
            return cause, "bucket" if cause == "gradients" else code.co_name
        elif code is engine._execute_general.__code__:
            entry = frame.f_locals["e"]
            if moved is not None:
                spec = moved.f_locals["x"]._spec
                if unwanted(spec.mesh, spec.types, moved.f_locals["types"]):
                    return "implicit", entry.name
            return "operator", entry.name
        frame = frame.f_back
    return "operator", ""


def _from_inside() -> bool:
    """Whether a torch call comes from this package, perhaps by way of torch: from a move or a rule."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH):
            return name.startswith(_OURS)
        frame = frame.f_back
    return False


_is_library: dict[str, bool] = {}


def _user_line() -> str:
    """`file:line` of the innermost frame outside of libraries."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        library = _is_library.get(name)
        if library is None:
            library = _is_library[name] = name.startswith((_OURS, _TORCH))
        if not library:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(line: str) -> str:
    return "/".join(line.replace("\\", "/").split("/")[-2:])


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
