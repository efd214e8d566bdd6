"""`load`: a step into a state that is there, in place, whatever the layouts of both are.

All ranks find all that does not fit before a byte is written, tell each other, and go on only if it is nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import _state
from .._coordination import Coordinator, coordinator
from .._format import TensorRecord
from .._save.running import wait_for
from .._state import Held, Match, Target
from .._state.nodes import leaves
from .._storage import Storage, open_storage
from .._trace import span
from .._words import counted
from ..errors import CheckpointError, MismatchError
from .broadcast import Share, exchange, shares
from .checkpoint import Checkpoint
from .fresh import read_local
from .names import Keys, Rename, asked, chooser, hints, leave_out, renamer
from .target import Request
from .ties import settle
from .together import Findings, agree, open_together

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["LoadReport", "load"]

log = logging.getLogger("vescale_ckpt")

PARTLY = "What was loaded before stands in the state already, so the state is partly loaded: do not go on with it."
NOT_SAVED, NOT_ASKED = "not in the checkpoint", "in the checkpoint, but not in the state"
NO_VALUE = "this rank saved no value of its own"
_CHOICES: dict[str, tuple[Any, ...]] = {
    "missing": ("error", "keep", "warn"),
    "unexpected": ("error", "ignore", "warn"),
    "broadcast": ("auto", True, False),
}


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did on this rank."""

    step: int
    """The step."""
    folder: str
    """Where it lies in the store."""
    loaded: tuple[str, ...]
    """Names of the tensors of the state that were filled."""
    missing: tuple[str, ...]
    """Names of the state that the checkpoint lacks; they kept their values."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the state lacks; they were not loaded."""
    cast: tuple[str, ...]
    """Names of the tensors that were converted to another dtype."""
    bytes_loaded: int
    """Bytes of tensors that this rank needed."""
    bytes_read: int
    """Bytes of data files that this rank read."""
    seconds: float
    """How long it took."""


def load(
    path: str | os.PathLike[str] | Storage,
    state: Any,
    *,
    step: int | str = "latest",
    strict: bool = True,
    keys: Keys = None,
    rename: Rename = None,
    cast: bool = False,
    missing: str = "error",
    unexpected: str = "error",
    local: str | Callable[[str, list[Any], int, int], Any] = "error",
    verify: bool = True,
    broadcast: bool | str = "auto",
    threads: int | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout: float = 1800.0,
    progress: Callable[[int], None] | None = None,
) -> LoadReport:
    """Load a step into a state, in place. Every rank of the process group calls this with its own part of the state.

    The layouts need not be those of the save: other meshes, placements and numbers of ranks are fine, and each rank
    reads only what it needs.

    Args:
        path: the store.
        state: as for `save`. Tensors are filled in place and keep their layout; values are replaced in their dicts and
            lists; objects get `load_state_dict`. Where the state has None or an empty dict or list, what the checkpoint
            has is put there.
        step: number of the step, or "latest".
        strict: False stands for `missing="keep", unexpected="ignore"`.
        keys: pattern or patterns of names in the state ("model.*"), or a function; only these are loaded, and that no
            name is wanted on any rank is an error.
        rename: from a name of the state to that of the checkpoint: a mapping, a list of (regular expression,
            replacement), or a function.
        cast: convert tensors whose dtype differs; else that is an error.
        missing: what to do with names that the checkpoint lacks: "error", "keep" or "warn".
        unexpected: what to do with names that the state lacks: "error", "ignore" or "warn".
        local: what to do with values of single ranks (`vescale_ckpt.local`) if another number of ranks saved them:
            "error", "keep" what the state has, or a function (name, values of all ranks, rank, number of ranks) that
            returns the value.
        verify: check the checksums of all that is read.
        broadcast: let one holder of a replicated tensor read it and send it to the others; "auto": where there are more
            than two.
        threads: that read at the same time; None: 2.
        process_group: the ranks that load together; None: all.
        timeout: seconds to wait for other ranks.
        progress: called with numbers of bytes that have been read.

    Raises:
        MissingStepError: there is no such step.
        MismatchError: the state and the checkpoint do not go together; lists everything. Nothing was written.
        CorruptionError: the checkpoint is damaged; names the tensors.
        StateError: an object did not take its state; the state is partly loaded, as the message says.
        RanksError: another rank failed.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> _ = ck.save(folder, {"w": torch.arange(3.0), "epoch": 4})
        >>> state = {"w": torch.zeros(3), "epoch": 0}
        >>> ck.load(folder, state).loaded
        ('w',)
        >>> state
        {'w': tensor([0., 1., 2.]), 'epoch': 4}
    """
    begun = time.perf_counter()
    given = {"missing": missing, "unexpected": unexpected, "broadcast": broadcast}
    for name, value in given.items():
        if value not in _CHOICES[name]:
            raise ValueError(f"{name}: expected one of {_CHOICES[name]}, but got {value!r}.")
    if not (callable(local) or local in ("error", "keep")):
        raise ValueError(f'local: expected "error", "keep" or a function, but got {local!r}.')
    if not strict:
        missing, unexpected = "keep", "ignore"
    session = coordinator(process_group, timeout=timeout).session("load")
    misfit: CheckpointError | None = None
    try:
        storage = open_storage(path)
        wait_for(storage)
        opened = open_together(storage, step, session, threads)
        if isinstance(opened, CheckpointError):
            misfit = opened
            raise misfit
        with opened as checkpoint, span("load", checkpoint.folder):
            job = _Job(checkpoint, session, cast=cast, missing=missing, unexpected=unexpected)
            job.find(state, keys, renamer(rename), local)
            parts, misfit = job.agree(shares(job.held, session, broadcast, process_group), broadcast)
            if misfit is not None:
                raise misfit
            _together(session, "read", lambda: job.read(parts, verify, progress, local))
            if parts:
                exchange(parts, job.held, session)
            _together(session, "fill", job.fill)
            return job.report(time.perf_counter() - begun)
    except BaseException as error:
        if error is not misfit:  # which all ranks have found together, so that all of them raise it
            session.fail(error)
        raise
    finally:
        session.close()


