"""`Checkpointer`: saves and restores of a training loop, with retention; no running save is ever lost."""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._coordination import coordinator
from ._format import committed
from ._load import LoadReport, load
from ._ops import Keep, gc
from ._save import Progress, SaveHandle, SaveInfo, StagingPool, async_save, parse_bytes, save
from ._storage import Storage, open_storage
from .errors import MissingStepError

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Checkpointer"]

log = logging.getLogger("vescale_ckpt")


class Checkpointer:
    """Saves steps of a training run to one store and restores them.

    As a context manager it waits for the save that runs, also when the block ends by an error, which then is what the
    caller sees.

    Example:
        >>> import tempfile, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> with Checkpointer(tempfile.mkdtemp(), keep=Keep(last=2)) as checkpointer:
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
                all. Pinned steps and the last one always stay.
            async_: whether `save` returns when the state is copied, or when it is committed.
            staging_bytes: most host memory for copies, e.g. "8GiB"; None: what is needed.
            process_group: the ranks that save together; None: all.
            timeout: seconds to wait for other ranks.
            fsync: make files durable before the commit.
            options: `compress`, `dedup`, `layout`, `threads`, ... as for `save`.
        """
        self._storage = open_storage(root, fsync=fsync)
        self._keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._async = async_
        self._pool = StagingPool(
            limit=parse_bytes(staging_bytes, "staging_bytes") if staging_bytes is not None else None
        )
        self._shared: dict[str, Any] = {"process_group": process_group, "timeout": timeout}
        self._options = {**options, "fsync": fsync}
        self._running: SaveHandle | None = None

    def __repr__(self) -> str:
        return f"Checkpointer({self._storage.url!r}, keep={self._keep!r}, async_={self._async})"

    def __enter__(self) -> Checkpointer:
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

        Waits for the save before, and raises its error if that failed.

        Args:
            step: number of the step.
            state: as for `vescale_ckpt.save`.
            metadata: JSON that is kept with the step; `Keep(best=...)` reads its metric from here.
            options: for this save only, e.g. `overwrite=True`.

        Returns:
            A handle, or with `async_=False` what was written.
        """
        self.wait()
        arguments = {**self._options, **options, "metadata": metadata, "step": step, **self._shared}
        if not self._async:
            info = save(self._storage, state, pool=self._pool, **arguments)
            self._retain()
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
        self.wait()
        try:
            return self.load(state, step, **options).step
        except MissingStepError:
            if missing_ok and step == "latest":
                return None
            raise

    def load(self, state: Any, step: int | str = "latest", **options: Any) -> LoadReport:
        """Load a step into a state, in place, and return the whole report; arguments as for `vescale_ckpt.load`."""
        self.wait()
        return load(self._storage, state, step=step, **{**self._shared, **options})

    def steps(self) -> list[int]:
        """Return the committed steps, rising."""
        return sorted({entry.commit.step for entry in committed(self._storage)})

    def progress(self) -> Progress | None:
        """Return how far the running save is; None if none runs."""
        return self._running.progress() if self._running is not None else None

    def wait(self) -> SaveInfo | None:
        """Wait for the running save, then remove the steps that need not stay; return what was written."""
        if self._running is None:
            return None
        running, self._running = self._running, None
        info = running.wait()
        self._retain()
        return info

    def close(self) -> None:
        """Wait for the running save and give back the host memory."""
        try:
            self.wait()
        finally:
            self._pool.release()

    def _retain(self) -> None:
        """Remove old steps, on the first rank; what cannot be removed now is removed after the next save."""
        if self._keep is None or coordinator(**self._shared).rank != 0:
            return
        try:
            gc(self._storage, keep=self._keep)
        except OSError as error:
            log.warning("old steps could not be removed: %s", error)
