"""Blocks that keep their experts in a `nn.ModuleList` and call them one by one on the rows that they chose.

Where such code selects rows, shapes depend on data, which no sharding rule can follow. So the block runs on this
rank's tokens as plain tensors, twice: the first time its experts only note what they are given; then all rows travel
at once, are computed where their experts live, and return; the second time the experts hand out the results.
Everything else that the block computes must be a matter of each token alone; the first call checks that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .._comm.move import move, strip
from .._comm.record import note
from .._dispatch import policy
from .._dispatch.solve import unwanted
from .._irregular import is_cut
from .._mesh import Axes, MeshInfo
from .._spec import spec_of
from .._tensor import DTensor, make
from ..errors import UnsupportedOperationError
from ..placements import AxisTypes, I, P, R, short
from .exchange import combine, dispatch, tie
from .forward import announce, refuse_recording
from .homes import owners_of, residents_at
from .routes import Load, Residents, members_of, routes


class ListState:
    """What expert parallelism keeps of one block."""

    def __init__(self, child: str, num_experts: int, axes: tuple[str, ...]) -> None:
        self.child = child
        """Name of the module list."""
        self.num_experts = num_experts
        self.axes = axes
        """Names of the mesh axes that experts are spread over."""
        self.checked = False
        """Whether a call has shown that tokens do not depend on each other."""
        self.load: Load | None = None
        """Rows of this rank's tokens by expert, [experts], int64, to be summed over mesh axes; None: not counted."""
        self.known: dict[Any, tuple[list[int], Residents]] = {}
        """Where experts live, by the specs of their parameters."""

    def __getstate__(self) -> dict[str, Any]:
        return {"child": self.child, "num_experts": self.num_experts, "axes": self.axes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def axes_of(self, mesh: MeshInfo) -> Axes:
        """The mesh axes that experts are spread over."""
        names = mesh.device_mesh.mesh_dim_names or ()
        return tuple(names.index(a) for a in self.axes)

    def note_load(self, lengths: Sequence[tuple[int, int]], mesh: MeshInfo, axes: Axes) -> None:
        """Count (expert, rows) of one call, but not again where a checkpoint recomputes it."""
        if self.load is None or torch._C._current_autograd_node() is not None:
            return
        counts = self.load.setdefault((mesh, axes), torch.zeros(self.num_experts, dtype=torch.int64))
        for expert, rows in lengths:
            counts[expert] += rows


def owner_of(expert: int, num_experts: int, num_ranks: int) -> int:
    """Rank of an expert, by the same cut as `Shard(0)` of a stack of experts.

    >>> [owner_of(e, 5, 4) for e in range(5)]
    [0, 0, 1, 1, 2]
    """
    return expert // -(-num_experts // num_ranks)


class _Call:
    """One call of a block."""

    def __init__(self, block: nn.Module, state: ListState, forward: Callable[..., Any], x: DTensor) -> None:
        self.block, self.state, self.forward = block, state, forward
        self.spec, self.mesh = x._spec, x._spec.mesh
        self.axes = state.axes_of(self.mesh)
        self.types = tuple(self._tokens(a, t) for a, t in enumerate(self.spec.types))
        if unwanted(self.mesh, self.spec.types, self.types):
            policy.report("experts", [(self.spec, self.types)])
        self.experts: nn.ModuleList = getattr(block, state.child)
        self.held = _tensors(block)
        self.owners, self.residents = self._homes(x.device)
        self.moved = {name: self._localized(name, t) for name, (_, _, t) in self.held.items()}
        self.local = strip(move(x, self.types))
        self.global_spec = self.spec.with_types(self.types)

    def _homes(self, device: torch.device) -> tuple[list[int], Residents]:
        key = (device, *(p._spec for p in self.experts.parameters() if isinstance(p, DTensor)))
        found = self.state.known.get(key)
        if found is None:
            owners = owners_of(self.experts, self.mesh, self.axes)
            found = owners, residents_at(owners, self.mesh, self.axes, device)
            self.state.known = {key: found}
        return found

    def _tokens(self, axis: int, t: int) -> int:
        """Type of the tokens along one axis."""
        if 0 <= t < self.spec.ndim - 1 or (t in (I, R) and axis not in self.axes):
            return t
        return 0 if axis in self.axes else I

    def _localized(self, name: str, tensor: DTensor) -> Tensor:
        expert = name.startswith(self.state.child + ".")
        for axis, t in enumerate(tensor._spec.types):
            if t == P or (is_cut(t) and not (expert and axis in self.axes)):
                raise UnsupportedOperationError(
                    f"{name} of {type(self.block).__name__} is placed ({short(tensor._spec.types)}) on {self.mesh!r}; "
                    "in a block with a list of experts, parameters can be spread over the axes of experts only, and "
                    "the router's must be Replicate()"
                )
        types = [t if is_cut(t) else I if self.types[a] == I else R for a, t in enumerate(tensor._spec.types)]
        return strip(move(tensor, tuple(types)))

    # ---------------------------------------------------------------- the two runs

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._in_place():
            if not self.state.checked:
                self._check(args, kwargs)
            given: list[tuple[int, Tensor]] = []
            version, random = self.local._version, _random_state(self.local)
            self._with_experts(lambda e, rows: _noted(given, e, rows), args, kwargs)
            if self.local._version != version or not torch.equal(_random_state(self.local), random):
                raise UnsupportedOperationError(
                    f"{type(self.block).__name__} changes its input in place or draws random numbers, so its code "
                    "cannot be run twice; keep the experts in stacked parameters, or move that out of the block"
                )
            results = iter(self._computed(given))
            expected = iter(given)

            def replay(expert: int, rows: Tensor) -> Tensor:
                known, before = next(expected, (-1, rows))
                if known != expert or not _same(rows, before):
                    raise UnsupportedOperationError(
                        f"{type(self.block).__name__} calls expert {expert} on rows that depend on results of other "
                        "experts; expert parallelism serves experts that work side by side"
                    )
                return next(results)

            out = self._with_experts(replay, args, kwargs)
        return tree_map_only(Tensor, self._labelled, out)

    def _with_experts(
        self, act: Callable[[int, Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], x: Any = None
    ) -> Any:
        """Run the block's own code with something else in the place of each expert."""
        real = dict(self.experts._modules)
        try:
            for i, name in enumerate(real):
                self.experts._modules[name] = _Stub(i, act)
            return self.forward(self.local if x is None else x, *args, **kwargs)
        finally:
            self.experts._modules.update(real)

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        """Put local tensors where the block's code finds its parameters."""
        try:
            for name, (held, key, _) in self.held.items():
                held[key] = self.moved[name]
            yield
        finally:
            for held, key, tensor in self.held.values():
                held[key] = tensor

    def _computed(self, given: list[tuple[int, Tensor]]) -> list[Tensor]:
        """What the experts make of the noted rows, wherever they live."""
        lengths = [len(rows) for _, rows in given]
        source = torch.cat([r for _, r in given]) if given else self.local.reshape(-1, self.local.shape[-1])[:0]
        with torch.no_grad():
            chosen = torch.tensor([e for e, rows in given for _ in range(len(rows))], device=source.device)
            way = routes(chosen.to(torch.int64).reshape(-1, 1), self.residents)
            self.state.note_load([(e, len(rows)) for e, rows in given], self.mesh, self._cut_axes())
            called = self._called([e for e, _ in given])
        announce()
        rows = dispatch(source, way.tokens, way.rows)
        done = self._local_experts(rows, way.expert_of, called)
        announce()
        back = combine(done, way.tokens, way.rows, len(source))
        return list(torch.split(back, lengths)) if lengths else []

    def _called(self, mine: list[int]) -> list[int]:
        """Experts that some rank called: they get a gradient, the others none, as on one device."""
        flags = torch.zeros(self.state.num_experts, dtype=torch.int32, device=self.local.device)
        flags[mine] = 1
        axes = self._cut_axes()
        if axes:
            note("all_reduce", flags.numel() * flags.element_size(), self.mesh, axes)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.mesh.group(axes))
        return [e for e, f in enumerate(flags.tolist()) if f]

    def _cut_axes(self) -> Axes:
        """Axes of several ranks along which these have different tokens."""
        return tuple(a for a in range(self.mesh.ndim) if is_cut(self.types[a]) and self.mesh.sizes[a] > 1)

    def _local_experts(self, rows: Tensor, expert_of: Tensor, called: list[int]) -> Tensor:
        me = members_of(self.mesh, self.axes).index(self.mesh.coordinate)
        order = torch.argsort(expert_of, stable=True)
        lengths = torch.bincount(expert_of, minlength=max(self.residents.num_local, 1)).tolist()
        parts = iter(torch.split(rows.index_select(0, order), lengths))
        results: list[Tensor] = []
        unused = [] if len(expert_of) else [rows]
        versions = [b._version for b in self.experts.buffers()]
        for e, expert in enumerate(self.experts):
            part = next(parts) if self.owners[e] == me else None
            if part is not None and len(part):
                results.append(_fitting(expert(part), part, e))
            elif e in called:
                unused += list(expert.parameters())
        if versions != [b._version for b in self.experts.buffers()]:
            raise UnsupportedOperationError(
                f"the experts of {type(self.block).__name__} change their buffers, such as running statistics, which "
                "would be other ones on every rank; give them normalization without statistics"
            )
        together = torch.cat(results) if results else rows.new_zeros(rows.shape)
        together = torch.zeros_like(together).index_copy(0, order, together) if results else together
        return tie(together, *unused)

    # ---------------------------------------------------------------- results

    def _labelled(self, t: Tensor) -> Any:
        """A result of the block as a DTensor: its leading dims are those of the tokens, or the tokens in a row."""
        spec, lead = self.global_spec, self.spec.ndim - 1
        if t.shape[:lead] == self.local.shape[:lead]:
            return self._made(t, (*spec.shape[:lead], *t.shape[lead:]), self.types)
        flat = self.local.shape[:lead].numel()
        types = tuple(0 if is_cut(a) else a for a in self.types)
        whole = (spec.shape[:lead].numel(), *t.shape[1:])
        in_a_row = t.ndim > 0 and t.shape[0] == flat and all(a == 0 for a in self.types if is_cut(a))
        if in_a_row and spec_of(self.mesh, whole, types).local_shape[0] == flat:
            return self._made(t, whole, types)
        raise UnsupportedOperationError(
            f"{type(self.block).__name__} returns a tensor of shape {list(t.shape)} for tokens "
            f"{list(self.local.shape)} of {self.spec!r}; a block with a list of experts must return tensors with one "
            "entry per token, in the tokens' own dims or all in a row (which needs evenly cut tokens)"
        )

    def _made(self, t: Tensor, shape: tuple[int, ...], types: AxisTypes) -> DTensor:
        spec = spec_of(self.mesh, shape, types)
        back = tuple(
            b if a in self.axes and b in (I, R) else t
            for a, (t, b) in enumerate(zip(types, self.spec.types, strict=True))
        )
        return move(make(t, spec if torch.is_grad_enabled() else spec.invariant), back)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the first half of the tokens, alone, with the same half among all, experts left out."""
        dim = next((d for d in range(self.local.ndim - 1) if self.local.shape[d] > 1), None)
        if dim is None:
            return
        half = self.local.shape[dim] // 2
        training = [m for m in self.block.modules() if m.training]
        state = _random_state(self.local)
        try:
            for m in training:
                m.training = False
            with torch.no_grad():
                both = [
                    self._with_experts(lambda e, rows: rows * (e + 1), args, kwargs, t.clone())
                    for t in (self.local, self.local.narrow(dim, 0, half))
                ]
        finally:
            for m in training:
                m.training = True
        if not torch.equal(_random_state(self.local), state):
            raise UnsupportedOperationError(f"{type(self.block).__name__} draws random numbers outside of its experts")
        for whole, part in zip(*(_flat(b) for b in both), strict=True):
            lead = self.local.ndim - 1
            in_dims = whole.shape[:lead] == self.local.shape[:lead]
            first = whole.narrow(dim, 0, half) if in_dims else whole[: len(part)] if whole.ndim else whole
            if (
                whole.shape == part.shape
                or first.shape != part.shape
                or not torch.allclose(first, part, equal_nan=True)
            ):
                raise UnsupportedOperationError(
                    f"{type(self.block).__name__} returns a tensor of shape {list(whole.shape)} that is not a matter "
                    "of each token alone (such as a statistic or a loss over all tokens), so it would differ between "
                    "ranks; return the router's scores instead and compute it from them outside of the block"
                )
        self.state.checked = True


class _Stub(nn.Module):
    """Stands in for an expert."""

    def __init__(self, index: int, act: Callable[[int, Tensor], Tensor]) -> None:
        super().__init__()
        self.index, self.act = index, act

    def forward(self, rows: Tensor, *more: Any, **named: Any) -> Tensor:
        if more or named or rows.ndim != 2:
            raise UnsupportedOperationError(
                f"expert {self.index} was called with {1 + len(more) + len(named)} arguments, the first of shape "
                f"{list(rows.shape)}; expert parallelism serves experts of rows [tokens, features]"
            )
        return self.act(self.index, rows)


def _noted(given: list[tuple[int, Tensor]], expert: int, rows: Tensor) -> Tensor:
    given.append((expert, rows))
    return torch.zeros_like(rows)


def _same(a: Tensor, b: Tensor) -> bool:
    with torch.no_grad():
        return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _fitting(result: Tensor, rows: Tensor, expert: int) -> Tensor:
    if result.shape != rows.shape or result.dtype != rows.dtype:
        raise ValueError(
            f"expert {expert} must return as many features as it gets: for {list(rows.shape)} {rows.dtype} it returned "
            f"{list(result.shape)} {result.dtype}"
        )
    return result


def _flat(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


def _random_state(like: Tensor) -> Tensor:
    if like.device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(like.device).get_rng_state(like.device)  # type: ignore[no-any-return]


def _tensors(module: nn.Module) -> dict[str, tuple[dict[str, Any], str, DTensor]]:
    """Distributed parameters and buffers by name, with where they stand."""
    return {
        f"{prefix}.{name}" if prefix else name: (held, name, tensor)
        for prefix, owner in module.named_modules()
        for held in (owner._parameters, owner._buffers)
        for name, tensor in held.items()
        if isinstance(tensor, DTensor)
    }


def run_block(
    block: nn.Module,
    state: ListState,
    forward: Callable[..., Any],
    x: DTensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a block with a list of experts on this rank's tokens; results are DTensors placed as `x`."""
    refuse_recording()
    return _Call(block, state, forward, x).run(args, kwargs)


__all__ = ["ListState", "owner_of", "run_block"]
