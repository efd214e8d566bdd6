"""What happens around the forward and backward of a sharded module: parameters come and go, gradients are reduced.

Forward hooks of the units gather; hooks on their results gather again in backward; hooks on the gathered parameters
take gradients; a callback of autograd ends the backward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError, StaleParameterError, TransportError
from .autograd import AtEnd, Backward, Call, current_task, may_come, results_of, watch
from .reduction import Channels, Reducer
from .sequence import Sequencer, Trace
from .unit import State, Unit
from .values import cast, tensors_in

__all__ = ["Engine"]


class Engine:
    """Runs one sharded module."""

    def __init__(
        self,
        root: nn.Module,
        units: Sequence[Unit],
        channels: Channels,
        *,
        ahead: int,
        cast_inputs: torch.dtype | None,
    ) -> None:
        """Install the hooks.

        Args:
            root: the module.
            units: its units; the first one is that of the root itself.
            channels: to the other ranks.
            ahead: how many units are gathered before they are needed.
            cast_inputs: dtype to which floating-point inputs of units are converted; None: they are left alone.
        """
        self._root, self.units, self.channels = root, list(units), channels
        trace = Trace()
        self.reducer = Reducer(self.units, channels, trace)
        self.sequencer = Sequencer(self.units, channels.shard, ahead, trace, self.reducer.launch)
        self._is_synchronizing = True
        self._cast_inputs = cast_inputs
        numbers = [unit.index for unit in self.units]
        self._forward_events = numbers
        self._backward_events = [0, *(e for index in numbers[:0:-1] for e in (index, ~index)), ~0]
        self._last = numbers[-1]
        self._seen: list[int] = []
        self._reported: tuple[list[int], list[int]] | None = None
        self._is_in_forward = self._is_recorded = False
        self._open: dict[int, list[Call]] = {index: [] for index in numbers}
        self._backward: Backward | None = None
        self._handles: list[Any] = []
        for unit in self.units:
            unit.module.register_forward_pre_hook(partial(self._before_forward, unit), prepend=True, with_kwargs=True)
            unit.module.register_forward_hook(partial(self._after_forward, unit))
            for number, flat in enumerate(unit.flats):
                for index, full in enumerate(flat.full):
                    if full.is_floating_point() or full.is_complex():
                        watch(full, partial(self._arrived, unit, number, index))
        root.register_forward_hook(self._after_failure, always_call=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        raise NotImplementedError("A sharded module cannot be copied: copy the module before fully_shard.")

    def __reduce__(self) -> Any:
        raise NotImplementedError("A sharded module cannot be pickled: save its state_dict().")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards inside keep their gradients for a later one."""
        before, self._is_synchronizing = self._is_synchronizing, False
        try:
            yield
        finally:
            self._is_synchronizing = before

    def reset(self) -> None:
        """Clean up after a forward or backward that failed, and give all parameters back."""
        self._is_in_forward = False
        self.sequencer.stop()
        if self._backward is not None:
            self._backward = None
            self.reducer.stop()
        for unit in self.units:
            self._open[unit.index].clear()
            unit.active.clear()
            unit.recomputed = 0
            with contextlib.suppress(TransportError):  # what does not come is not needed any more
                unit.free()

    # forward

    def _before_forward(self, unit: Unit, module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        task, records = current_task(), torch.is_grad_enabled()
        if task != -1:
            self._begin_backward(task)  # a recomputation, maybe the first that is heard of it
        elif unit is self.units[0]:
            self._begin_forward()
        elif self._is_in_forward:
            unit.recomputed += self._is_recorded and not records
        else:
            unit.check_places()  # called by itself
        if self.sequencer.need(unit) and task == -1:
            unit.repeats = True
        if records:
            call = Call(unit)
            unit.calls.add(call)
            self._open[unit.index].append(call)
            for tensor in tensors_in((args, kwargs)):
                if tensor.requires_grad:
                    call.inputs += 1
                    handle = tensor.register_hook(partial(self._input_done, call))  # type: ignore[no-untyped-call]
                    if tensor.is_leaf:
                        self._handles.append(handle)  # it lives on, such as a parameter that is passed in
        if self._cast_inputs is not None:
            return cast(args, self._cast_inputs), cast(kwargs, self._cast_inputs)
        return None

    def _after_forward(self, unit: Unit, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if any(flat.holds(tensor) for tensor in tensors_in(output) for flat in unit.flats):
            self._let_out(unit)
        if torch.is_grad_enabled() and self._open[unit.index]:
            call = self._open[unit.index].pop()
            hook = partial(self._before_backward, call)
            for tensor in results_of(unit, output):
                if tensor.requires_grad:
                    tensor.register_hook(hook)  # type: ignore[no-untyped-call]
                    base = tensor._base
                    if base is not None and base.grad_fn is not None:
                        # Changed in place, a view gets a new history, without the hook; that of its base goes on.
                        base.grad_fn.register_prehook(hook)
        if current_task() != -1:
            return
        if unit is self.units[0]:
            self._end_forward()
        elif not self._stays(unit):
            unit.free()

    def _let_out(self, unit: Unit) -> None:
        """Keep a unit gathered whose result is one of its parameters, or a view of one.

        Raises:
            StaleParameterError: nothing is left that could keep it.
        """
        unit.keep = unit.repeats = True
        if (unit is self.units[0] or not self._is_in_forward) and not torch.is_grad_enabled():
            raise StaleParameterError(
                f"{unit}: forward returns a parameter or a view of one, whose memory is given back now. Return a copy."
            )

    def _begin_forward(self) -> None:
        if self._backward is not None or self._is_in_forward:
            self.reset()
        # All of them at once, so that all ranks find what is wrong before they send anything.
        for unit in self.units:
            unit.check_places()
        self._check_added()
        for unit in self.units:
            unit.free()  # of a forward without a backward; the shards may have changed since
        self._is_in_forward, self._is_recorded = True, torch.is_grad_enabled()
        self.sequencer.begin(self._forward_events, lambda unit: True)

    def _check_added(self) -> None:
        """Refuse parameters that were added after the module was sharded.

        Raises:
            PlanError: there is one that needs a gradient, which nobody would reduce.
        """
        for path, module in self._root.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and not hasattr(parameter, "vescale"):
                    full_name = f"{path}.{name}".lstrip(".")
                    raise PlanError(
                        f"{full_name}: the parameter was added after fully_shard, so its gradient would not be "
                        f"reduced. Add parameters before."
                    )

    def _end_forward(self) -> None:
        seen = list(self.sequencer.events)
        self.sequencer.rest()
        if self._is_recorded:
            self._seen = seen
        self._is_in_forward = self._is_recorded = False
        for unit in self.units:
            if not self._stays(unit):
                unit.free()
            elif unit.state is State.GATHERED:
                unit.check_written()

    def _after_failure(self, module: nn.Module, args: Any, output: Any) -> None:
        """Clean up where the forward of the root failed: the hook that ends it was not called then."""
        del module, args, output
        if self._is_in_forward and current_task() == -1:
            self.reset()

    def _stays(self, unit: Unit) -> bool:
        """Tell whether a unit stays gathered after its forward."""
        if self._is_in_forward and (unit.repeats or unit is self.units[0]):
            return True
        return torch.is_grad_enabled() and (unit.keep or unit.index == self._last)

    # backward

    def _begin_backward(self, task: int) -> Backward:
        backward = self._backward
        if backward is not None and task not in backward.tasks and not backward.is_alive:
            self.reset()
            backward = None
        if backward is None:
            backward = self._backward = Backward(self._is_synchronizing)
            for unit in self.units:
                unit.task, unit.missing = -1, unit.expected()
                unit.is_deferred = unit.recomputed > 1
                unit.active.clear()
                for gradients in unit.gradients:
                    gradients.forget_cleared()
            self.sequencer.begin(self._backward_events, may_come, backward.reduces)
            for unit in self.units:
                if not may_come(unit) and not any(gradients.waiting for gradients in unit.gradients):
                    self.sequencer.make_ready(unit)
        if task not in backward.tasks:
            callback = AtEnd(self.end_task, task)
            backward.tasks[task] = weakref.ref(callback)
            torch.autograd.Variable._execution_engine.queue_callback(callback)
        return backward

    def _before_backward(self, call: Call, gradient: Any) -> None:
        del gradient
        unit, task = call.unit, current_task()
        if call.task == task:
            return  # it has begun
        backward = self._begin_backward(task)
        backward.keeps_graph |= torch.is_grad_enabled()
        if call.versions != unit.versions():
            raise StaleParameterError(
                f"{unit}: parameters were changed between forward and backward, so gradients would be those of a "
                f"model that never was. Update parameters after backward."
            )
        if unit.task == -1:
            unit.task = task
        call.task, call.left = task, call.inputs
        if call.inputs or unit.is_frozen_partly:
            unit.active.add(call)
        self.sequencer.need(unit)

    def _input_done(self, call: Call, gradient: Tensor) -> None:
        del gradient
        if call.task == current_task():
            call.left -= 1
            if call.left == 0:
                call.unit.active.discard(call)
                self._free_if_done(call.unit)

    def _arrived(self, unit: Unit, number: int, index: int, full: Tensor) -> None:
        gradient, full.grad = full.grad, None
        if gradient is None:
            return
        task = current_task()
        backward = self._begin_backward(task)
        backward.keeps_graph |= torch.is_grad_enabled()
        with torch.no_grad():
            local = unit.flats[number].entries[index].kind.gradient(full, gradient.detach())
            unit.gradients[number].take(index, local)
        if unit.task not in (-1, task):
            unit.is_deferred = True  # part of the unit is recomputed by itself, and may be again
        unit.missing.discard((number, index))
        if not unit.missing:
            self._free_if_done(unit)
            if backward.reduces and not unit.is_deferred:
                self.sequencer.complete(unit)

    def _free_if_done(self, unit: Unit) -> None:
        assert self._backward is not None
        if unit.missing or unit.active or unit.is_deferred or self._backward.keeps_graph or torch.is_grad_enabled():
            return
        if unit.state is State.GATHERED:
            unit.free()

    def end_task(self, task: int) -> None:
        """End the backward, if this was its outermost run of autograd."""
        backward = self._backward
        if backward is None:
            return
        backward.tasks.pop(task, None)
        if backward.is_alive:
            return
        try:
            with torch.no_grad():
                self._end_backward(backward)
        except BaseException:
            self.reset()
            raise

    def _end_backward(self, backward: Backward) -> None:
        events = list(self.sequencer.events)
        self.sequencer.rest()
        if backward.reduces:
            now = (self._seen, events)
            if self.reducer.finish(now != self._reported):
                self._agree(*now)
            self._reported = now
        else:
            for unit in self.units:
                for gradients in unit.gradients:
                    gradients.hold()
        self._backward = None
        while self._handles and not backward.keeps_graph:
            self._handles.pop().remove()
        for unit in self.units:
            unit.calls.clear()
            unit.active.clear()
            unit.recomputed = 0
            if not backward.keeps_graph:
                unit.free()

    def _agree(self, forward: Sequence[int], backward: Sequence[int]) -> None:
        """Take over the orders of the first rank; what it does not use comes last."""
        numbers = [unit.index for unit in self.units]
        forward = [*forward, *(i for i in numbers if i not in forward)]
        backward = [*backward, *(i for i in numbers if i not in backward)]
        backward += [~i for i in numbers if ~i not in backward]
        last = self._seen[-1] if self._seen else self._last
        told = torch.tensor([last, *forward, *backward], dtype=torch.int32, device=self.channels.device)
        self.channels.shard.broadcast(told, 0).wait()
        if self.channels.replicas is not None:
            self.channels.replicas.broadcast(told, 0).wait()
        self._last, *events = told.tolist()
        self._forward_events, self._backward_events = events[: len(numbers)], events[len(numbers) :]
