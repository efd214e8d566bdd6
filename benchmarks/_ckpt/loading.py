"""Rows about loads in one process: in place, page cache warm and cold, and the memory that a load takes on top."""

from __future__ import annotations

import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from _process import forget_peak, resident
from _timing import row

from .measure import MIB, Rounds, Setup, State, compare, drop_cache, folder_bytes, make_state, summary, timed_load
from .systems import SYSTEMS, hush, make_systems

LOADERS = (
    "raw file",
    "vescale",
    "vescale compressed",
    "vescale plain",
    "dcp",
    "torch.save",
    "torch.save mmap",
    "safetensors",
)
LOADERS += ("torch_checkpointing",)


def loads(setup: Setup) -> None:
    """Load into tensors that are there, from the page cache and from the disk."""
    state = make_state(setup.size)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    warm, cold = Rounds(), Rounds()
    with setup.scratch() as folder:
        systems = make_systems(LOADERS, folder, setup.skipped)
        roots = {name: folder / name.replace(" ", "-") for name in systems}
        for name, system in systems.items():
            setup.warm_pages()
            system.save(0, state)
            system.wait()
            system.load(0, into)
            assert all(torch.equal(into[key], tensor) for key, tensor in state.items()), f"{name} loads other values"
            for tensor in into.values():
                tensor.zero_()
        for rounds, prepare in ((warm, _touch), (cold, drop_cache)):
            for order in setup.orders(list(systems), seed=2):
                for name in order:
                    prepare(roots[name])
                    rounds.add(name, timed_load(partial(systems[name].load, 0, into)))
        for system in systems.values():
            system.close()
        for rounds, text in ((warm, "warm"), (cold, "cold")):
            setup.report.heading(f"load in place, page cache {text}: seconds over reading a raw file into the tensors")
            _rows(setup, rounds, text)
        state.clear()
        into.clear()
        _memory(setup, {name: roots[name] for name in systems if name != "raw file"})


def _rows(setup: Setup, rounds: Rounds, text: str) -> None:
    for name in LOADERS:
        summary(setup, rounds, name, "raw file", f"load {text}")
    compare(setup, rounds, "vescale", "dcp", f"load {text}", 0.5)
    for ours in ("vescale compressed", "vescale plain"):
        compare(setup, rounds, ours, "dcp", f"load {text}")


def _touch(root: Path) -> None:
    """Read all files below a folder, so that they lie in the page cache."""
    block = bytearray(4 * MIB)
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(block):
                    pass


def _memory(setup: Setup, roots: dict[str, Path]) -> None:
    setup.report.heading("peak of resident memory in a load over the size of the state (mapped files count)")
    context = multiprocessing.get_context("spawn")
    for name, root in roots.items():
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_peak, args=(name, str(root.parent), setup.size, send))
        child.start()
        send.close()
        try:
            extra = receive.recv()
        except EOFError:
            extra = None
        child.join()
        goal = 0.05 if name in ("vescale", "vescale compressed", "vescale plain") else None
        note = f"{(extra or 0) / MIB:.0f} MiB; the files hold {folder_bytes(root) / MIB:.0f} MiB"
        note = "the process failed" if extra is None else note
        setup.report.add(row(f"extra memory: {name}", None if extra is None else extra / setup.size, goal, note))


def _peak(name: str, folder: str, size: int, send: Connection) -> None:
    """Load in a fresh process, and send by how many bytes its resident memory grew at most."""
    hush()
    system = SYSTEMS[name](Path(folder) / name.replace(" ", "-"))
    probe = SYSTEMS[name](Path(folder) / f"probe-{name.replace(' ', '-')}")
    small: State = make_state(4 * MIB)
    probe.save(0, small)
    probe.wait()
    probe.load(0, small)  # imports and thread pools do not count
    probe.close()
    into = make_state(size, fill=1.0)
    forget_peak()
    before = resident("VmRSS")
    system.load(0, into)
    send.send(max(0, resident("VmHWM") - before))
    send.close()
    system.close()
