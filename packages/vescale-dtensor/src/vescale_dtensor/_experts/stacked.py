"""Expert modules that keep all experts in stacked parameters, as the models of transformers 5 do.

Such a module has parameters [experts, ...] and a forward of (hidden states, chosen experts, weights). Its class is
replaced by a subclass whose forward lets tokens travel and runs the model's own forward on what arrived, with
this rank's slice of the parameters in place. The code of the model, its names and its state dict stay.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._dispatch import policy
from .._irregular import cut_dims_of
from .._mesh import MeshInfo
from .._spec import Spec, replicated
from .._tensor import DTensor, make
from ..errors import DTensorError, UnsupportedOperationError
from .arrangement import Arrangement, Inside, arrange
from .forward import run_experts
from .routes import Load
from .subclass import give_forward

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")
"""Attributes in which expert modules keep the number of experts."""


class State:
    """What expert parallelism keeps of one module."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.order = list(range(num_experts))
        """Which expert each position of the stacked parameters holds."""
        self.load: Load | None = None
        """Choices of this rank's tokens by expert, [experts], int64, to be summed over mesh axes; None: not counted."""
        self.known: dict[Any, Arrangement] = {}
        """Arrangements by specs."""

    def __getstate__(self) -> dict[str, Any]:
        return {"num_experts": self.num_experts, "order": self.order}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["num_experts"])  # type: ignore[misc]
        self.order = list(state["order"])

    @property
    def moved(self) -> bool:
        """Whether experts stand elsewhere than the model's code has them."""
        return self.order != list(range(self.num_experts))

    def is_stacked(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape holds all experts."""
        return len(shape) > 1 and shape[0] == self.num_experts

    def place(self, order: Sequence[int]) -> None:
        """Note that the experts have moved."""
        self.order = list(order)
        self.known.clear()

    def note_load(self, chosen: Tensor, at: Arrangement) -> None:
        """Count what tokens chose, but not again where a checkpoint recomputes them."""
        if self.load is None or torch._C._current_autograd_node() is not None:
            return
        counts = torch.bincount(chosen.reshape(-1), minlength=self.num_experts)
        key = at.mesh, at.counted
        self.load[key] = self.load[key] + counts if key in self.load else counts


class StackedBank:
    """The experts of one module for `run_experts`."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor], state: State) -> None:
        self.module, self.forward, self.state = module, forward, state
        self.held = {
            f"{prefix}.{name}" if prefix else name: (held, name, tensor)
            for prefix, owner in module.named_modules()
            for held in (owner._parameters, owner._buffers)
            for name, tensor in held.items()
            if isinstance(tensor, DTensor)
        }

    def arrange(self, x: DTensor, weights: DTensor) -> Arrangement:
        specs = {n: t._spec for n, (_, _, t) in self.held.items()}
        key = (x._spec, weights._spec, *specs.values())
        found = self.state.known.get(key)
        if found is None:
            found = arrange(x._spec, weights._spec, specs, self.state.num_experts, self.state.order, x.device)
            self.state.known[key] = found
        return found

    def tensors(self) -> Mapping[str, DTensor]:
        return {n: t for n, (_, _, t) in self.held.items()}

    def note_load(self, chosen: Tensor, arrangement: Arrangement) -> None:
        self.state.note_load(chosen, arrangement)

    def compute(
        self, rows: Tensor, expert_of: Tensor, weights: Tensor, tensors: Mapping[str, Tensor], at: Arrangement
    ) -> Tensor:
        if at.inside is not None:
            tensors = {n: _inside(t, self.held[n][2]._spec, at.parameters[n], at.inside) for n, t in tensors.items()}
        with self._in_place(tensors, at.residents.num_local):
            return self.forward(rows, expert_of.unsqueeze(1), weights.unsqueeze(1))

    @contextlib.contextmanager
    def _in_place(self, tensors: Mapping[str, Tensor], num_local: int) -> Iterator[None]:
        """Put local tensors where the module's code finds its parameters, and the local number of experts."""
        own = self.module.__dict__
        counts = {n: own[n] for n in _COUNTS if own.get(n) == self.state.num_experts}
        policy.state.inside_modules += 1  # plain tensors that the code makes may meet DTensors
        try:
            for name, (held, key, _) in self.held.items():
                held[key] = tensors[name]
            own.update(dict.fromkeys(counts, num_local))
            yield
        finally:
            policy.state.inside_modules -= 1
            for held, key, tensor in self.held.values():
                held[key] = tensor
            own.update(counts)


def _inside(local: Tensor, spec: Spec, types: tuple[int, ...], inside: Inside) -> DTensor:
    """Label the local part of a parameter on the submesh that cuts inside experts."""
    cut = {d for a in inside.axes for d in cut_dims_of(types[a])}
    shape = [spec.shape[d] if d in cut else n for d, n in enumerate(spec.local_shape)]
    return make(local, inside.spec(shape, types))


# ------------------------------------------------------------------ the class of a module


def _forward_of(base: type[nn.Module]) -> Callable[..., Any]:
    """The forward of an expert module whose experts live on several ranks."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(base.forward, self)
        bank = StackedBank(self, own, self._vescale_experts)
        if not bank.held:  # not distributed
            return own(*args, **kwargs)
        mesh = next(iter(bank.held.values()))[2]._spec.mesh
        x, chosen, weights = (_whole(a, mesh) for a in _three(base, args, kwargs))
        return run_experts(bank, x, *((weights, chosen) if chosen.is_floating_point() else (chosen, weights)))

    return forward


def _three(base: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The three arguments of an expert module's forward, in its order."""
    if len(args) == 3 and not kwargs:
        return args
    bound = inspect.signature(base.forward).bind(None, *args, **kwargs)
    given = list(bound.arguments.values())[1:]
    if len(given) != 3:
        raise UnsupportedOperationError(
            f"{base.__name__} was called with {len(given)} arguments ({list(bound.arguments)[1:]}); expert parallelism "
            "serves calls with hidden states, chosen experts and weights"
        )
    return given


def _whole(value: Any, mesh: MeshInfo) -> DTensor:
    if not isinstance(value, Tensor) or value.ndim != 2:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UnsupportedOperationError(
            f"expert parallelism serves [tokens, features], [tokens, top-k], [tokens, top-k]; an argument is {shape}"
        )
    if isinstance(value, DTensor):
        return value
    policy.check_plain("experts", tuple(value.shape))
    return make(value, replicated(mesh, value.shape))


def stacked_experts(module: nn.Module) -> int | None:
    """Number of experts that a module keeps in stacked parameters; None if it is no such module."""
    own = [p for p in module._parameters.values() if p is not None]
    lengths = {p.shape[0] for p in own if p.ndim > 1}
    if len(lengths) != 1 or not any(p.ndim > 2 for p in own) or "_vescale_experts" in module.__dict__:
        return None
    try:
        given = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    taken = [p for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
    needed = [p for p in taken if p.default is p.empty]
    return lengths.pop() if 3 in (len(needed), len(taken)) else None


def let_travel(module: nn.Module, num_experts: int) -> None:
    """Make the forward of an expert module send tokens to where its experts live."""
    give_forward(module, _forward_of)
    module.__dict__["_vescale_experts"] = State(num_experts)
    module.register_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(module: nn.Module, *_: Any) -> None:
    """State dicts name positions; they must not be made or loaded while experts stand elsewhere."""
    state = state_of(module)
    if state is not None and state.moved:
        raise DTensorError(
            f"{type(module).__name__}: experts are not where the model's code has them, so its state would fit no "
            "other run; call ExpertsAllocator.restore() on every rank before saving or loading"
        )


def state_of(module: nn.Module) -> State | None:
    """What expert parallelism keeps of a module; None if its tokens do not travel."""
    found: State | None = module.__dict__.get("_vescale_experts")
    return found


__all__ = ["StackedBank", "State", "let_travel", "stacked_experts", "state_of"]
