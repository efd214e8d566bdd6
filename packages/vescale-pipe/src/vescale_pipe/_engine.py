"""The engine: one call per step on every rank, and the same script on one device."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import get_process_group_ranks

from ._plan import PipePlan
from ._runtime.agreement import agree, facts
from ._runtime.batch import Batch
from ._runtime.choose import Schedules
from ._runtime.clip import NormOf, counted, scale_to, total_norm
from ._runtime.draws import microbatch_seed
from ._runtime.form import Form
from ._runtime.forms import Forms
from ._runtime.losses import LossRule
from ._runtime.mesh import pipeline_group, wrapped
from ._runtime.rank import Record, run_together
from ._runtime.wiring import GraphLike
from ._timeline.recorder import recorder
from ._timeline.transport import RecordedTransport
from ._transport import LocalHub, Transport, open_transport
from .errors import PipeError, SplitError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PipeEngine"]

EXAMPLE = 'PipePlan(schedule="1f1b", num_microbatches=8)'
LONGEST = 300
"""Characters of an error in the first line that other ranks show."""


class PipeEngine:
    """Trains and runs a model in a pipeline.

    Every rank makes the engine alike and calls it with the same arguments; with stages made by hand, ranks whose
    stages take none of them may pass None. Gradients, losses and, after equal optimizer steps, parameters are bitwise
    those of one process that does `for m: (loss_m * weight_m).backward()`, where the kernels of torch are
    deterministic and draw no random numbers (or the plan has a seed), and the schedule ends micro-batches in their
    order (all that have a name do).

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
        >>> from vescale_pipe import PipeEngine, PipePlan
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
        if not isinstance(plan, PipePlan):
            raise PipeError(f"plan: a {type(plan).__name__} given; it must be a PipePlan, such as {EXAMPLE}.")
        self.plan = plan
        self.record: Record | None = None
        """Told about each computation: kind, stage, micro-batch, start, end; None: the timeline, while it records."""
        self.steps = 0
        """Training steps that were done; a script that goes on from a checkpoint sets it, if the plan has a seed."""
        self._model = model
        self._mesh = mesh
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
        self._graph: GraphLike | None = None
        self._placement: tuple[int, ...] = ()
        self._modules: dict[tuple[int, int], Callable[..., Any]] = {}
        self._parameters = _parameters_of(model)
        # In one process all stages have one object, to which autograd adds.
        tied = "none" if self._alone and plan.tied == "fast" else plan.tied
        try:
            self._schedules = Schedules(plan, self.num_ranks, self._alone and act_out is None)
            self._forms = Forms(self._transports, self._rule, plan, loss_everywhere, self._schedules, tied)
            if _in_stages(model):
                self._build(model)
            elif isinstance(model, Sequence | nn.ModuleList) and not isinstance(model, str):
                from ._split import manual

                self._build(manual(list(model)))
            elif not isinstance(model, nn.Module):
                raise PipeError(
                    f"model: a {type(model).__name__} given; it must be a model (nn.Module), a list of stages, or what "
                    "split or manual returned."
                )
            elif example is not None:
                self._cut(*example)
        except BaseException as error:
            self._fail(None, error, "the making of the engine")
            raise

    # -- building

    def _cut(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Cut the model by a call."""
        from ._split import split

        plan = self.plan
        at, count = plan.at, None
        if at is None:
            count = self._schedules.num_stages()
            if count == 1:
                at, count = (), None
        try:
            graph = split(
                self._model,
                at=at,
                num_stages=count,
                example_args=args,
                example_kwargs=kwargs,
                units=plan.units,
                costs=plan.costs,
            )
        except SplitError as error:
            if plan.num_stages is not None or not str(error).startswith("num_stages="):
                raise
            name = getattr(plan.schedule, "name", plan.schedule)
            text = f"{error} (Schedule {name!r} on {self.num_ranks} ranks has {count} stages.)"
            raise SplitError(text) from error
        self._build(graph)

    def _build(self, graph: Any) -> None:
        """Take a model in stages."""
        schedule = self._schedules(self.plan.num_microbatches, len(graph.stages))
        if schedule.num_ranks != self.num_ranks:
            raise PipeError(
                f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks; the pipeline has {self.num_ranks}."
            )
        self._graph = graph
        self._placement = schedule.placement
        if self._device is not None:
            for number in self.stages:
                graph.stages[number].module.to(self._device)
        form, _ = self._forms.of([graph])
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
            batch_size: rows of the batch; by default dim 0 of the first tensor. Tensors of so many rows are cut, unless
                the plan names them as whole.
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
            if loss and self._parameters is not None:
                self._rule.check(target is not None)
            batch = Batch(args, kwargs, target, count, size, self.plan.whole, self._parameters or ())
            record = self.record
            if recorder.ring is not None:
                recorder.step += 1
                record = record or recorder.action
            if self._graph is None:
                self._cut(*batch.microbatch(0))
            graphs = self._graphs(batch)
            form, wirings = self._forms.of(graphs)
            seed = self.plan.seed
            seeds = None if seed is None else [microbatch_seed(seed, self.steps, m) for m in range(count)]
            keep = self.plan.keep_outputs or not training
            for rank, calls in zip(form.ranks, form.calls(training, count), strict=True):
                rank.begin(
                    calls,
                    batch,
                    graphs,
                    wirings,
                    self._module,
                    target,
                    keep=keep,
                    loss=loss,
                    scale=scale,
                    seeds=seeds,
                )
            if len(form.ranks) == 1:
                form.ranks[0].run(record)
            else:
                run_together(form.ranks, record)
            if training:
                self._finish_gradients()
            result = form.finish(batch, graphs)
            self.steps += training
            return result
        except BaseException as error:
            self._fail(form, error, "the start of a step")
            raise

    def _finish_gradients(self) -> None:
        """Tell the wrappers of stages that the micro-batches of a step are over, if they want to know."""
        for module in self._modules.values():
            finish = getattr(module, "finish_grad_sync", None)
            if finish is not None:
                finish()

    def _fail(self, form: Form | None, error: BaseException, where: str) -> None:
        """End all ranks, with what happened here."""
        if form is not None:
            where = form.ranks[0].where()
            for rank in form.ranks:
                rank.forget()
        if self._alone:
            self._hub.reset()
            return
        summary = traceback.format_exception_only(error)[-1].strip().partition("\n")[0]
        text = f"at {where}: {summary if len(summary) <= LONGEST else summary[:LONGEST] + '...'}"
        self._transports[0].abort(f"{text}\n{''.join(traceback.format_exception(error))}")

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

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        norm_of: NormOf | None = None,
    ) -> Tensor:
        """Scale all gradients of the pipeline so that their norm is at most `max_norm`; all ranks call it.

        It is what `torch.nn.utils.clip_grad_norm_` does on one device, bit for bit: parameters of all stages count,
        tied ones once.

        Args:
            max_norm: largest norm.
            norm_type: p of the p-norm; `inf` is allowed.
            error_if_nonfinite: whether a norm that is infinite or nan is an error.
            norm_of: for gradients that are cut over other dimensions of the mesh: gets a name and a parameter, returns
                the norm of its whole gradient. None: the norm of what is here; DTensors are whole without it.

        Returns:
            The norm of all gradients before, on all ranks.

        Raises:
            PipeError: the norm is not finite, and that is an error.
            RankError: another rank failed.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> from vescale_pipe import PipeEngine, PipePlan
            >>> engine = PipeEngine([nn.Linear(1, 1, bias=False)], None, PipePlan(num_microbatches=1))
            >>> next(engine.parameters()).grad = torch.tensor([[4.0]])
            >>> engine.clip_grad_norm_(1.0), next(engine.parameters()).grad
            (tensor(4.), tensor([[1.0000]]))
        """
        graph = self._made()
        mine = {transport.rank for transport in self._transports}
        try:
            some = counted(graph, self._placement, mine)
            transport = self._transports[0] if len(mine) < self.num_ranks else None
            total = total_norm(some, transport, float(norm_type), norm_of)
        except BaseException as error:
            self._fail(None, error, "clip_grad_norm_")
            raise
        if error_if_nonfinite and not bool(total.isfinite()):
            raise PipeError(
                f"clip_grad_norm_: the norm of all gradients is {float(total)}: a loss or a gradient overflowed. Lower "
                "the learning rate or the scale of the loss, or skip this step."
            )
        scale_to(self.parameters(), total, float(max_norm))
        return total

    def zero_grad(self) -> None:
        """Drop the gradients of this rank's parameters."""
        for parameter in self.parameters():
            parameter.grad = None


def _parameters_of(model: Any) -> tuple[str, ...] | None:
    """Return the names of the arguments of a model; None for stages by hand, whose ranks may get others."""
    if isinstance(model, nn.ModuleList) or not isinstance(model, nn.Module):
        model = getattr(model, "model", None)
    if not isinstance(model, nn.Module):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        found = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):  # compiled code does not say
        return ()
    return tuple(name for name, one in found.items() if one.kind not in kinds)


def _in_stages(model: Any) -> bool:
    return hasattr(model, "stages") and hasattr(model, "unflatten_outputs") and not isinstance(model, nn.Module)
