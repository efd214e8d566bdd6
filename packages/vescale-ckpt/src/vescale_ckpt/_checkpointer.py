"""`Checkpointer`: saves and restores of a training loop, with retention; no running save is ever lost."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._coordination import coordinator
from ._format import StepFolders, committed
from ._load import LoadReport, load
from ._ops import Keep, gc
from ._ops.retention import Saved, as_keep
from ._save import Progress, SaveHandle, SaveInfo, StagingPool, async_save, parse_bytes, save
from ._save.options import SaveOptions
from ._storage import Storage, open_storage
from .errors import CheckpointError, MissingStepError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Checkpointer"]

log = logging.getLogger("vescale_ckpt")

_GIVEN = ("path", "state", "step", "metadata", "pool")
"""Arguments that a `Checkpointer` gives itself or takes by a name of its own."""


class Checkpointer:
    """Saves steps of a training run to one store and restores them.

    As a context manager it waits for the save that runs, also when the block ends by an error, which then is what the
    caller sees. After that it restores and lists steps, but saves no more, until another block begins.

    Example:
        >>> import tempfile, torch, vescale_ckpt as ck
        >>> model = torch.nn.Linear(2, 2)
        >>> with ck.Checkpointer(tempfile.mkdtemp(), keep=ck.Keep(last=2)) as checkpointer:
        ...     start = checkpointer.restore({"model": model}, missing_ok=True)
        ...     for step in range(3):
        ...         _ = checkpointer.save(step, {"model": model})
        >>> checkpointer.steps()
        [1, 2]
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        keep: Keep | int | None = None,
        async_: bool = True,
        staging_bytes: int | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        timeout: float = 1800.0,
        fsync: bool = True,
        **options: Any,
    ) -> None:
        """Open a store.

        Args:
            root: folder, URL or storage.
            keep: which steps stay after a newer one is committed; a number stands for `Keep(last=number)`; None keeps
                all. Pinned steps, the last one and the one that was just saved always stay.
            async_: whether `save` returns when the state is copied, or when it is committed.
            staging_bytes: most host memory for copies, e.g. "8GiB"; None: what is needed.
            process_group: the ranks that save together; None: all.
            timeout: seconds to wait for other ranks.
            fsync: make files durable before the commit.
            options: `compress`, `dedup`, `layout`, `threads`, ... as for `save`.
        """
        self._storage = open_storage(root, fsync=fsync)
        self._keep = as_keep(keep)
        _check_names("Checkpointer", save, options)
        _check_values({**options, "timeout": timeout})
        self._async = async_
        self._limit = parse_bytes(staging_bytes, "staging_bytes") if staging_bytes is not None else None
        self._pool = StagingPool(limit=self._limit)
        self._process = os.getpid()
        self._shared: dict[str, Any] = {"process_group": process_group, "timeout": timeout}
        self._options = {**options, "fsync": fsync}
        self._running: SaveHandle | None = None
        self._told = self._closed = False
        self._highest = -1
        """Highest step that was saved here; -1 before the first."""

    def __repr__(self) -> str:
        return f"Checkpointer({self._storage.url!r}, keep={self._keep!r}, async_={self._async})"

    def __enter__(self) -> Checkpointer:
        self._closed = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # noqa: BLE001 - the first error is the one to see
            log.error("and the save that ran failed: %s", second)

    def save(self, step: int, state: Any, *, metadata: Any = None, **options: Any) -> SaveHandle | SaveInfo:
        """Save a step; every rank calls this.

        Waits for the save before, and raises its error if that failed and its handle has not said so yet.

        Args:
            step: number of the step.
            state: as for `vescale_ckpt.save`.
            metadata: JSON that is kept with the step; `Keep(best=...)` reads its metric from here.
            options: for this save only, e.g. `overwrite=True`.

        Returns:
            A handle, or with `async_=False` what was written.

        Raises:
            CheckpointError: after `close()`, when nobody would wait for the save; or it failed.
        """
        if self._closed:
            raise CheckpointError(
                f"Checkpointer: save of step {step} after close(), when nobody would wait for it. Save "
                f"inside of the `with` block, or begin another one."
            )
        _check_names("Checkpointer.save", save, options)
        self.wait()
        arguments = {**self._options, **self._shared, **options, "metadata": metadata, "step": step}
        if not self._async:
            info = save(self._storage, state, pool=self._pool, **arguments)
            self._after(info.step)
            return info
        self._running = async_save(self._storage, state, pool=self._pool, **arguments)
        return self._running

    def restore(
        self, state: Any, step: int | str = "latest", *, missing_ok: bool = False, **options: Any
    ) -> int | None:
        """Load a step into a state, in place; every rank calls this.

        Args:
            state: as for `vescale_ckpt.load`.
            step: number of the step, or "latest".
            missing_ok: return None instead of raising where the store has no step, as at the start of a run.
            options: of `vescale_ckpt.load`, e.g. `strict=False`.

        Returns:
            The step that was loaded.

        Raises:
            MissingStepError: there is no such step.
            MismatchError: the state and the checkpoint do not belong together.
        """
        try:
            return self.load(state, step, **options).step
        except MissingStepError:
            if missing_ok and step == "latest":
                return None
            raise

    def load(self, state: Any, step: int | str = "latest", **options: Any) -> LoadReport:
        """Load a step into a state, in place, and return the whole report; arguments as for `vescale_ckpt.load`."""
        _check_names("Checkpointer", load, options)
        self.wait()
        return load(self._storage, state, step=step, **{**self._shared, **options})

    def steps(self) -> list[int]:
        """Return the committed steps, rising."""
        return sorted({entry.commit.step for entry in committed(self._storage)})

    def progress(self) -> Progress | None:
        """Return how far the running save is; None if none runs."""
        return self._running.progress() if self._running is not None else None

    def wait(self) -> SaveInfo | None:
        """Wait for the running save, then remove the steps that need not stay; return what was written.

        None stands for no save, or one that failed and whose handle has said so already. After a fork the save belongs
        to the parent.
        """
        running, self._running = self._running, None
        if self._process != os.getpid():  # a fork has no thread that writes, nor one that gives buffers back
            self._process, self._pool, running = os.getpid(), StagingPool(limit=self._limit), None
        if running is None or running.seen():
            return None
        info = running.wait()
        self._after(info.step)
        return info

    def close(self) -> None:
        """Wait for the running save and give back the host memory; nothing is saved after that."""
        self._closed = True
        try:
            self.wait()
        finally:
            self._pool.release()

    def _after(self, step: int) -> None:
        """Remove old steps, on the first rank; what cannot be removed now is removed after the next save."""
        if coordinator(**self._shared).rank != 0:
            return
        try:
            self._tell_of_later(step)
            if self._keep is not None:
                gc(self._storage, keep=_AlsoSaved(rule=self._keep, saved=step))
        except (CheckpointError, OSError) as error:  # the step is saved all the same
            log.warning("old steps could not be removed: %s", error)

    def _tell_of_later(self, step: int) -> None:
        """Warn, once, of steps that a run left behind which went back to an earlier one: they stay the latest."""
        known, self._highest = self._highest, max(step, self._highest)
        if self._told or 0 <= known < step:  # no look at the storage while steps rise
            return
        latest = StepFolders(self._storage).latest()
        if latest is not None and latest.step > step:
            self._told = True
            log.warning(
                "step %d was saved, but %s also has step %d, which restore() takes for the latest: restore a step by "
                "its number, or go on in another store.",
                step,
                self._storage.url,
                latest.step,
            )


@dataclass(frozen=True, slots=True)
class _AlsoSaved(Keep):
    """A rule, and the step that was just saved: after a return to an earlier step its number is not the last."""

    rule: Keep = field(default_factory=Keep)
    """The caller's."""
    saved: int = 0
    """Number of the step."""

    @property
    def looks_inside(self) -> bool:
        """Whether times or metadata matter."""
        return self.rule.looks_inside

    def choose(self, steps: Iterable[Saved], now: float = 0.0) -> set[int]:
        """Return the numbers of the steps that stay."""
        return self.rule.choose(steps, now) | {self.saved}


def _check_names(caller: str, function: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise TypeError for an option that a function of the package does not have, or that is given otherwise."""
    known = [name for name in inspect.signature(function).parameters if name not in _GIVEN]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}."
            raise TypeError(f"{caller}: {name} is no option of `{function.__name__}`; {hint}")


def _check_values(options: dict[str, Any]) -> None:
    """Raise at once what `save` would raise hours later."""
    SaveOptions(**{one.name: options[one.name] for one in fields(SaveOptions) if one.name in options})
