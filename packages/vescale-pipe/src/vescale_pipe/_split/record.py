"""Recording a model in both of its modes, and what the two have in common."""

from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import SplitError
from .names import Names
from .recorder import Recorder
from .swap import Weights, cuda_in_use, python_random_kept
from .tree import Leaf, leaves
from .values import Recording, Value

__all__ = ["Training", "record", "same"]


@dataclass(frozen=True, slots=True)
class Training(Leaf):
    """Stands in arguments for whether the model is in training mode."""


def record(
    names: Names,
    units: set[int],
    opened: set[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    count_flops: bool = False,
) -> tuple[Recording, bool | None]:
    """Run a model once in each mode, on meta, and return what happens.

    Args:
        names: of the model.
        units: ids of the modules that are called as a whole.
        opened: ids of the modules whose forward is recorded call by call.
        args: example arguments.
        kwargs: example keyword arguments.
        count_flops: whether to estimate the cost of each call.

    Returns:
        the recording, with `Training` where an argument is the mode; and the only mode in which it holds, or None if
        in both.

    Raises:
        SplitError: the model does something that can't be recorded.
    """
    mode = names.model.training
    try:
        training = _record(names, units, opened, args, kwargs, training=True, count_flops=count_flops)
        evaluating = _record(names, units, opened, args, kwargs, training=False, count_flops=False)
    except Exception:  # noqa: BLE001 -- it is raised below if it comes in the present mode, and does not matter if not
        return _record(names, units, opened, args, kwargs, training=mode, count_flops=count_flops), mode
    if same(training, evaluating):
        return training, None
    return (training if mode else evaluating), mode


def _record(
    names: Names,
    units: set[int],
    opened: set[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    training: bool,
    count_flops: bool,
) -> Recording:
    model = names.model
    with torch.inference_mode(False):
        weights = Weights(model)
    recorder = Recorder(names, units, opened, weights, count_flops=count_flops)

    def given(tree: Any, key: int | str) -> Any:
        found, spec = pytree.tree_flatten(tree)
        return pytree.tree_unflatten(
            [
                recorder.ledger.batch(leaf, (key, index)) if isinstance(leaf, Tensor) else leaf
                for index, leaf in enumerate(found)
            ],
            spec,
        )

    with torch.inference_mode(False):
        call_args = [given(item, index) for index, item in enumerate(args)]
        call_kwargs = {name: given(item, name) for name, item in kwargs.items()}
    drawn = list(range(torch.cuda.device_count())) if cuda_in_use() else []
    with (
        torch.random.fork_rng(devices=drawn),
        python_random_kept(),
        torch.inference_mode(False),
        _eager(),
        weights.swapped(training),
        _patched(recorder, names),
        torch.enable_grad(),
        warnings.catch_warnings(),
        recorder,
    ):
        warnings.filterwarnings("ignore", message=".*requires_grad=True.*")
        out = model(*call_args, **call_kwargs)
        recorder.inside += 1  # what follows is ours
        recorder.check_python_random()
        output = recorder.ledger.lift(out)
        _check_buffers(model, weights, names)
    return Recording(recorder.ledger.values, recorder.nodes, output, recorder.entries, recorder.guards, training)


def _check_buffers(model: nn.Module, weights: Weights, names: Names) -> None:
    for saved in weights.saved:
        for name, before in saved.buffers.items():
            now = saved.module._buffers.get(name)
            if before is not None and now is not weights.meta[id(before)]:
                full = f"{names.first(saved.module)}.{name}".lstrip(".")
                raise SplitError(
                    f"buffer {full!r} is replaced during the forward, which a recorded stage can't do. Change it in "
                    "place (copy_, add_)."
                )


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Keep torch.compile out of the way, if it is loaded at all."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _patched(recorder: Recorder, names: Names) -> Iterator[None]:
    """Tell the recorder of calls of modules and of autograd functions."""
    undo: list[tuple[type, str, Any]] = []

    def patch(owner: type, name: str, new: Any) -> None:
        undo.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, new)

    classes = {type(names.modules[names.of[key][0]]) for key in recorder.units | recorder.opened}
    try:
        for kind in classes:
            patch(kind, "__call__", _call_of(kind, recorder))
        patch(torch.autograd.Function, "apply", _apply_of(recorder))
        yield
    finally:
        for owner, name, old in reversed(undo):
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _call_of(kind: Any, recorder: Recorder) -> Any:
    own = vars(kind).get("__call__")

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if own is not None:
                return own(module, *args, **kwargs)
            return super(kind, module).__call__(*args, **kwargs)

        if recorder.inside or not recorder.is_mine() or id(module) not in recorder.opened | recorder.units:
            return run(*args, **kwargs)
        if id(module) in recorder.units:
            return recorder.unit(module, run, args, kwargs)
        recorder.enter(module)
        return run(*args, **kwargs)

    return call


def _apply_of(recorder: Recorder) -> Any:
    before = vars(torch.autograd.Function)["apply"].__func__
    checkpoint = torch.utils.checkpoint.CheckpointFunction

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        if recorder.inside or not recorder.is_mine():
            return before(kind, *args, **kwargs)
        if kind is checkpoint:  # run_function, preserve_rng_state, *args; units inside see that they are checkpointed
            return args[0](*args[2:], **kwargs)
        return recorder.call(types.MethodType(before, kind), args, kwargs)

    return classmethod(apply)


def same(training: Recording, evaluating: Recording) -> bool:
    """Compare the recordings of both modes; where an argument is the mode, write `Training` into the first.

    Returns:
        whether they agree but for that.
    """
    if len(training.nodes) != len(evaluating.nodes) or len(training.values) != len(evaluating.values):
        return False
    if training.entries != evaluating.entries or len(training.guards) != len(evaluating.guards):
        return False
    found: list[tuple[Any, dict[str, Any]]] = []
    for one, other in zip(training.nodes, evaluating.nodes, strict=True):
        if (one.module, one.context, one.recompute) != (other.module, other.context, other.recompute):
            return False
        if one.function is not other.function and one.function != other.function:
            return False
        if [v.number for v in one.outputs] != [v.number for v in other.outputs]:
            return False
        if [(o.number, n.number) for o, n in one.touched] != [(o.number, n.number) for o, n in other.touched]:
            return False
        merged = _merged((one.args, one.kwargs), (other.args, other.kwargs))
        if merged is _DIFFERENT:
            return False
        found.append(merged)
    if _merged(training.output, evaluating.output, exact=True) is _DIFFERENT:
        return False
    for guard, twin in zip(training.guards, evaluating.guards, strict=True):
        if guard.node_count != twin.node_count or guard.function != twin.function:
            return False
        if _merged((guard.args, guard.kwargs), (twin.args, twin.kwargs), exact=True) is _DIFFERENT:
            return False
    for node, (args, kwargs) in zip(training.nodes, found, strict=True):
        node.args, node.kwargs = args, kwargs
    return True


_DIFFERENT = object()


def _merged(one: Any, other: Any, *, exact: bool = False) -> Any:
    """Return the common form of two structures of arguments."""
    if isinstance(one, Value) or isinstance(other, Value):
        agree = isinstance(one, Value) and isinstance(other, Value) and one.number == other.number
        return one if agree else _DIFFERENT
    if type(one) is not type(other):
        return _DIFFERENT
    if one is True and other is False and not exact:
        return Training()
    if isinstance(one, (tuple, list)) and not isinstance(one, torch.Size):
        if len(one) != len(other):
            return _DIFFERENT
        parts = [_merged(mine, theirs, exact=exact) for mine, theirs in zip(one, other, strict=True)]
        if any(part is _DIFFERENT for part in parts):
            return _DIFFERENT
        if type(one) in (tuple, list):
            return type(one)(parts)
        return one if all(part is mine for part, mine in zip(parts, one, strict=True)) else _DIFFERENT
    if isinstance(one, dict):
        if list(one) != list(other):
            return _DIFFERENT
        items = {key: _merged(one[key], other[key], exact=exact) for key in one}
        if any(item is _DIFFERENT for item in items.values()):
            return _DIFFERENT
        if type(one) is dict:
            return items
        return one if all(items[key] is one[key] for key in one) else _DIFFERENT
    if isinstance(one, slice):
        parts = [_merged(getattr(one, n), getattr(other, n), exact=exact) for n in ("start", "stop", "step")]
        return _DIFFERENT if any(part is _DIFFERENT for part in parts) else slice(*parts)
    if isinstance(one, (int, float, complex, str, torch.dtype, torch.device, torch.Size)):
        return one if one == other else _DIFFERENT
    numbers = [[leaf.number for leaf in leaves(item) if isinstance(leaf, Value)] for item in (one, other)]
    # Objects of the same type are the same, or made anew in each forward.
    return one if numbers[0] == numbers[1] else _DIFFERENT
