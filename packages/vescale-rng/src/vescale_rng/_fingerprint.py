"""What decides the bits of random numbers on a machine, written down so that a checkpoint can carry it.

State and draw counts are the same everywhere; the last bits of some transforms are those of the CPU kernels in use,
CUDA numbers are those of a GPU model, and a torch release may change either. A difference is told, not hidden.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ._agreement import Mesh, compare_rows, gather_rows, name_ranks
from .errors import AgreementError

__all__ = ["STREAM_LAW", "Fingerprint", "check_fingerprints", "fingerprint"]

STREAM_LAW = 1
"""Raised with every change of vescale_rng after which the same seed gives other numbers or another state."""

OnMismatch = Literal["raise", "warn"]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Everything but the seed that decides which numbers are drawn."""

    torch: str
    """Version of torch, with its build suffix."""
    cpu_capability: str
    """Kernels that torch uses on this CPU: "DEFAULT", "AVX2", "AVX512", ..."""
    machine: str
    """Architecture of the machine: "x86_64", "aarch64", ..."""
    gpu: str | None
    """Model of the GPU, None without one."""
    sm_count: int | None
    """Streaming multiprocessors of the GPU."""
    threads_per_sm: int | None
    """Threads that one multiprocessor can hold; with the count it decides the order of draws on CUDA."""
    vescale_rng: str
    """Version of this package."""
    stream_law: int
    """Which numbers this package draws from a stream; see `STREAM_LAW`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as builtins, for JSON.

        >>> here = fingerprint()
        >>> Fingerprint.from_dict(json.loads(json.dumps(here.to_dict()))) == here
        True
        """
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Fingerprint:
        """Make a fingerprint of what `to_dict` gave.

        Args:
            fields: by name. Unknown ones come from a newer vescale_rng, whose version differs then, and are left out.

        Raises:
            ValueError: a field is missing.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in names if name not in fields]
        if missing:
            raise ValueError(
                f"this is no fingerprint: it lacks {', '.join(missing)} (it has {', '.join(fields) or 'nothing'}); "
                "save Fingerprint.to_dict() whole"
            )
        return cls(**{name: fields[name] for name in names})

    def compare(self, other: Fingerprint) -> list[str]:
        """Tell what differs, and what that changes.

        Args:
            other: for example the one that a checkpoint carries.

        Returns:
            One sentence per difference, this fingerprint's value first; empty if the same numbers are drawn.

        Example:
            >>> new = fingerprint()
            >>> old = dataclasses.replace(new, torch="2.10.0")
            >>> new.compare(new), len(new.compare(old))
            ([], 1)
        """
        return [what for what, _ in _differences(self, other)]

    def check(self, other: Fingerprint | Mapping[str, Any], *, on_mismatch: OnMismatch = "raise") -> None:
        """Report differences that could change random numbers.

        Differences after which the same numbers are expected (builds of one torch release on CPUs, AVX2 and AVX512,
        versions of vescale_rng with one stream law) are warned of and never raise.

        Args:
            other: for example the one that a checkpoint carries; also as `to_dict` gave it.
            on_mismatch: "raise" an error, or "warn".

        Raises:
            AgreementError: the fingerprints differ; the message says in what, and what that changes.
            TypeError: `other` is no fingerprint.
            ValueError: `other` lacks a field.
        """
        if on_mismatch not in ("raise", "warn"):
            raise ValueError(f'on_mismatch = {on_mismatch!r}: expected "raise" or "warn"')
        if isinstance(other, Mapping):
            other = Fingerprint.from_dict(other)
        elif not isinstance(other, Fingerprint):
            raise TypeError(
                f"other: expected a Fingerprint, or what its to_dict() gave, got {other!r} ({type(other).__name__})"
            )
        found = _differences(self, other)
        if not found:
            return
        harm = any(harmful for _, harmful in found)
        text = (
            f"random numbers may differ between these two fingerprints{'' if harm else ', though they should not'}:\n"
        )
        text += "\n".join(f"- {what}" for what, _ in found)
        if not harm or on_mismatch == "warn":
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return
        raise AgreementError(f'{text}\nUse a machine and a torch like the other, or check(..., on_mismatch="warn")')


def fingerprint(device: torch.device | str | None = None) -> Fingerprint:
    """Return what decides the bits of random numbers here.

    Args:
        device: the GPU that draws, "cpu" for none; the current CUDA device if None, where there is one.

    Raises:
        ValueError: `device` is a GPU that this torch cannot use.

    Example:
        >>> fingerprint("cpu").gpu is None
        True
    """
    from importlib.metadata import version

    model, sms, threads = _gpu(None if device is None else torch.device(device))
    return Fingerprint(
        torch=str(torch.__version__),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        machine=platform.machine(),
        gpu=model,
        sm_count=sms,
        threads_per_sm=threads,
        vescale_rng=version("vescale-rng"),
        stream_law=STREAM_LAW,
    )


def check_fingerprints(mesh: Mesh = None) -> None:
    """Raise on every rank unless all ranks draw the same numbers from one seed.

    Differences after which the same numbers are expected are warned of. Every rank of `mesh` must call it. Draws
    nothing.

    Args:
        mesh: a `DeviceMesh` of any ndim, a process group, or None for the world.

    Raises:
        AgreementError: naming the ranks that differ from the majority, in what, and what that changes.

    Example:
        >>> check_fingerprints()  # no process group: nothing to compare with
    """
    mine = fingerprint()
    text = json.dumps(mine.to_dict()).encode()
    length = max(row[0] for row in gather_rows([len(text)], mesh).values())
    rows = gather_rows(list(text.ljust(length)), mesh)
    found = compare_rows(rows)
    if found is None:
        return
    odd, usual = found
    all_of_them = {rank: Fingerprint.from_dict(json.loads(bytes(row))) for rank, row in rows.items()}
    most = all_of_them[usual[0]]
    by_difference: dict[tuple[str, ...], list[int]] = {}
    for rank in odd:
        by_difference.setdefault(tuple(all_of_them[rank].compare(most)), []).append(rank)
    lines = [f"- {name_ranks(ranks, mesh)}: {sentence}" for what, ranks in by_difference.items() for sentence in what]
    told = f"compared with {name_ranks(usual, mesh)}:\n" + "\n".join(lines)
    if not any(harmful for rank in odd for _, harmful in _differences(all_of_them[rank], most)):
        warnings.warn(f"ranks differ, though they should draw the same numbers; {told}", RuntimeWarning, stacklevel=2)
        return
    raise AgreementError(
        f"ranks would draw different numbers from the same seed; {told}"
        "\nRun all ranks on one kind of machine with one torch (python -m vescale_rng doctor shows each one's)"
    )


_Difference = tuple[str, bool]
"""What differs and what that changes; whether it can change numbers that are drawn."""


def _differences(here: Fingerprint, there: Fingerprint) -> list[_Difference]:
    found = (
        _compare_torch(here, there),
        _compare_cpu(here, there),
        _compare_gpu(here, there),
        _compare_law(here, there),
    )
    return [one for one in found if one is not None]


def _compare_torch(here: Fingerprint, there: Fingerprint) -> _Difference | None:
    if here.torch == there.torch:
        return None
    release, other = here.torch.partition("+")[0], there.torch.partition("+")[0]
    if release == other:
        gpus = here.gpu is not None and there.gpu is not None
        on_gpu = "; on GPUs last bits may differ" if gpus else ""
        return (
            f"torch {here.torch} and {there.torch}: two builds of one release; the same numbers are expected on the "
            f"CPU{on_gpu}"
        ), gpus
    return (
        f"torch {here.torch} and {there.torch}: a release may change values and draw counts of any operator "
        "(2.12 did for bfloat16 and float16 normals and for trunc_normal_)"
    ), True


def _compare_cpu(here: Fingerprint, there: Fingerprint) -> _Difference | None:
    if here.machine != there.machine:
        return (
            f"CPU architecture {here.machine} and {there.machine}: states and raw numbers should agree, but last bits "
            "of CPU normals, of uniforms with bounds and of whatever takes a logarithm may differ"
        ), True
    one, other = here.cpu_capability, there.cpu_capability
    if one == other:
        return None
    if {one, other} == {"AVX2", "AVX512"}:
        return (
            f"CPU kernels {one} and {other}: equal bits for every random operator on the CPU but gumbel_softmax, "
            "whose softmax differs in the last bits"
        ), False
    return (
        f"CPU kernels {one} and {other}: last bits differ on the CPU for normals (float32 and half types, and fewer "
        "than 16), uniform_ with bounds, cauchy_, log_normal_, dropout's scaling and rrelu; rand, bernoulli, "
        "exponential_, geometric_, randint, randperm and every state agree. ATEN_CPU_CAPABILITY selects kernels"
    ), True


def _compare_gpu(here: Fingerprint, there: Fingerprint) -> _Difference | None:
    one, other = _gpu_name(here), _gpu_name(there)
    if one == other:
        return None
    threads, others = _grid(here), _grid(there)
    if threads is None or others is None:
        return f"GPU {one} and {other}: a GPU and a CPU never draw the same numbers from one seed", True
    if threads == others:
        return (
            f"GPU {one} and {other}: the same numbers in the same order ({threads} threads), but last bits of normals "
            "and other transforms may differ between architectures"
        ), True
    return (
        f"GPU {one} and {other}: other numbers on CUDA for tensors of more than {min(threads, others)} elements, and "
        "another state after large ones"
    ), True


def _compare_law(here: Fingerprint, there: Fingerprint) -> _Difference | None:
    if here.stream_law != there.stream_law:
        return (
            f"stream law {here.stream_law} and {there.stream_law} (vescale_rng {here.vescale_rng} and "
            f"{there.vescale_rng}): one seed gives other numbers, or leaves another state, in some operators"
        ), True
    if here.vescale_rng != there.vescale_rng:
        return (
            f"vescale_rng {here.vescale_rng} and {there.vescale_rng}: both draw the same numbers by design "
            f"(stream law {here.stream_law}); only a fixed bug could change them"
        ), False
    return None


def _gpu_name(of: Fingerprint) -> str:
    return "none" if of.gpu is None else f"{of.gpu} ({of.sm_count} SMs of {of.threads_per_sm} threads)"


def _grid(of: Fingerprint) -> int | None:
    """Threads of torch's largest grid for random kernels, whose blocks have 256."""
    if of.sm_count is None or of.threads_per_sm is None:
        return None
    return of.sm_count * (of.threads_per_sm // 256) * 256


def _gpu(device: torch.device | None) -> tuple[str | None, int | None, int | None]:
    if (device is None and not torch.cuda.is_available()) or (device is not None and device.type != "cuda"):
        return None, None, None
    if not torch.cuda.is_available():
        raise ValueError(f'device = {str(device)!r}: this torch sees no GPU; use "cpu", or None for what is there')
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.multi_processor_count, properties.max_threads_per_multi_processor
