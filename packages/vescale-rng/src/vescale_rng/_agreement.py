"""Are the generators of all ranks in the same state? Checked with a hash that each rank shows to all.

Sharded random numbers are one device's numbers only while every rank's generator is where that device's would be.
Rows of integers are gathered one mesh dim after the other, so that every mesh works and no process group is made.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ._draw.who import default_generator
from .errors import AgreementError

__all__ = ["Mesh", "check_agreement", "compare_rows", "gather_rows", "name_ranks", "state_hash"]

Mesh: TypeAlias = "DeviceMesh | dist.ProcessGroup | None"
"""Ranks that must agree: those of a mesh of any ndim, of a process group, or (None) of the world."""

_NAMED = 16
"""More ranks than this are counted rather than listed in a message."""


def check_agreement(
    mesh: Mesh = None,
    generator: torch.Generator | HasState | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Raise on every rank unless a generator is in the same state on all of them.

    Every rank of `mesh` must call it; ranks outside of it may. No generator moves. Costs about a millisecond and one
    small all-gather per mesh dim; nothing at all on one rank, without a process group or with the fake backend.

    Args:
        mesh: a `DeviceMesh` of any ndim, sub-meshes included, a process group, or None for the world.
        generator: the generator to compare, of torch, `portable` or `emulate_cuda`; the default one of `device` if
            None.
        device: whose default generator to compare; that of the mesh if None. For a process group or the world: the
            accelerator that the group communicates with, else the CPU.

    Raises:
        AgreementError: naming the ranks whose state differs from that of the majority. In a tie the
            state of the lowest rank counts as the right one.
        ValueError: both `generator` and `device` are given, or this torch cannot use the device.
        TypeError: an argument is of another kind.

    Example:
        >>> check_agreement()  # no process group: nothing to agree with
    """
    _check_mesh(mesh)
    if generator is not None:
        if not isinstance(generator, HasState):
            raise TypeError(f"generator: expected a random generator, got {generator!r} ({type(generator).__name__})")
        if device is not None:
            raise ValueError(
                f"check_agreement got generator ({_name(generator)}) and device = {device}; give one of them"
            )
    elif device is not None:
        generator = default_generator(_device(device))
    if not _peers(mesh):
        return
    if generator is None:
        generator = default_generator(torch.device(_device_type(mesh)))
    hashed = state_hash(generator)
    seed = _signed(generator.initial_seed())
    rows = gather_rows([hashed, seed], mesh)
    found = compare_rows({rank: row[:1] for rank, row in rows.items()})
    if found is None:
        return
    odd, usual = found
    seeds = {rank: row[1] % 2**64 for rank, row in rows.items()}
    if len(set(seeds.values())) > 1:
        cause = f"Seeds differ: {_list_seeds(seeds)}. Call torch.manual_seed(seed) with one seed on every rank"
    else:
        cause = (
            f"The seed is {seeds[usual[0]]} on all of them, so some drew more numbers than others. "
            "Let every rank run the same random operators, in the same order"
        )
    raise AgreementError(
        f"{_name(generator)} is not in the same state on all {len(rows)} ranks of "
        f"{_describe(mesh)}: {name_ranks(odd, mesh)} {'differs' if len(odd) == 1 else 'differ'} from "
        f"{name_ranks(usual, mesh)}. Replicas would draw different numbers, and shards would not be parts of one "
        f"tensor. {cause}; what one rank draws for itself (data augmentation, a sampler) belongs to a "
        "torch.Generator of its own or into torch.random.fork_rng(). To go on from here, give all ranks the state of "
        "one: broadcast its get_rng_state() and set_rng_state() it"
    )


@runtime_checkable
class HasState(Protocol):
    """A random generator: what `torch.Generator` and the generators of this package have in common."""

    def get_state(self) -> torch.Tensor:
        """Return the state, as bytes."""
        ...

    def initial_seed(self) -> int:
        """Return the seed."""
        ...


def _name(generator: HasState) -> str:
    if isinstance(generator, torch.Generator):
        return f"the random generator of {generator.device}"
    return f"the {type(generator).__name__}"


def _device(device: Any) -> torch.device:
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise TypeError(f"device = {device!r}: expected a device of torch, such as 'cpu' or 'cuda:1'") from None


