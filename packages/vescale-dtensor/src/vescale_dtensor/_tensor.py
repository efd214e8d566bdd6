"""`DTensor`: a tensor whose storage is the local shard and whose Python face is the global tensor.

Dispatch happens in `__torch_function__`, once per function that the user calls and above
autograd; the functions then run on local parts, and autograd records those. Metadata are global
while dispatch is on and local while it is off (`torch._C.DisableTorchFunctionSubclass`): with
dispatch off a DTensor simply is its local part, which is what checkpointing, FLOP counters,
saved-tensor hooks and optimizers in local mode rely on.
"""

from __future__ import annotations

import copy as copy_module
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from ._comm.move import Pending, move, strip
from ._mesh import _restore, mesh_info
from ._spec import Spec, global_stride, spec_of
from ._tap import alias
from .placements import I, R, dual, duals, short, to_axis_types, to_placement

_run = torch._C._disabled_torch_function_impl
_on = torch._C._is_torch_function_enabled
_local_shape = torch._C.TensorBase.shape.__get__  # type: ignore[attr-defined]
_local_size, _local_numel = torch._C.TensorBase.size, torch._C.TensorBase.numel
_local_stride = torch._C.TensorBase.stride
_requires_grad = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_NOTHING: dict[str, Any] = {}

TABLE: dict[Any, Callable[..., Any]] = {}
"""Function, as torch passes it to `__torch_function__`, to its handler. Filled by `_dispatch` and `_rules`."""


