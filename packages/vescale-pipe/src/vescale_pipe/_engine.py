"""The engine: one call per step on every rank, and the same script on one device."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ._plan import PipePlan
from ._runtime.agreement import agree, facts
from ._runtime.batch import Batch
from ._runtime.form import Form
from ._runtime.losses import LossRule
from ._runtime.mesh import pipeline_group, wrapped
from ._runtime.order import fit, one_device
from ._runtime.rank import Record, run_together
from ._runtime.wiring import GraphLike
from ._schedule import Rule, Schedule, problems
from ._timeline.recorder import recorder
from ._timeline.transport import RecordedTransport
from ._transport import LocalHub, Transport, open_transport
from .errors import PipeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PipeEngine"]

log = logging.getLogger("vescale_pipe")


class PipeEngine:
    """Trains and runs a model in a pipeline.

    Every rank makes the engine alike and calls it with the same arguments; with stages made by hand, ranks whose
    stages take none of them may pass None. Gradients, losses and, after equal optimizer steps, parameters are bitwise
    those of one process that does `for m: (loss_m * weight_m).backward()`, where the kernels of torch are
    deterministic and draw no random numbers (each rank has a generator of its own), and the schedule ends
    micro-batches in their order (all that have a name do).

    Args:
        model: a model in stages (`split`, `manual`), or a model, which is cut at the first call or by `example`.
        mesh: ranks of the pipeline: a process group, a mesh of one dimension, or one with `plan.mesh_dim`; None: this
            process holds all stages.
        plan: schedule, micro-batches, and so on.
        loss_fn: from outputs and target of a micro-batch to its loss; None where the model returns its loss.
        example: (args, kwargs) of one call, to cut a model before the first step.
        loss_everywhere: whether all ranks get the loss, or only that of the last stage.
        act_out: without a mesh: ranks of a pipeline to act out in this process, for tests.
        transport: channels to use instead of those of the mesh.
        device: that this rank's stages and what they receive are put on; None: where the model is, messages on the CPU.

    Raises:
        PipeError: the arguments do not fit together.
        ScheduleError: the schedule does not run the model.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Linear(2, 1)
        >>> engine = PipeEngine(net, None, PipePlan(num_microbatches=2), nn.functional.mse_loss)
        >>> loss, outputs = engine(torch.ones(4, 2), target=torch.zeros(4, 1))
        >>> outputs.shape, net.weight.grad is not None
        (torch.Size([4, 1]), True)
    """

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh | ProcessGroup | None,
        plan: PipePlan,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        loss_everywhere: bool = True,
        act_out: int | None = None,
        transport: Transport | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.plan = plan
        self.record: Record | None = None
        """Told about each computation: kind, stage, micro-batch, start, end; None: the timeline, while it records."""
        self._model = model
        self._mesh = mesh
        self._loss_everywhere = loss_everywhere
        self._rule = LossRule(loss_fn, plan.loss)
        self._device = None if device is None else torch.device(device)
        self._hub = LocalHub(act_out or 1, plan.timeout)
        if transport is not None:
            self._transports: list[Transport] = [transport]
        elif mesh is not None:
            group = pipeline_group(mesh, plan.mesh_dim)
            inner = open_transport(group, self._device or torch.device("cpu"), plan.timeout)
            self._transports = [RecordedTransport(inner, get_process_group_ranks(group))]
        else:
            self._transports = [self._hub.transport(rank) for rank in range(act_out or 1)]
        self._alone = mesh is None and transport is None
        self._one_device = self._alone and act_out is None
        self._graph: GraphLike | None = None
        self._placement: tuple[int, ...] = ()
        self._forms: dict[int, Form] = {}
        self._kept: list[GraphLike] = []
        self._modules: dict[tuple[int, int], Callable[..., Any]] = {}
        self._told = False
        if _in_stages(model):
            self._build(model)
        elif example is not None:
            self._cut(*example)

    # -- building

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Cut the model by a call."""
        if isinstance(self._model, Sequence | nn.ModuleList):
            from ._split import manual

            self._build(manual(list(self._model)))
            return
        from ._split import split

        plan = self.plan
        at = plan.at
        count = None
        if at is None:
            count = 1 if self._one_device else self._schedule(plan.num_microbatches, None).num_stages
            if count == 1:
                at, count = (), None
        self._build(
            split(
                self._model,
                at=at,
                num_stages=count,
                example_args=args,
                example_kwargs=kwargs,
                units=plan.units,
                costs=plan.costs,
            )
        )

    def _schedule(self, microbatches: int, num_stages: int | None) -> Schedule:
        """Return the schedule for some micro-batches."""
        plan = self.plan
        if self._one_device:
            assert num_stages is not None
            return one_device(num_stages, microbatches)
        if isinstance(plan.schedule, Schedule):
            self._tell_of_order(plan.schedule)
            if plan.schedule.num_microbatches != microbatches:
                raise PipeError(
                    f"schedule {plan.schedule.name!r} is for {plan.schedule.num_microbatches} micro-batches, not "
                    f"{microbatches}; name a schedule to run with other numbers."
                )
            return plan.schedule
        from ._schedules import build_schedule

        chunks = plan.chunks
        if chunks is None and num_stages is not None and num_stages > self.num_ranks:
            chunks = num_stages // self.num_ranks
        return build_schedule(plan.schedule, self.num_ranks, microbatches, chunks=chunks)

    def _tell_of_order(self, schedule: Schedule) -> None:
        """Warn, once, of a schedule of the user's in which gradients are not added in the order of micro-batches."""
        if self._told:
            return
        self._told = True
        found = [one for one in problems(schedule, canonical=True) if one.rule == Rule.CANONICAL]
        if found:
            log.warning(
                "schedule %r adds gradients in another order than a loop over micro-batches would, so their last bits "
                "may differ from it: rank %d, %s.",
                schedule.name,
                found[0].rank,
                found[0].action,
            )

    def _build(self, graph: Any) -> None:
        """Take a model in stages."""
        schedule = self._schedule(self.plan.num_microbatches, len(graph.stages))
        if schedule.num_ranks != self.num_ranks:
            raise PipeError(
                f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks; the pipeline has {self.num_ranks}."
            )
        self._graph = graph
        self._placement = schedule.placement
        if self._device is not None:
            for number in self.stages:
                graph.stages[number].module.to(self._device)
        form = self._form_of(graph)
        if not self._alone:
            agree(self._transports[0], facts(self.plan, schedule, form.wiring, graph))
            if self.plan.release:
                graph.release(self.stages)

    def _module(self, graph: GraphLike, number: int) -> Callable[..., Any]:
        """Return the module of a stage, in the wrappers of plugins."""
        found = self._modules.get((id(graph), number))
        if found is None:
            found = wrapped(graph.stages[number].module, self._mesh, self.plan.mesh_dim)
            self._modules[id(graph), number] = found
        return found

    def _form_of(self, graph: GraphLike) -> Form:
        """Return what runs a graph: graphs of other shapes mostly have the same messages, and share it."""
        form = self._forms.get(id(graph))
        if form is None:
            plan = self.plan
            schedule, wiring = fit(self._schedule(plan.num_microbatches, len(graph.stages)), graph)
            form = next((one for one in self._forms.values() if one.wiring == wiring), None)
            if form is None:
                # In one process all stages have one object, to which autograd adds.
                tied = "none" if self._alone and plan.tied == "fast" else plan.tied
                form = Form(
                    schedule,
                    wiring,
                    graph,
                    self._transports,
                    self._rule,
                    plan,
                    self._loss_everywhere,
                    self._schedule,
                    tied,
                )
            self._forms[id(graph)] = form
            self._kept.append(graph)
        return form

    def _graphs(self, batch: Batch) -> list[Any]:
        """Return the graph of each micro-batch."""
        graph: Any = self._graph
        if getattr(graph, "accepts", None) is None and getattr(graph, "training", None) is None:
            return [graph] * batch.count
        return [graph.for_batch(*batch.microbatch(number)) for number in range(batch.count)]

    # -- running

    def __call__(
        self,
        *args: Any,
        target: Any = None,
        batch_size: int | None = None,
        grad_scale: float | Tensor = 1.0,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any]:
        """Do one step: all micro-batches forward and backward; gradients are added to those that are there.

        Args:
            args: positional arguments of the model, of the whole batch.
            target: second argument of the loss, of the whole batch.
            batch_size: rows of the batch; by default dim 0 of the first tensor. Tensors of so many rows are cut.
            grad_scale: factor of all gradients, not of the loss that is returned: `scaler.get_scale()`.
            kwargs: keyword arguments of the model.

        Returns:
            The loss of the batch (a scalar without graph, on all ranks) and, on the rank of the last stage, the outputs
            of the model, put together; None on other ranks.

        Raises:
            RankError: another rank failed.
            TransportError: another rank is gone or stuck.
            PipeError: the arguments do not fit.
        """
        with torch.enable_grad():
            scale = float(grad_scale)
            return self._step(args, kwargs, target, self.plan.num_microbatches, batch_size, True, True, scale)

    def eval_step(
        self,
        *args: Any,
        target: Any = None,
        batch_size: int | None = None,
        num_microbatches: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any]:
        """Run the model forward only, without gradients; call `eval()` first, or it stays in training mode.

        Args:
            args: as for a step.
            target: as for a step; without one, `loss_fn` is not called.
            batch_size: as for a step.
            num_microbatches: pieces; None: those of the plan.
            kwargs: as for a step.

        Returns:
            Loss, or None without a target, and outputs, as for a step.

        Raises:
            PipeError: as for a step.
        """
        count = self.plan.num_microbatches if num_microbatches is None else num_microbatches
        loss = target is not None or self._rule.function is None
        with torch.no_grad():
            return self._step(args, kwargs, target, count, batch_size, False, loss, 1.0)

    def _step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any,
        count: int,
        size: int | None,
        training: bool,
        loss: bool,
        scale: float,
    ) -> tuple[Tensor | None, Any]:
        form: Form | None = None
        try:
            batch = Batch(args, kwargs, target, count, size)
            record = self.record
            if recorder.ring is not None:
                recorder.step += 1
                record = record or recorder.action
            if self._graph is None:
                self._cut(*batch.microbatch(0))
            graphs = self._graphs(batch)
            forms = {id(one): one for one in map(self._form_of, graphs)}
            form = next(iter(forms.values()))
            if len(forms) > 1:
                raise PipeError(
                    "micro-batches of one step send different values between stages, for the model does not do the "
                    "same for all of them: some models drop an attention mask where nothing is masked. Use "
                    "micro-batches of one kind, cut the model elsewhere, or, in transformers, set "
                    'attn_implementation="eager".'
                )
            keep = self.plan.keep_outputs or not training
            for rank, calls in zip(form.ranks, form.calls(training, count), strict=True):
                rank.begin(calls, batch, graphs, self._module, target, keep=keep, loss=loss, scale=scale)
            if len(form.ranks) == 1:
                form.ranks[0].run(record)
            else:
                run_together(form.ranks, record)
            return form.finish(batch, graphs)
        except BaseException:
            self._fail(form)
            raise

    def _fail(self, form: Form | None) -> None:
        """End all ranks, with what happened here."""
        where = "the start of a step"
        if form is not None:
            where = form.ranks[0].where()
            for rank in form.ranks:
                rank.forget()
        if self._alone:
            self._hub.reset()
            return
        self._transports[0].abort(f"rank {self._transports[0].rank} at {where}:\n{traceback.format_exc()}")

    def close(self) -> None:
        """End the channels to other ranks, when no step runs."""
        for transport in self._transports:
            transport.close()

    # -- what this rank holds

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return self._transports[0].size

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages in this process."""
        self._made()
        mine = {transport.rank for transport in self._transports}
        return tuple(number for number, rank in enumerate(self._placement) if rank in mine)

    def _made(self) -> Any:
        if self._graph is None:
            raise PipeError("the model is not cut yet: give PipeEngine example=(args, kwargs), or call it once before.")
        return self._graph

    def _stage_modules(self) -> Iterator[nn.Module]:
        graph = self._made()
        for number in self.stages:
            yield graph.stages[number].module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this rank's stages under the names that they have in the model, each once."""
        seen: set[int] = set()
        for module in self._stage_modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's stages; those of all ranks together are the model's."""
        state: dict[str, Any] = {}
        for module in self._stage_modules():
            state.update(module.state_dict())
        return state

    def train(self, mode: bool = True) -> PipeEngine:
        """Set this rank's stages to training or evaluation, as `nn.Module.train` does.

        Args:
            mode: True for training.
        """
        model = getattr(self._made(), "model", None)
        for module in self._stage_modules() if model is None else (model,):
            module.train(mode)
        return self

    def eval(self) -> PipeEngine:
        """Set this rank's stages to evaluation."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for parameter in self.parameters():
            parameter.grad = None


def _in_stages(model: Any) -> bool:
    return hasattr(model, "stages") and hasattr(model, "unflatten_outputs") and not isinstance(model, nn.Module)
