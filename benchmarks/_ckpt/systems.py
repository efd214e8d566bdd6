"""The systems under test, behind one protocol: save a dict of tensors, wait until it is durable, load it in place.

Who does not make files durable is helped: the fsync counts for it, as every system is measured until its save would
survive a power cut.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .measure import State, sync_files


class System(Protocol):
    """A way to keep checkpoints below a folder."""

    def save(self, step: int, state: State) -> None:
        """Start a save; the state may be changed when it returns."""

    def wait(self) -> None:
        """Return when the last save is durable."""

    def load(self, step: int, into: State) -> None:
        """Fill the tensors of `into`."""

    def drop(self, step: int) -> None:
        """Remove a step, where no later one needs it."""

    def close(self) -> None:
        """Release threads, processes and buffers."""


class _Peer:
    """A folder or file per step."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def path(self, step: int) -> Path:
        """Name what a step is saved as."""
        return self.root / f"{step:06d}"

    def wait(self) -> None:
        """Nothing to wait for."""

    def drop(self, step: int) -> None:
        """Remove the file or folder."""
        path = self.path(step)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing to release."""


class Vescale:
    """The package itself; options go to `save`."""

    def __init__(self, root: Path, background: bool = False, **options: Any) -> None:
        from vescale_ckpt import async_save, load, save

        self._save, self._load = async_save if background else save, load
        self.root, self._options, self._handle = root, options, None
        root.mkdir(parents=True, exist_ok=True)
        self._background = background

    def save(self, step: int, state: State) -> None:
        """Save, or start to."""
        made = self._save(self.root, state, step=step, **self._options)
        self._handle = made if self._background else None

    def wait(self) -> None:
        """Wait for the handle."""
        if self._handle is not None:
            self._handle.wait()

    def load(self, step: int, into: State) -> None:
        """Load in place, checksums on."""
        self._load(self.root, into, step=step)

    def drop(self, step: int) -> None:
        """Remove the folder of a step that nothing refers to."""
        for folder in (self.root / "steps").glob(f"{step:08d}-*"):
            shutil.rmtree(folder)

    def close(self) -> None:
        """Wait for what still runs."""
        self.wait()


class WarmCopy(_Peer):
    """One copy into memory that is there already: the floor of every snapshot."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._buffers: State = {}

    def save(self, step: int, state: State) -> None:
        """Copy."""
        if not self._buffers:
            self._buffers = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        for name, tensor in state.items():
            self._buffers[name].copy_(tensor)

    def load(self, step: int, into: State) -> None:
        """Copy back."""
        for name, tensor in into.items():
            tensor.copy_(self._buffers[name])


class Raw(_Peer):
    """The bytes, one after the other: the floor of every save and load."""

    def save(self, step: int, state: State) -> None:
        """Write and fsync."""
        with self.path(step).open("wb", buffering=0) as file:
            for tensor in state.values():
                view = _bytes(tensor)
                while view.nbytes:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())

    def load(self, step: int, into: State) -> None:
        """Read straight into the tensors."""
        with self.path(step).open("rb", buffering=0) as file:
            for tensor in into.values():
                view = _bytes(tensor)
                while view.nbytes:
                    view = view[file.readinto(view) :]


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class TorchSave(_Peer):
    """`torch.save` and `torch.load`."""

    def __init__(self, root: Path, mmap: bool = False) -> None:
        super().__init__(root)
        self._mmap = mmap

    def save(self, step: int, state: State) -> None:
        """Save and fsync."""
        with self.path(step).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, step: int, into: State) -> None:
        """Load, and copy into place as `load_state_dict` does."""
        _copy(torch.load(self.path(step), mmap=self._mmap, weights_only=True), into)


class Safetensors(_Peer):
    """`save_file` and `load_file` of safetensors."""

    def save(self, step: int, state: State) -> None:
        """Save and fsync."""
        from safetensors.torch import save_file

        save_file(state, self.path(step))
        with self.path(step).open("rb") as file:
            os.fsync(file.fileno())

    def load(self, step: int, into: State) -> None:
        """Load, and copy into place."""
        from safetensors.torch import load_file

        _copy(load_file(self.path(step)), into)


def _copy(loaded: State, into: State) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])