class DTensor(torch.Tensor):
    """A tensor distributed over a device mesh; behaves as the one global tensor.

    Make one with `distribute_tensor`, `DTensor.from_local`, or the factories (`zeros`, `randn`, ...).
    """

    _spec: Spec

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = TABLE.get(func)
        if handler is None:
            handler = _resolve(func)
        return handler(func, args, kwargs or _NOTHING)

    # ---------------------------------------------------------------- metadata: global while dispatch is on

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return self._spec.shape if _on() else _local_shape(self)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """Number of dims."""
        return self._spec.ndim

    def dim(self) -> int:
        """Number of dims."""
        return self._spec.ndim

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        """Global size, of all dims or of one."""
        if not _on():
            return _local_size(self) if dim is None else _local_size(self, dim)
        shape = self._spec.shape
        return shape if dim is None else shape[dim]

    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return self._spec.numel if _on() else _local_numel(self)

    nelement = numel

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of the global tensor."""
        return self.numel() * self.element_size()

    def __len__(self) -> int:
        shape = self._spec.shape if _on() else _local_shape(self)
        if not shape:
            raise TypeError("len() of a 0-d tensor")
        return shape[0]

    def stride(self, dim: int | None = None) -> Any:
        """Stride of the global tensor, were it laid out in memory as the local part is."""
        local = _run(_local_stride, (), (self,), {})
        if _on():
            local = global_stride(self._spec, local)
        return local if dim is None else local[dim]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    # ---------------------------------------------------------------- what a DTensor has beyond a tensor

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh that the tensor lies on."""
        return self._spec.mesh.device_mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return tuple(map(to_placement, self._spec.types))

    @property
    def grad_placements(self) -> tuple[Placement, ...]:
        """Placements that the gradient of this tensor has."""
        return tuple(to_placement(dual(t)) for t in self._spec.types)

    @property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's part."""
        return torch.Size(self._spec.local_shape)

    @property
    def local_offset(self) -> tuple[int, ...]:
        """Position of this rank's part in the global tensor; an error where that is several blocks."""
        offset = self._spec.local_offset
        return offset if not self._spec.irregular else tuple(offset)  # the latter raises, and says what to do

    @staticmethod
    def from_local(
        local_tensor: Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        run_check: bool = True,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """Make a DTensor of the local parts that the ranks hold already. Shares memory; differentiable.

        Args:
            local_tensor: this rank's part.
            device_mesh: mesh, of which every rank must make this call.
            placements: how the parts form the whole, one placement per mesh axis.
            run_check: compare shapes and dtypes over the mesh and find uneven sizes (one small
                collective). Without it, and without `shape`, the parts must be of equal size.
            shape: global shape; needed without `run_check` for uneven parts, and for ragged shards of several dims,
                whose parts may be given flat.
            stride: accepted for compatibility with torch; the stride follows from the local part.
            grad_placements: placements of the gradient that `local_tensor` receives; default: the
                dual of `placements`.

        Raises:
            ValueError: the parts do not form a tensor under `placements`.
        """
        from ._api import from_local

        return from_local(
            local_tensor,
            device_mesh,
            placements,
            run_check=run_check,
            shape=shape,
            grad_placements=grad_placements,
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's part as a plain tensor: shares memory, differentiable.

        Args:
            grad_placements: placements of the gradient that will arrive here; default: the dual of
                this tensor's placements. Give ``[Partial()]`` for a replicated tensor that ranks go
                on to use differently.
        """
        x = self
        if grad_placements is not None:
            spec = self._spec
            wanted = duals(
                to_axis_types(grad_placements, mesh_ndim=spec.mesh.ndim, ndim=spec.ndim, argument="grad_placements")
            )
            for axis, (here, to) in enumerate(zip(spec.types, wanted, strict=True)):
                if here != to and not {here, to} <= {I, R}:
                    raise ValueError(
                        f"grad_placements[{axis}] = {grad_placements[axis]!r} does not fit a tensor placed "
                        f"{to_placement(here)!r} on that axis: its gradient is {to_placement(dual(here))!r}"
                        + (" or Replicate() / Partial()" if here in (I, R) else "")
                    )
            x = move(self, wanted)
        return strip(x)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor, plain, on every rank of the mesh. Every rank must call it; differentiable."""
        whole = move(self, tuple(I for _ in self._spec.types))
        return whole.to_local(grad_placements=grad_placements)

    def redistribute(
        self,
        device_mesh: DeviceMesh | Sequence[Placement] | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
    ) -> Any:
        """Return the same tensor under other placements. Every rank of the mesh must call it; differentiable.

        One collective serves several mesh axes wherever it can (see `_comm.plan`).

        Args:
            device_mesh: may be left out; a mesh other than this tensor's is an error.
            placements: one per mesh axis.
            async_op: return a `Pending` at once, whose `wait()` gives the tensor.
        """
        spec = self._spec
        if placements is None and not isinstance(device_mesh, DeviceMesh):
            device_mesh, placements = None, device_mesh
        if placements is None:
            raise ValueError("redistribute needs placements, one per mesh axis, for example [Replicate(), Shard(0)]")
        if device_mesh is not None and mesh_info(device_mesh) is not spec.mesh:  # type: ignore[arg-type]
            raise ValueError(
                f"device_mesh = {device_mesh} is not this tensor's mesh {spec.mesh!r}; "
                "to change meshes, take full_tensor() and distribute it on the other"
            )
        types = to_axis_types(placements, mesh_ndim=spec.mesh.ndim, ndim=spec.ndim)
        return Pending(self, types) if async_op else move(self, types)

    # ---------------------------------------------------------------- copies, pickles, prints

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local = _run(Tensor.__repr__, (), (strip(self).detach(),), {})
        grad = ", requires_grad=True" if _run(_requires_grad, (), (self,), {}) else ""
        return (
            f"DTensor(shape={list(self._spec.shape)}, placements=({short(self._spec.types)}), {self._spec.mesh!r}, "
            f"local={local}{grad})"
        )

    def __format__(self, spec: str) -> str:
        if self._spec.ndim == 0:
            return format(self.item(), spec)
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self._spec, *_portrait(self, strip(self).detach()))

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf DTensors can be deep-copied; copy x.detach(), or clone() to stay in the graph"
            )
        copy = _rebuild(self._spec, *_portrait(self, strip(self).detach().clone()))
        grad = self.grad
        if grad is not None:
            copy.grad = copy_module.deepcopy(grad, memo)
        memo[id(self)] = copy
        return copy


_OURS = frozenset(("_spec", "_casts", "_is_cast", "_is_param", "_is_grad", "_copy_of_view"))


def _portrait(x: DTensor, local: Tensor) -> tuple[Any, ...]:
    """What `_rebuild` needs beside the spec: local data, flags, and the user's own attributes."""
    own = {k: v for k, v in x.__dict__.items() if k not in _OURS}
    return local, _run(_requires_grad, (), (x,), {}), bool(x.__dict__.get("_is_param")), own


def _rebuild(spec: Spec, local: Tensor, requires_grad: bool, is_parameter: bool, attributes: dict[str, Any]) -> DTensor:
    x: Any = local.detach().requires_grad_(requires_grad)
    x.__class__ = DTensor
    x._spec = spec
    if is_parameter:
        x._is_param = True
    x.__dict__.update(attributes)
    return x  # type: ignore[no-any-return]


torch.serialization.add_safe_globals([_rebuild, spec_of, _restore])  # for torch.load(weights_only=True)


def make(local: Tensor, spec: Spec) -> DTensor:
    """Label an alias of a plain local tensor, connected to its graph."""
    x: Any = alias(local)
    x.__class__ = DTensor
    x._spec = spec
    return x  # type: ignore[no-any-return]


def _resolve(func: Any) -> Callable[..., Any]:
    from ._dispatch.table import lookup

    return lookup(func)