def _together(session: Coordinator, name: str, work: Callable[[], None]) -> None:
    """Do some work and go on only if it went well on all ranks, since the next step waits for them.

    A rank that fails raises its own error at once; `load` tells the others, who wait here.
    """
    work()
    session.agree(name, b"", lambda _: b"")


class _Job:
    """One load on one rank."""

    def __init__(
        self, checkpoint: Checkpoint, session: Coordinator, *, cast: bool, missing: str, unexpected: str
    ) -> None:
        self._checkpoint, self._session = checkpoint, session
        self._cast, self._missing, self._unexpected = cast, missing, unexpected
        self._problems: list[str] = []
        self._unexpected_names: list[str] = []
        self._requests: list[Request] = []
        self._locals: dict[int, Any] = {}
        self._read = 0
        self._casts: list[str] = []
        self._match: Match
        self._keys: Keys = None
        self._names: list[str] = []
        self.held: list[tuple[Target, Held]] = []
        """The targets, and how this rank holds them."""

    def find(
        self,
        state: Any,
        keys: Keys,
        rename: Callable[[str], str],
        local: str | Callable[[str, list[Any], int, int], Any],
    ) -> None:
        """Find what goes where, and what does not fit; changes nothing."""
        manifest, session = self._checkpoint.manifest, self._session
        template = _state.template(state)
        match = _state.match(template, manifest.tree, manifest.tensors, wanted=chooser(keys), rename=rename)
        self._match, self._keys, self._names = match, keys, template.names
        problems = self._problems
        problems += match.kinds
        if match.missing and self._missing == "error":
            problems += [f"{name}: {NOT_SAVED}" for name in match.missing]
        problems += settle(self._checkpoint, match, session.ranks, session.rank)
        for target in match.targets:
            if target.tensor is not None:
                held = _state.describe(target.name, target.tensor, session.ranks, session.rank)
                problems += self._misfits(held, manifest.tensors[target.record])
        self._find_locals(local)
        if problems:
            return
        match.allocate()
        for target in match.targets:
            assert target.tensor is not None
            self.held.append((target, _state.describe(target.name, target.tensor, session.ranks, session.rank)))

    def _misfits(self, held: Held, record: TensorRecord) -> Iterator[str]:
        name, spec = held.spec.name, held.spec
        if spec.shape != tuple(record.shape):
            yield f"{name}: shape {list(spec.shape)}, in the checkpoint {list(record.shape)}"
        if spec.dtype != record.dtype:
            self._casts.append(name)
            if not self._cast:
                yield f"{name}: {spec.dtype}, in the checkpoint {record.dtype}; pass cast=True to convert"
            elif not torch.can_cast(_state.dtype_of(record.dtype), _state.dtype_of(spec.dtype)):
                yield f"{name}: {spec.dtype}, in the checkpoint {record.dtype}, which cannot be converted to that"
        if any(_state.shares_elements(view) for _, view in held.parts):
            yield f"{name}: a tensor of which elements share memory, as expand() and unfold() make it; clone() it first"

    def _find_locals(self, local: str | Callable[[str, list[Any], int, int], Any]) -> None:
        """Find the values of ranks that cannot be filled in."""
        match, world = self._match, self._checkpoint.manifest.world
        if not match.locals:
            return
        if world != self._session.world:
            if local == "keep":
                match.keep_locals()
            elif not callable(local):
                names, loads = ", ".join(list(match.locals.values())[:5]), ("loads", "load")
                self._problems.append(
                    f"{names}: values of {counted(world, 'rank')} that saved, but "
                    f'{counted(self._session.world, "rank", loads)}; pass local="keep", or a function that makes new '
                    f"values of the old"
                )
            return
        nodes = self._checkpoint.index(self._session.rank).local
        absent = [slot for slot in match.locals if slot >= len(nodes) or _state.is_absent(nodes[slot])]
        match.kept.update(absent)
        if self._missing == "error":
            self._problems += [f"{match.locals[slot]}: {NO_VALUE}" for slot in absent]

    def agree(self, candidates: Sequence[Share], broadcast: bool | str) -> tuple[list[Share], MismatchError | None]:
        """Bring together what all ranks found.

        Args:
            candidates: what this rank could share.
            broadcast: what the caller wants.

        Returns:
            What is read once and sent, and an error with all that does not fit on any rank; either all ranks get one,
            or none does.
        """
        groups = {share.key: (share.digest(self.held), len(share.holders)) for share in candidates}
        options = f"missing={self._missing!r}, unexpected={self._unexpected!r}, cast={self._cast}, {broadcast=}"
        names = [leaf.name for leaf in leaves(self._checkpoint.manifest.tree)]
        findings = Findings(self._problems, self._match.unexpected, groups, options, self._match.idle)
        verdict = agree(self._session, findings, names)
        self._unexpected_names, problems = verdict.unexpected, verdict.problems
        if verdict.idle:
            known = [*self._names, *names]
            said = asked(self._keys, known)
            problems.append(f"keys: no name of the state or of the checkpoint is wanted {said}")
        if self._unexpected == "error":
            problems += [f"{name}: {NOT_ASKED}" for name in verdict.unexpected]
        if broadcast is True and verdict.torn and not problems:
            problems.append(f'broadcast: {verdict.torn} sets of ranks hold different tensors; use broadcast="auto"')
        if problems:
            return [], self._mismatch(problems)
        self._warn()
        return [share for share in candidates if share.key in verdict.groups], None

    def _mismatch(self, problems: list[str]) -> MismatchError:
        shown = problems[:50] + ([f"... and {len(problems) - 50} more"] if len(problems) > 50 else [])
        advice = hints(self._match.missing, self._unexpected_names)
        absent = tuple(f": {text}" for text in (NOT_SAVED, NOT_ASKED, NO_VALUE))
        others = [problem for problem in problems if not problem.partition(" (rank")[0].endswith(absent)]
        known = {*self._names, *(leaf.name for leaf in leaves(self._checkpoint.manifest.tree))}
        advice += leave_out(others, known, strict=len(others) == len(problems))
        lines = "\n  ".join(shown + [f"hint: {hint}" for hint in advice])
        help_ = "" if others else " strict=False loads what both have."
        return MismatchError(
            f"{self._checkpoint.storage.url} step {self._checkpoint.step} does not fit the state; nothing was loaded."
            f"{help_}\n  {lines}"
        )

    def _warn(self) -> None:
        for names, choice, text in (
            (self._match.missing, self._missing, "not in the checkpoint, kept as they are"),
            (self._unexpected_names, self._unexpected, "not in the state, not loaded"),
        ):
            if names and choice == "warn":
                log.warning("step %d: %s: %s", self._checkpoint.step, text, ", ".join(names[:20]))

    def _read_locals(self, local: str | Callable[[str, list[Any], int, int], Any]) -> None:
        checkpoint, session = self._checkpoint, self._session
        same = checkpoint.manifest.world == session.world
        for slot, name in self._match.locals.items():
            if slot in self._match.kept:
                continue
            if same:
                self._locals[slot] = read_local(checkpoint, session.rank, slot, self._requests)
            elif callable(local):
                checkpoint.prefetch(range(checkpoint.manifest.world))
                requests: list[Request] = []
                old = [read_local(checkpoint, rank, slot, requests) for rank in range(checkpoint.manifest.world)]
                self._read += checkpoint.read_many(requests, consequence="Nothing was loaded.").read
                self._locals[slot] = local(name, old, session.rank, session.world)

    def read(
        self,
        parts: Sequence[Share],
        verify: bool,
        progress: Callable[[int], None] | None,
        local: str | Callable[[str, list[Any], int, int], Any],
    ) -> None:
        """Read what this rank has to read."""
        self._read_locals(local)
        requests = list(self._requests)
        shared = {number for part in parts for number in part.numbers}
        for number, (target, held) in enumerate(self.held):
            if number not in shared:
                requests += [Request(target.record, box, view) for box, view in held.parts]
        for part in parts:
            requests += part.requests(self.held, self._session.rank)
        stats = self._checkpoint.read_many(requests, verify=verify, progress=progress, consequence=PARTLY)
        self._read += stats.read

    def fill(self) -> None:
        """Put the values back."""
        self._match.fill(self._locals.__getitem__)

    def report(self, seconds: float) -> LoadReport:
        """Return what was done."""
        loaded = sum(view.nbytes for _, held in self.held for _, view in held.parts)
        return LoadReport(
            self._checkpoint.step,
            self._checkpoint.folder,
            tuple(target.name for target, _ in self.held),
            tuple(self._match.missing),
            tuple(self._unexpected_names),
            tuple(self._casts),
            loaded,
            self._read,
            seconds,
        )
