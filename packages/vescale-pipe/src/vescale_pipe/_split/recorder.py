"""One forward of a model, recorded: calls of its units as they are, and what happens between them by torch function.

Units run on meta with stand-ins for weights; what depends on the batch only is computed for real, so that code which
looks at masks and positions works. Nothing of the model is changed when it is over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import SplitError
from .calls import (
    Reads,
    blank_tensor,
    device_of,
    device_question,
    draws,
    is_setter,
    meta_result,
    shape_of,
    sized_by_values,
)
from .ledger import Ledger
from .names import Names
from .places import place, within_checkpoint
from .running import Runner, tensors_of
from .swap import Weights, python_random, random_state, same_state
from .tree import Path, leaves, mapped
from .values import Context, Guard, Node, Touch, Value, call_name

__all__ = ["Recorder"]


class Recorder(TorchFunctionMode):
    """Values and nodes of a forward that runs while this mode is active."""

    def __init__(self, names: Names, units: set[int], opened: set[int], weights: Weights, *, count_flops: bool) -> None:
        super().__init__()
        self.names, self.units, self.opened = names, units, opened
        self.ledger = Ledger(weights)
        self.runner = Runner(weights, count_flops=count_flops)
        self.nodes: list[Node] = []
        self.guards: list[Guard] = []
        self.entries: dict[str, int] = {}
        self.inside = 0  # > 0 while a unit or one of our own computations runs
        self._thread = threading.get_ident()
        self._autocast = _autocast_state()
        self._python_random = python_random()

    def is_mine(self) -> bool:
        """Return whether this is the thread that is recorded."""
        return threading.get_ident() == self._thread

    # -- calls ----------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.inside or not self.is_mine():
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one function."""
        name = getattr(func, "__name__", "")
        if is_setter(func):
            return self._set(func, args)
        if name in Reads:
            return self._read(func, args, kwargs)
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], self._indices(args[1]), *args[2:])
        asked = device_question(func)
        if asked is not None:
            device = self.ledger.of(args[0]).device
            return device if asked == "device" else asked == f"is_{device.type}"
        return self._record(None, func, args, kwargs)

    def _indices(self, index: Any) -> Any:
        """Return an index with numbers for the tensors in its slices, which torch reads too."""
        if isinstance(index, tuple):
            return tuple(self._indices(item) for item in index)
        if not isinstance(index, slice):
            return index
        ends = (index.start, index.stop, index.step)
        return slice(*(self.call(Tensor.__index__, (end,), {}) if isinstance(end, Tensor) else end for end in ends))

    def _set(self, func: Any, args: tuple[Any, ...]) -> Any:
        attribute = func.__self__.__name__
        if attribute == "requires_grad":
            self.call(Tensor.requires_grad_, args, {})
            return None
        raise SplitError(f"{place()}: sets .{attribute} of {self.ledger.of(args[0]).text}, which can't be recorded.")

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Python code looks at values: fine for what depends on the batch only, an error for all else."""
        lifted, named = self.ledger.lift((args, kwargs))
        values = [leaf for leaf in leaves((lifted, named)) if isinstance(leaf, Value)]
        for value in values:
            if not value.known or value.tensor.is_meta:
                raise SplitError(
                    f"{place()}: {call_name(func)}() reads {value.text}, so what happens next depends on values that "
                    + (
                        "are not known when the model is split. Put that code into a module and name it in `units`, "
                        "or cut the model so that this module stays whole."
                        if not value.known
                        else "the example inputs on meta don't have. Give real example inputs."
                    )
                )
        self.inside += 1
        try:
            result = func(*tensors_of(lifted), **tensors_of(named))
        finally:
            self.inside -= 1
        self.guards.append(Guard(len(self.nodes), func, lifted, named, result, place()))
        return result

    def unit(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record one call of a unit."""
        name = self.names.first(module)
        self.entries.setdefault(name, len(self.nodes))
        args, kwargs = self._without_values(module, run, args, kwargs)
        self.check_python_random()
        out = self._record(module, run, args, kwargs)
        self._python_random = python_random()
        return out

    def check_python_random(self) -> None:
        """Refuse numbers that Python code between modules drew: they would be the same ever after."""
        if python_random() != self._python_random:
            raise SplitError(
                f"{place()}: before this, code between modules drew from Python's or numpy's random numbers, which a "
                "recorded stage would repeat for ever. Draw with torch, or keep that code inside a module named in "
                "`units`."
            )

    def _without_values(
        self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace hidden states that a module takes for their shape, type or device only, as rotary tables do."""
        if _has_state(module):
            return args, kwargs
        lifted = self.ledger.lift((args, kwargs))
        hidden = [leaf for leaf in leaves(lifted) if isinstance(leaf, Value) and not leaf.known]
        if not hidden or len(hidden) == sum(isinstance(leaf, Value) for leaf in leaves(lifted)):
            return args, kwargs
        probe = Recorder(self.names, set(), set(), self.ledger.weights, count_flops=False)

        def give(leaf: Any, path: Path) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            twin = leaf.tensor.detach().clone()
            probe.ledger.value(twin, "batch", None, twin, known=leaf.known, device=leaf.device, text=leaf.text)
            return twin

        given_args, given_kwargs = mapped(give, lifted)
        self.inside += 1
        try:
            with probe:
                out = run(*given_args, **given_kwargs)
                probe.inside += 1
                results = [leaf for leaf in leaves(probe.ledger.lift(out)) if isinstance(leaf, Value)]
        except Exception:  # noqa: BLE001 -- whatever it does that can't be followed: it stays as it is
            return args, kwargs
        finally:
            self.inside -= 1
        if probe.guards or any(node.touched for node in probe.nodes) or not all(value.known for value in results):
            return args, kwargs

        def blank(leaf: Any, path: Path) -> Any:
            value = self.ledger.find(leaf)
            if value is None or value.known:
                return leaf
            return self.call(blank_tensor, (tuple(leaf.shape), leaf.dtype, value.device), {})

        new_args, new_kwargs = mapped(blank, (args, kwargs))
        return new_args, new_kwargs

    def enter(self, module: nn.Module) -> None:
        """Note that an opened module was called."""
        self.entries.setdefault(self.names.first(module), len(self.nodes))

    def _record(
        self,
        module: nn.Module | None,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        args, kwargs = self.ledger.lift((args, kwargs))
        node = Node(
            len(self.nodes),
            None if module is None else self.names.first(module),
            func if module is None else None,
            args,
            kwargs,
            self._context(),
            place(),
        )
        values = list({leaf.number: leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)}.values())
        node.known = all(value.known for value in values)
        if module is not None:
            node.recompute = within_checkpoint()
            if node.recompute:
                node.context = node.context._replace(no_grad=False)
            node.known = node.known and not _has_state(module)
        self.inside += 1
        try:
            return self._run(node, module, func, values)
        finally:
            self.inside -= 1

    def _run(self, node: Node, module: nn.Module | None, func: Callable[..., Any], values: list[Value]) -> Any:
        if node.known and not any(value.tensor.is_meta for value in values):
            stand_in = {value.number: value.tensor for value in values}
            before = {number: tensor._version for number, tensor in stand_in.items()}
            drawn = random_state()
            out, changed = self.runner.for_real(node, module, func)
            node.known = not changed and same_state(drawn, random_state()) and not draws(node, module)
        else:
            stand_in = {value.number: self.ledger.stand_in(value) for value in values}
            before = {number: tensor._version for number, tensor in stand_in.items()}
            out = self.runner.on_meta(node, module, func, stand_in)
            node.known = node.known and not draws(node, module)
        touched = [value for value in values if stand_in[value.number]._version != before[value.number]]
        for value in touched:
            # A buffer of the model, or a tensor that it holds, must change once, not once per stage.
            node.known = node.known and all(
                other.source not in ("buffer", "constant") for other in self.ledger.group(value.group)
            )
        if module is None and not touched and not any(isinstance(leaf, Tensor) for leaf in leaves(out)):
            return out  # a question such as the shape
        self.nodes.append(node)
        for group in {value.group for value in touched}:
            self._touch(node, group)
        result = self._bind(node, out, values, stand_in, touched)
        if node.known and module is None and sized_by_values(node):
            for value in node.outputs:
                shape = tuple(value.tensor.shape)
                self.guards.append(Guard(len(self.nodes), shape_of, (value,), {}, shape, node.place))
        for leaf in leaves((node.args, node.kwargs)):
            if not isinstance(leaf, (Tensor, Value)):
                self.ledger.check_opaque(leaf)
        return result

    def _touch(self, node: Node, number: int) -> None:
        """From now on all that shares memory with a changed value has a new name."""
        group = self.ledger.group(number)
        for value in group:
            value.copied = value.copied or value.source == "batch"
        for old in self.ledger.current(number):
            handle = self.ledger.handle(old)
            tensor = old.tensor
            if not node.known and old.known:
                tensor = self.ledger.stand_in(old)
            new = self.ledger.value(
                handle,
                "node",
                None,
                tensor,
                known=node.known,
                device=old.device,
                text=f"{old.text} as changed by {node}",
                node=node,
                alias=old,
            )
            node.touched.append(Touch(old, new))

    def _bind(
        self, node: Node, out: Any, values: list[Value], stand_in: dict[int, Tensor], touched: list[Value]
    ) -> Any:
        """Give each tensor of a result its value; returns the result as the user's code sees it."""
        given = {id(stand_in[value.number]): value for value in values}
        storages = {_storage(stand_in[value.number]): value for value in values}
        seen: dict[int, Tensor] = {}
        device = device_of(node, values)

        def leaf(item: Any, path: Path) -> Any:
            if not isinstance(item, Tensor):
                return item
            if id(item) in seen:
                return seen[id(item)]
            alias = given.get(id(item))
            handle = item
            if alias is not None and alias in touched:
                handle = self.ledger.handle(alias)
                seen[id(item)] = handle
                return handle
            tensor = item
            if not node.known and not item.is_meta:
                tensor = meta_result(item)
                handle = tensor
            elif alias is not None:
                handle = tensor = item.view_as(item)
            shared = alias or storages.get(_storage(item))
            text = f"the result of {node}" if not path else f"{_path_text(path)} of the result of {node}"
            where = device if item.is_meta else item.device
            made = self.ledger.value(
                handle, "node", path, tensor, known=node.known, device=where, text=text, node=node, alias=shared
            )
            storages.setdefault(_storage(item), made)  # results may share memory with each other
            node.outputs.append(made)
            seen[id(item)] = handle
            return handle

        return mapped(leaf, out)

    def _context(self) -> Context:
        state = _autocast_state()
        return Context(not torch.is_grad_enabled(), None if state == self._autocast else state)


def _path_text(path: Path) -> str:
    return "item " + "".join(f"[{step.key!r}]" if step.kind != "attr" else f".{step.key}" for step in path)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other kinds without one storage share none
        return -id(tensor)


def _autocast_state() -> tuple[str, bool, torch.dtype]:
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _has_state(module: nn.Module) -> bool:
    """Return whether a module must run once per forward: it has parameters or hooks."""
    return any(True for _ in module.parameters()) or any(
        part._forward_hooks or part._forward_pre_hooks for part in module.modules()
    )
