"""What the ranks of a load agree on: which step, whether state and checkpoint fit, and which tensors they may share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .._coordination import Coordinator
from .._format import Commit, Committed, Manifest, find, step_path
from .._format.commit import check_digest
from .._format.limits import MANIFEST_BYTES
from .._format.paths import COMMIT, MANIFEST
from .._storage import Storage
from ..errors import CheckpointError, CorruptionError, FormatError, MissingStepError, RanksError
from .checkpoint import Checkpoint
from .earlier import with_earlier

__all__ = ["Findings", "Verdict", "agree", "open_together"]

_ERRORS: dict[str, type[CheckpointError]] = {
    error.__name__: error for error in (CorruptionError, FormatError, MissingStepError)
}
"""What is wrong with the step and not with a rank."""


def open_together(
    storage: Storage, step: int | str, session: Coordinator, threads: int | None = None
) -> Checkpoint | CheckpointError:
    """Open the same step on all ranks: one of them looks for it and reads the manifest.

    Args:
        storage: the store.
        step: which one.
        session: all ranks call this.
        threads: that read at the same time.

    Returns:
        The open step, or on all ranks alike the error of one that is not there or cannot be read.

    Raises:
        RanksError: ranks ask for different steps.
    """
    if session.world == 1:
        return Checkpoint(storage, find(storage, step), threads=threads)
    data = session.broadcast("step", _told(storage, step) if session.rank == 0 else None)
    first, second = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8))
    told = json.loads(data[16 : 16 + first])
    if "error" in told:
        return _ERRORS[told["error"]](told["text"])
    if told["step"] != step:
        raise RanksError(f"step: this is {step!r} on rank {session.rank}, but {told['step']!r} on rank 0.")
    committed = Committed(told["folder"], Commit.from_bytes(data[16 + first : 16 + first + second]))
    text, at = data[16 + first + second :], f"{storage.url}: {step_path(committed.folder, MANIFEST)}"
    try:
        check_digest(text, committed.commit.manifest_sha256, committed.commit.manifest_bytes, at, COMMIT)
    except CorruptionError as error:
        raise with_earlier(error, storage, committed.step) from None
    return Checkpoint(storage, committed, manifest=Manifest.from_bytes(text, at), threads=threads)


def _told(storage: Storage, step: int | str) -> bytes:
    """Return what member 0 tells of a step: its folder, COMMIT and manifest, or why there are none."""
    commit = manifest = b""
    head: dict[str, object] = {"step": step}
    try:
        found = find(storage, step)
        head["folder"], commit = found.folder, found.commit.to_bytes()
        manifest = storage.get(step_path(found.folder, MANIFEST), MANIFEST_BYTES)
    except (MissingStepError, CorruptionError, FormatError) as error:
        head |= {"error": type(error).__name__, "text": str(error)}
    except FileNotFoundError:
        gone = CorruptionError(f"{storage.url}, {head['folder']}: no manifest, though the step is committed.")
        head |= {"error": CorruptionError.__name__, "text": str(with_earlier(gone, storage, found.step))}
    first = json.dumps(head).encode()
    sizes = b"".join(len(part).to_bytes(8, "little") for part in (first, commit))
    return b"".join((sizes, first, commit, manifest))


@dataclass(slots=True)
class Findings:
    """What one rank found when it compared its state with the checkpoint."""

    problems: list[str] = field(default_factory=list)
    """One line each."""
    unexpected: Sequence[str] = ()
    """Names of the checkpoint that the rank's state lacks."""
    groups: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Of each set of ranks that hold the same: digest of what they would share, and how many they are."""
    options: str = ""
    """What must be the same on all ranks, for messages."""
    idle: bool = False
    """Whether the caller's `keys` choose nothing that this rank knows."""


@dataclass(slots=True)
class Verdict:
    """What all found together."""

    problems: list[str]
    """One line each, with the ranks that have the problem."""
    unexpected: list[str]
    """Names of the checkpoint that no rank's state has."""
    groups: frozenset[str]
    """Sets of ranks of which all want to share the same."""
    torn: int = 0
    """Number of the other sets of ranks that were named."""
    idle: bool = False
    """Whether nothing is chosen on any rank."""


def agree(session: Coordinator, findings: Findings, names: Sequence[str]) -> Verdict:
    """Bring together what the ranks found.

    Args:
        session: all ranks call this.
        findings: of this rank.
        names: all keys of the checkpoint, in the same order on all ranks.

    Raises:
        RanksError: the ranks were called with different options.
    """
    if session.world == 1:
        groups = frozenset(key for key, (_, count) in findings.groups.items() if count == 1)
        return Verdict(findings.problems, list(findings.unexpected), groups, idle=findings.idle)
    place = {name: number for number, name in enumerate(names)}
    # A bit per key: the names themselves would be a megabyte per rank, since stages of a pipeline lack most keys.
    bits = sum(1 << place[name] for name in findings.unexpected if name in place)
    said = [findings.problems, f"{bits:x}", dict(findings.groups), findings.options, findings.idle]
    problems, lacking, groups, *others = json.loads(session.agree("match", json.dumps(said).encode(), _decide))
    unexpected = int(lacking, 16)
    return Verdict(problems, [name for n, name in enumerate(names) if unexpected >> n & 1], frozenset(groups), *others)


def _decide(messages: list[bytes]) -> bytes:
    lacking = -1
    ranks_of: dict[str, list[int]] = {}
    votes: dict[str, dict[tuple[str, int], int]] = {}
    options: dict[str, int] = {}
    idle = True
    for rank, (problems, bits, groups, given, nothing) in enumerate(map(json.loads, messages)):
        idle = idle and nothing
        lacking &= int(bits, 16)
        for problem in problems:
            ranks_of.setdefault(problem, []).append(rank)
        for key, (digest, count) in groups.items():
            counts = votes.setdefault(key, {})
            counts[(digest, count)] = counts.get((digest, count), 0) + 1
        options.setdefault(given, rank)
    if len(options) > 1:
        (one, first), (other, second) = list(options.items())[:2]
        raise RanksError(f"load: called with {one} on rank {first}, but with {other} on rank {second}.")
    ready = [key for key, counts in votes.items() if any(count == n for (_, count), n in counts.items())]
    lines = [f"{text} ({_ranks(ranks)})" if len(ranks) < len(messages) else text for text, ranks in ranks_of.items()]
    return json.dumps([lines, f"{lacking:x}", ready, len(votes) - len(ready), idle]).encode()


def _ranks(ranks: Iterable[int]) -> str:
    some = list(ranks)
    return f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some[:8]))}{', ...' if len(some) > 8 else ''}"
