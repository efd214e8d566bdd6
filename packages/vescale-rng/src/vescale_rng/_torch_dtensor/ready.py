"""Before a draw: is there anything to draw on this rank, is the local tensor there, and do the generators agree?"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .._agreement import check_agreement
from .._draw.mode import active_sampler
from .._draw.prepared import fill_again
from .._draw.who import default_generator
from ..errors import UnsupportedRandomOperatorError
from .places import Place, place_of

__all__ = ["draw", "forget_agreements", "local_of", "ready", "refuse_overlap", "set_check"]

_PLAIN = (Tensor, torch.nn.Parameter)
_agreed: weakref.WeakKeyDictionary[DeviceMesh, set[bool]] = weakref.WeakKeyDictionary()
"""Meshes on which generators were compared: the default one (False), an explicit one (True)."""
_check = True


def draw(kernel: str, tensor: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Fill the local part of a DTensor with its elements of one draw for the whole.

    Args:
        kernel: aten base name of an operator with a closed form, as `fill` takes it.
        tensor: overwritten.
        args: parameters of the distribution.
        kwargs: at most `generator`.
    """
    place = place_of(tensor)
    local = tensor._local_tensor
    if place.overlaps:
        refuse_overlap(local)
    if type(local) is not Tensor or not place.agreed or kwargs:
        found = ready(kernel, place, local, kwargs.get("generator"))
        if found is None:
            return
        local = found
    fill_again(kernel, local, place.part, args, kwargs)


def ready(op: str, place: Place, local: Tensor, generator: torch.Generator | None) -> Tensor | None:
    """Return the plain local tensor to draw into, or None if nothing is drawn: on the meta device, outside of the mesh.

    Raises:
        UnsupportedRandomOperatorError: while a graph is traced, or for a local tensor of a foreign class.
        AgreementError: at the first draw on a mesh, if the generators of its ranks are in different states.
    """
    if not place.inside:
        return None
    plain = local_of(op, local)
    if plain is None or plain.is_meta:
        return None
    if generator is not None or not place.agreed:
        _agree(place, plain.device, generator)
    return plain


def refuse_overlap(local: Tensor) -> None:
    """Raise what torch raises for an expanded tensor; on all ranks, though local parts may be of one element.

    Args:
        local: local part of a tensor that overlaps itself.
    """
    if not (local.is_meta or isinstance(local, FakeTensor)):  # torch writes nothing there either, and does not look
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def local_of(op: str, local: Tensor) -> Tensor | None:
    """Return the plain tensor behind a local tensor; None for a fake one, which has no numbers."""
    if type(local) in _PLAIN:
        return local
    if isinstance(local, AsyncCollectiveTensor):
        done: Tensor = local.trigger_wait()  # type: ignore[no-untyped-call]
        return local_of(op, done)
    if isinstance(local, FakeTensor) and not _are_tracing():
        return None
    # torch.compile breaks its graph at a NotImplementedError, which this is, and then runs the operator as ever.
    raise UnsupportedRandomOperatorError(
        f"{op} on a DTensor whose local tensor is a {type(local).__module__}.{type(local).__qualname__}: vescale_rng "
        "draws into plain tensors only, and not while a graph is traced. Keep random operators on DTensors out of "
        "traced regions (torch.compiler.disable)"
    )


def _are_tracing() -> bool:
    """Whether a graph is being made, as opposed to fake tensors of somebody who counts memory."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None or get_proxy_mode() is not None


def set_check(check: bool) -> None:
    """Say whether generators are compared at the first draw on a mesh."""
    global _check
    _check = check


def forget_agreements() -> None:
    """Compare the generators of every mesh again at the next draw."""
    _agreed.clear()


def _agree(place: Place, device: torch.device, generator: torch.Generator | None) -> None:
    explicit = generator is not None
    if not _check:
        place.agreed = True
        return
    done = _agreed.setdefault(place.mesh, set())
    if explicit not in done:
        if not _is_fake(place.mesh):
            # A sampler keeps its state in the CPU generator, whatever the device.
            own = torch.device("cpu") if active_sampler() is not None else device
            check_agreement(place.mesh, generator if explicit else default_generator(own))
        done.add(explicit)
    if not explicit:
        place.agreed = True


def _is_fake(mesh: DeviceMesh) -> bool:
    return any(dist.get_backend(mesh.get_group(dim)) == "fake" for dim in range(mesh.ndim))