class Dcp(_Peer):
    """`dcp.save` as it comes, or with two threads and its plan cache."""

    def __init__(self, root: Path, tuned: bool = False) -> None:
        super().__init__(root)
        self._tuned = tuned
        _forget_plans()

    def save(self, step: int, state: State) -> None:
        """Save, which ends with an fsync."""
        if self._tuned:
            writer = dcp.FileSystemWriter(self.path(step), thread_count=2)
            dcp.save(state, storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        else:
            dcp.save(state, checkpoint_id=self.path(step))

    def load(self, step: int, into: State) -> None:
        """Load in place."""
        dcp.load(into, checkpoint_id=self.path(step))


class DcpAsync(Dcp):
    """`dcp.async_save` as it comes, or with one stager that lives on, two threads and the plan cache."""

    def __init__(self, root: Path, tuned: bool = False) -> None:
        super().__init__(root, tuned)
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if tuned else None
        self._future: Future[Any] | None = None

    def save(self, step: int, state: State) -> None:
        """Stage, and write in a thread."""
        if self._tuned:
            writer = dcp.FileSystemWriter(self.path(step), thread_count=2)
            planner = DefaultSavePlanner(enable_plan_caching=True)
            made = dcp.async_save(state, storage_writer=writer, planner=planner, async_stager=self._stager)
        else:
            made = dcp.async_save(state, checkpoint_id=self.path(step))
        self._future = made if isinstance(made, Future) else made.upload_completion

    def wait(self) -> None:
        """Wait for the upload."""
        if self._future is not None:
            self._future.result()

    def close(self) -> None:
        """Close the stager."""
        self.wait()
        if self._stager is not None:
            self._stager.close()


def _forget_plans() -> None:
    """Empty the plan cache of DCP: its key is the name of a class, and it mistakes one dtype for another."""
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.clear()


class TorchCheckpointing(_Peer):
    """Meta's torch_checkpointing: buffered, since its direct writes fail on tails that are not aligned."""

    def __init__(self, root: Path, background: bool = False, reshard: bool = False) -> None:
        super().__init__(root)
        import torch_checkpointing
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        kind = torch_checkpointing.CheckpointManager.Config
        config = kind.with_async_save() if background else kind.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        if reshard:  # which several ranks can load without CUDA, but not save
            config.items = {"model": torch_checkpointing.ItemSpec(resharder=DefaultResharder())}
        self._manager = config.build()
        self._last: tuple[int, Future[Any] | None] | None = None

    def save(self, step: int, state: State) -> None:
        """Save; in the background, until the copy is made: the source is free only then."""
        self._last = step, self._manager.save(str(self.path(step)), {"model": state})
        if self._manager._staging_future is not None:
            self._manager._staging_future.result()

    def wait(self) -> None:
        """Wait for the writer, and make durable what it wrote."""
        if self._last is not None:
            step, future = self._last
            if future is not None:
                future.result()
            sync_files(self.path(step))
            self._last = None

    def load(self, step: int, into: State) -> None:
        """Load in place."""
        self._manager.load(str(self.path(step)), into={"model": into})

    def close(self) -> None:
        """Stop its process."""
        self._manager.close()


SYSTEMS: dict[str, Callable[[Path], System]] = {
    "memcpy, warm": WarmCopy,
    "raw file": Raw,
    "vescale": Vescale,
    "vescale compressed": lambda root: Vescale(root, compress="auto"),
    "vescale plain": lambda root: Vescale(root, layout="plain"),
    "vescale async": lambda root: Vescale(root, background=True),
    "dcp": Dcp,
    "dcp tuned": lambda root: Dcp(root, tuned=True),
    "dcp async": DcpAsync,
    "dcp async tuned": lambda root: DcpAsync(root, tuned=True),
    "torch.save": TorchSave,
    "torch.save mmap": lambda root: TorchSave(root, mmap=True),
    "safetensors": Safetensors,
    "torch_checkpointing": TorchCheckpointing,
    "torch_checkpointing async": lambda root: TorchCheckpointing(root, background=True),
    "torch_checkpointing reshard": lambda root: TorchCheckpointing(root, reshard=True),
}
"""All systems by name; tuned means two writer threads, plan cache, one stager that is used again."""


def make_systems(names: tuple[str, ...], folder: Path, skipped: dict[str, str]) -> dict[str, System]:
    """Make the systems that are installed, each in its own folder; say why the others are not."""
    made: dict[str, System] = {}
    for name in names:
        try:
            made[name] = SYSTEMS[name](folder / name.replace(" ", "-"))
        except ImportError as error:
            skipped[name] = f"not installed: {error.name}"
    return made


def hush() -> None:
    """Silence what the peers log and warn about themselves."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    for name in ("torch_checkpointing", "torch.distributed.checkpoint"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