def state_hash(generator: HasState) -> int:
    """Return 63 bits that stand for the state of a generator, the cached normal number included.

    >>> one, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    >>> state_hash(one) == state_hash(other)
    True
    >>> _ = torch.rand(1, generator=other)
    >>> state_hash(one) == state_hash(other)
    False
    """
    state = bytes(generator.get_state().tolist())  # numpy may be absent
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") >> 1


def gather_rows(row: Sequence[int], mesh: Mesh) -> dict[int, list[int]]:
    """Show a row of 64-bit integers, equally long on all ranks, to every rank of `mesh`.

    Returns:
        The rows by global rank, in rising order; only this rank's own where there is nobody to talk to.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    rows = torch.tensor([[rank, *row]], dtype=torch.int64, device="cpu")
    for group in _peers(mesh):
        sent = rows.to(_carrier(group))
        parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, sent, group=group)
        rows = torch.cat(parts).cpu()
    return {who: said for who, *said in sorted(rows.tolist())}


def compare_rows(rows: dict[int, list[int]]) -> tuple[list[int], list[int]] | None:
    """Return the ranks that differ from the majority, and the majority; None if all rows are equal.

    >>> compare_rows({0: [5], 1: [7], 2: [5]})
    ([1], [0, 2])
    """
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(rows):
        holders.setdefault(tuple(rows[rank]), []).append(rank)
    if len(holders) == 1:
        return None
    usual = max(holders.values(), key=lambda ranks: (len(ranks), -ranks[0]))
    return [rank for rank in sorted(rows) if rank not in usual], usual


def name_ranks(ranks: Sequence[int], mesh: Mesh) -> str:
    """Name global ranks, with their coordinates in the mesh: ``"rank 3 (dp=1, tp=1)"``."""
    at = _coordinates(mesh) if isinstance(mesh, DeviceMesh) else {}
    named = ", ".join(f"{rank} ({at[rank]})" if rank in at else str(rank) for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"


def _peers(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Groups to gather over, one after the other; none where this rank has nobody to agree with."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    if isinstance(mesh, DeviceMesh):
        if mesh.get_coordinate() is None:
            return []
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    elif mesh is None:
        assert dist.group.WORLD is not None  # a group is initialized
        groups = [dist.group.WORLD]
    elif isinstance(mesh, dist.ProcessGroup):
        groups = [mesh]
    else:  # a rank outside of the group
        return []
    return [g for g in groups if dist.get_world_size(g) > 1 and dist.get_backend(g) != "fake"]


def _check_mesh(mesh: Any) -> None:
    known = mesh is None or isinstance(mesh, DeviceMesh)
    if not known and dist.is_available():
        known = isinstance(mesh, dist.ProcessGroup) or mesh is dist.GroupMember.NON_GROUP_MEMBER
    if not known:
        raise TypeError(
            f"mesh must be a DeviceMesh, a torch.distributed.ProcessGroup or None (the world), "
            f"got {type(mesh).__name__}"
        )


def _devices(group: dist.ProcessGroup) -> list[str]:
    """Device types that a group can communicate from; written ``"cpu:gloo,cuda:nccl"``."""
    return [part.partition(":")[0] for part in dist.get_backend_config(group).split(",")]


def _carrier(group: dist.ProcessGroup) -> torch.device:
    """Device from which small messages go: the CPU where it can, which waits for no stream."""
    devices = _devices(group)
    return torch.device("cpu" if "cpu" in devices else devices[0])


def _device_type(mesh: Mesh) -> str:
    if isinstance(mesh, DeviceMesh):
        return mesh.device_type
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    (group,) = _peers(mesh)
    return accelerator.type if accelerator is not None and accelerator.type in _devices(group) else "cpu"


def _describe(mesh: Mesh) -> str:
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        return "mesh(" + ", ".join(f"{n}={s}" for n, s in zip(names, mesh.mesh.shape, strict=True)) + ")"
    return "the world" if mesh is None else "the process group"


def _coordinates(mesh: DeviceMesh) -> dict[int, str]:
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    places = itertools.product(*(range(size) for size in mesh.mesh.shape))
    return {
        rank: ", ".join(f"{name}={c}" for name, c in zip(names, place, strict=True))
        for rank, place in zip(mesh.mesh.flatten().tolist(), places, strict=True)
    }


def _list_seeds(seeds: dict[int, int]) -> str:
    listed = ", ".join(f"{seed} on rank {rank}" for rank, seed in list(seeds.items())[:_NAMED])
    return listed + (", ..." if len(seeds) > _NAMED else "")


def _signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63
