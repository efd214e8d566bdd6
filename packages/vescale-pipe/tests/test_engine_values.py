"""What may go between stages, come in and come out: one test per way in which torch's own runtime goes wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe._engine import PipeEngine
from vescale_pipe._plan import PipePlan
from vescale_pipe._runtime.losses import add_loss
from vescale_pipe._split import Port, Stage, StageGraph, manual
from vescale_pipe.errors import PipeError

mse = functional.mse_loss


def made(stages: list[nn.Module], inputs: Any = None, count: int = 3, loss_fn: Any = mse, **plan: Any) -> PipeEngine:
    """An engine that acts out one rank per stage, of stages by hand."""
    graph = manual(stages, inputs)
    return PipeEngine(graph, None, PipePlan(num_microbatches=count, **plan), loss_fn, act_out=len(stages))


def plain(
    forward: Callable[..., Any], rows: int, count: int, args: tuple[Any, ...], target: Tensor | None, loss_fn: Any = mse
) -> Tensor:
    """The loop on one device."""
    total = torch.zeros(())
    cut = [
        list(one.tensor_split(count)) if isinstance(one, Tensor) and one.dim() and len(one) == rows else [one] * count
        for one in args
    ]
    targets = [None] * count if target is None else list(target.tensor_split(count))
    for m in range(count):
        out = forward(*(one[m] for one in cut))
        loss = (loss_fn(out) if targets[m] is None else loss_fn(out, targets[m])) * (len(cut[0][m]) / rows)
        loss.backward()
        total = total + loss.detach()
    return total


def check(mine: list[nn.Module], theirs: list[nn.Module]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                assert torch.equal(p.grad, q.grad)


class Call(nn.Module):
    """A linear layer inside a function."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.function = function

    def forward(self, *values: Any) -> Any:
        return self.function(self.lin, *values)

    def __deepcopy__(self, memo: Any) -> Call:
        twin = Call(self.function)
        twin.load_state_dict(self.state_dict())
        return twin


class Box(NamedTuple):
    value: Tensor
    rest: Any


def through(first: Callable[..., Any], second: Callable[..., Any]) -> PipeEngine:
    """Check two stages whose one value between them is all that the first returns."""
    stages: list[nn.Module] = [Call(first), Call(second)]
    theirs = copy.deepcopy(stages)
    engine = made(stages, [[0], [(0, None)]])
    for rows in (7, 8):
        x, y = torch.randn(rows, 4), torch.randn(rows, 4)
        loss, _ = engine(x, target=y)
        assert torch.equal(loss, plain(lambda a: theirs[1](theirs[0](a)), rows, 3, (x,), y))
        check(stages, theirs)
    return engine


def test_containers_of_anything_between_stages() -> None:
    through(
        lambda lin, x: {"a": lin(x), "none": None, "more": [3, True, "text", (x, {})]},
        lambda lin, got: lin(got["a"]) * got["more"][0] + got["more"][3][0],
    )
    through(lambda lin, x: Box(lin(x), {"k": x * 2}), lambda lin, got: lin(got.value) + got.rest["k"])
    through(lambda lin, x: (lin(x), lin(x) * 2), lambda lin, got: lin(got[0]) + got[1])


def test_a_container_of_one_tensor_and_one_used_twice() -> None:
    through(lambda lin, x: {"a": lin(x)}, lambda lin, got: lin(got["a"]))

    def twice(lin: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        out = lin(x)
        return out, out

    through(twice, lambda lin, got: lin(got[0]) + got[1])


def test_none_ints_bools_and_indexes() -> None:
    stages: list[nn.Module] = [
        Call(lambda lin, x: (lin(x), None, 2, x.argmax(1), x > 0, torch.complex(x, x))),
        Call(lambda lin, x, none, two, index, mask, z: (lin(x) * two + z.real * mask)[index.argsort(stable=True)]),
    ]
    theirs = copy.deepcopy(stages)
    engine = made(stages, [[0], [(0, place) for place in range(6)]])
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    loss, _ = engine(x, target=y)
    assert torch.equal(loss, plain(lambda a: theirs[1](*theirs[0](a)), 7, 3, (x,), y))
    check(stages, theirs)


def test_outputs_of_other_strides() -> None:
    through(lambda lin, x: lin(x).t().contiguous().t(), lambda lin, x: lin(x))
    through(lambda lin, x: lin(x)[:, ::2], lambda lin, x: lin(torch.cat([x, x], 1)))
    through(lambda lin, x: lin(x).mean(1, keepdim=True).expand(-1, 4), lambda lin, x: lin(x))


def test_an_output_that_nobody_needs_a_gradient_of() -> None:
    through(lambda lin, x: (lin(x), lin(x).exp()), lambda lin, got: lin(got[0]))
    through(lambda lin, x: lin(x).detach(), lambda lin, x: lin(x))


def test_a_gradient_that_comes_for_some_micro_batches_only() -> None:
    def second(lin: nn.Module, x: Tensor) -> Tensor:
        return lin(x) if float(x.detach()[0, 0]) > 0 else lin(x.detach())

    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(second)]
    theirs = copy.deepcopy(stages)
    engine = made(stages, count=8)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    loss, _ = engine(x, target=y)
    assert torch.equal(loss, plain(lambda a: theirs[1](theirs[0](a)), 8, 8, (x,), y))
    check(stages, theirs)


def test_in_place_on_the_input_of_a_stage() -> None:
    through(lambda lin, x: lin(x), lambda lin, x: lin(x.mul_(2)))
    through(lambda lin, x: lin(x), lambda lin, x: lin(x.t_().t_().relu_()))
    through(lambda lin, x: {"a": lin(x)}, lambda lin, got: lin(got["a"].add_(1)))


def test_a_value_changed_in_place_goes_on_changed() -> None:
    """Stage 1 changes what stage 2 takes as well, as it would on one device."""
    stages: list[nn.Module] = [
        Call(lambda lin, x: lin(x)),
        Call(lambda lin, x: lin(x.mul_(2))),
        Call(lambda lin, x, first: lin(x) + first),
    ]
    theirs = copy.deepcopy(stages)
    engine = made(stages, [[0], [(0, None)], [(1, None), (0, None)]])
    x, y = torch.randn(7, 4), torch.randn(7, 4)

    def forward(a: Tensor) -> Tensor:
        first = theirs[0](a)
        return theirs[2](theirs[1](first), first)

    loss, _ = engine(x, target=y)
    assert torch.equal(loss, plain(forward, 7, 3, (x,), y))
    check(stages, theirs)


def test_no_forward_is_run_but_those_of_the_step() -> None:
    counts = [0, 0]

    def counting(number: int) -> Callable[..., Any]:
        def forward(lin: nn.Module, x: Tensor) -> Any:
            counts[number] += 1
            return lin(x)

        return forward

    engine = made([Call(counting(0)), Call(counting(1))])
    engine(torch.randn(6, 4), target=torch.randn(6, 4))
    assert counts == [3, 3]


def test_hooks_on_inputs_do_not_pile_up() -> None:
    calls = []

    def second(lin: nn.Module, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: calls.append(grad.shape))
        return lin(x)

    engine = made([Call(lambda lin, x: lin(x)), Call(second)])
    for step in range(1, 4):
        engine(torch.randn(6, 4), target=torch.randn(6, 4))
        assert len(calls) == 3 * step


def test_a_table_without_rows_goes_whole_to_each_micro_batch() -> None:
    table = torch.randn(5, 4)
    stages: list[nn.Module] = [Call(lambda lin, x, t: lin(x) + t.sum(0)), Call(lambda lin, x, t: lin(x) * t.mean())]
    theirs = copy.deepcopy(stages)
    engine = made(stages, [[0, "table"], [(0, None), "table"]])
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    loss, _ = engine(x, table=table, target=y)
    assert torch.equal(loss, plain(lambda a, t: theirs[1](theirs[0](a, t), t), 7, 3, (x, table), y))
    check(stages, theirs)
    with pytest.raises(PipeError, match="keyword argument 'table' is needed by a stage of this rank"):
        engine(x, target=y)
    with pytest.raises(PipeError, match="leaf 0 of argument 'table'"):
        engine(x, table=[], target=y)


def test_rows_can_be_told() -> None:
    """The first tensor is a table with rows of its own."""
    stages: list[nn.Module] = [Call(lambda lin, t, x: lin(x) + t.sum(0)), Call(lambda lin, x: lin(x))]
    theirs = copy.deepcopy(stages)
    engine = made(stages, [[0, 1], [(0, None)]])
    table, x, y = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 4)
    loss, outputs = engine(table, x, target=y, batch_size=7)
    assert torch.equal(loss, plain(lambda a, t: theirs[1](theirs[0](t, a)), 7, 3, (x, table), y))
    assert outputs.shape == (7, 4)


def test_the_result_keeps_its_structure() -> None:
    stages: list[nn.Module] = [
        Call(lambda lin, x: lin(x)),
        Call(lambda lin, x: {"rows": lin(x), "scalar": x.sum(), "other": torch.ones(2, 3), "name": "text"}),
    ]
    engine = made(stages, loss_fn=lambda out, y: mse(out["rows"], y))
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    _, outputs = engine(x, target=y)
    want = stages[1](stages[0](x))
    torch.testing.assert_close(outputs["rows"], want["rows"])
    assert outputs["scalar"].shape == (3,)
    assert [one.shape for one in outputs["other"]] == [(2, 3)] * 3
    assert outputs["name"] == "text"
    assert not outputs["rows"].requires_grad


@pytest.mark.parametrize("form", ["tensor", "dict", "object"])
def test_a_model_that_returns_its_own_loss(form: str) -> None:
    class Result(NamedTuple):
        loss: Tensor
        logits: Tensor

    def last(lin: nn.Module, x: Tensor) -> Any:
        out = lin(x)
        loss = out.square().mean()
        return {"tensor": loss, "dict": {"loss": loss, "logits": out}, "object": Result(loss, out)}[form]

    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(last)]
    theirs = copy.deepcopy(stages)
    engine = made(stages, loss_fn=None)
    x = torch.randn(7, 4)
    loss, outputs = engine(x)

    def own(out: Any) -> Tensor:
        return out if form == "tensor" else out["loss"] if form == "dict" else out.loss

    assert torch.equal(loss, plain(lambda a: own(theirs[1](theirs[0](a))), 7, 3, (x,), None, lambda out: out))
    check(stages, theirs)
    assert torch.equal(own(outputs), loss)  # that of the batch, as the model would give it
    evaluated, outputs = engine.eval_step(x)
    assert torch.equal(evaluated, loss)
    assert torch.equal(own(outputs), loss)


def test_losses_weighted_by_tokens_equal_the_whole_batch() -> None:
    """Rows have different numbers of labels that count; the loss of a micro-batch is the mean over those."""
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    theirs = copy.deepcopy(stages)
    labels = torch.randint(0, 4, (9,))
    labels[[0, 1, 2, 5]] = -100
    labels[3] = 1
    engine = made(stages, loss_fn=functional.cross_entropy, loss=lambda target: (target != -100).sum(), count=2)
    x = torch.randn(9, 4)
    loss, _ = engine(x, target=labels)
    valid = (labels != -100).sum()
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(2), labels.tensor_split(2), strict=True):
        part = functional.cross_entropy(theirs[1](theirs[0](a)), b) * (int((b != -100).sum()) / int(valid))
        part.backward()
        total = total + part.detach()
    assert torch.equal(loss, total)
    check(stages, theirs)
    torch.testing.assert_close(loss, functional.cross_entropy(theirs[1](theirs[0](x)), labels))
    with pytest.raises(PipeError, match="their sum must not be 0"):
        engine(x, target=torch.full((9,), -100))


def test_gradients_of_several_steps_add_up() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    theirs = copy.deepcopy(stages)
    engine = made(stages, loss="sum")
    for _ in range(3):
        x, y = torch.randn(7, 4), torch.randn(7, 4)
        engine(x, target=y)
        for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
            mse(theirs[1](theirs[0](a)), b).backward()
        check(stages, theirs)


def test_gradients_are_scaled_and_the_loss_is_not() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    theirs = copy.deepcopy(stages)
    engine = made(stages)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    scale = torch.tensor(1000.0)
    loss, _ = engine(x, target=y, grad_scale=scale)
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        part = mse(theirs[1](theirs[0](a)), b) * (len(a) / 7)
        (part * scale).backward()
        total = total + part.detach()
    assert torch.equal(loss, total)
    check(stages, theirs)


def test_stages_in_the_middle_add_losses() -> None:
    def adding(lin: nn.Module, x: Tensor) -> Tensor:
        out = lin(x)
        add_loss(out.square().mean())
        return out

    stages: list[nn.Module] = [Call(adding), Call(adding), Call(lambda lin, x: lin(x))]
    theirs = copy.deepcopy(stages)
    engine = made(stages, added_losses=True)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    loss, _ = engine(x, target=y)
    total = torch.zeros(())
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        first = theirs[0](a)
        second = theirs[1](first)
        part = mse(theirs[2](second), b) + first.square().mean() + second.square().mean()
        (part * (len(a) / 7)).backward()
        total = total + part.detach() * (len(a) / 7)
    assert torch.equal(loss, total)
    for one, want in zip(stages, theirs, strict=True):
        for p, q in zip(one.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    with pytest.raises(PipeError, match=r"stage 0: a module called add_loss; say PipePlan\(added_losses=True\)"):
        made(stages)(x, target=y)


def test_inputs_that_require_gradients_get_them() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    engine = made(stages)
    x, y = torch.randn(7, 4, requires_grad=True), torch.randn(7, 4)
    twin = x.detach().clone().requires_grad_()
    engine(x, target=y)
    plain(lambda a: stages[1](stages[0](a)), 7, 3, (twin,), y)
    assert torch.equal(x.grad, twin.grad)


def test_backwards_run_outside_of_autocast() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x).float())]
    theirs = copy.deepcopy(stages)
    seen = []
    stages[0].lin.weight.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))
    engine = made(stages)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        engine(x, target=y)
    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            part = mse(theirs[1](theirs[0](a)), b) * (len(a) / 7)
        part.backward()
    assert seen == [False] * 3
    check(stages, theirs)


def test_evaluation_makes_no_graphs_and_takes_any_number_of_micro_batches() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    engine = made(stages)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    whole = stages[1](stages[0](x)).detach()
    for count in (None, 1, 2, 7):
        loss, outputs = engine.eval_step(x, num_microbatches=count)
        assert loss is None
        torch.testing.assert_close(outputs, whole)
        loss, _ = engine.eval_step(x, target=y, num_microbatches=count)
        torch.testing.assert_close(loss, mse(whole, y))
    assert all(one.grad is None for one in engine.parameters())
    assert not engine.eval().train().eval()._graph.stages[0].module.training


def test_outputs_and_losses_on_demand() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    graph = manual(stages)
    engine = PipeEngine(
        graph, None, PipePlan(num_microbatches=3, keep_outputs=False), mse, act_out=2, loss_everywhere=False
    )
    loss, outputs = engine(x, target=y)
    assert outputs is None
    assert loss is None  # rank 0 answers here, and the last stage is on rank 1
    assert engine.eval_step(x)[1].shape == (7, 4)


def test_frozen_stages_and_no_gradient_at_all() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)).requires_grad_(False) for _ in range(2)]
    engine = made(stages)
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    loss, _ = engine(x, target=y)
    torch.testing.assert_close(loss, mse(stages[1](stages[0](x)), y))
    stages[0].requires_grad_(True)
    theirs = copy.deepcopy(stages)
    theirs[1].requires_grad_(False)
    engine(x, target=y)
    plain(lambda a: theirs[1](theirs[0](a)), 7, 3, (x,), y)
    check(stages, theirs)


def test_a_loss_that_is_none_is_told() -> None:
    stages: list[nn.Module] = [Call(lambda lin, x: lin(x)), Call(lambda lin, x: lin(x))]
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    with pytest.raises(PipeError, match=r"there is no loss_fn, and the model's own loss is a tensor of shape \(3, 4\)"):
        made(stages, loss_fn=None)(x)
    with pytest.raises(PipeError, match=r"loss_fn returned a tensor of shape \(3,\)"):
        made(stages, loss_fn=lambda out, y: out.sum(1))(x, target=y)
    with pytest.raises(PipeError, match="loss='median'"):
        made(stages, loss="median")


def test_a_stage_that_returns_no_tuple_is_told() -> None:
    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    stage = Stage(0, Bad(), (Port("batch", 0, 0),), 1, (True,))
    engine = PipeEngine(StageGraph((stage,), ()), None, PipePlan(num_microbatches=1), mse)
    with pytest.raises(PipeError, match="stage 0: its module returned a Tensor; it must return a tuple"):
        engine(torch.ones(2, 2), target=torch.ones(2, 2))


def test_the_loss_in_the_outputs_is_the_models_own_and_weighted() -> None:
    """Without what stages in the middle add; and where loss_fn takes it out of the outputs, as with its own weights."""

    def adding(lin: nn.Module, x: Tensor) -> Tensor:
        add_loss(x.square().mean())
        return lin(x)

    def last(lin: nn.Module, x: Tensor) -> dict[str, Tensor]:
        out = lin(x)
        return {"loss": out.square().mean(), "other": out.mean(), "out": out}

    x = torch.randn(7, 4)
    rows = (3, 2, 2)
    stages: list[nn.Module] = [Call(adding), Call(last)]
    own = sum(last(stages[1].lin, stages[0].lin(a))["loss"] * (n / 7) for a, n in zip(x.split(rows), rows, strict=True))
    engine = made(stages, loss_fn=None, added_losses=True)
    loss, outputs = engine(x)
    assert torch.equal(outputs["loss"], own.detach())
    assert loss > outputs["loss"]
    assert outputs["other"].shape == (3,)
    picked = made([Call(lambda lin, x: lin(x)), Call(last)], loss_fn=lambda out: out["loss"], loss=lambda target: 1)
    loss, outputs = picked(x)
    assert torch.equal(outputs["loss"], loss)
    without = made([Call(lambda lin, x: lin(x)), Call(last)], loss_fn=lambda out, y: mse(out["out"], y))
    _, outputs = without(x, target=x)
    assert outputs["loss"].shape == (3,)


def test_a_missing_target_and_one_too_many_are_told_before_anything_runs() -> None:
    calls: list[int] = []

    def watched(lin: nn.Module, x: Tensor) -> Tensor:
        calls.append(1)
        return lin(x)

    x = torch.randn(7, 4)
    for loss_fn in (mse, nn.MSELoss(), lambda out, target, *, weight=1: (out - target).mean()):
        engine = made([Call(watched), Call(lambda lin, x: lin(x))], loss_fn=loss_fn)
        with pytest.raises(PipeError, match=r"loss_fn \S+ takes outputs and a target, and the call has no target="):
            engine(x)
    engine = made([Call(watched), Call(lambda lin, x: lin(x))], loss_fn=lambda out: out.mean())
    with pytest.raises(PipeError, match=r"loss_fn <lambda> takes the outputs only, and the call has target="):
        engine(x, target=x)
    engine = PipeEngine(nn.Linear(4, 4), None, PipePlan(num_microbatches=2), mse)
    with pytest.raises(PipeError, match="mse_loss takes outputs and a target"):
        engine(x)
    assert not calls
    assert engine.eval_step(x)[0] is None
    # Losses that do not say what they take, and those that take either, are called.
    assert made([Call(lambda lin, x: lin(x))], loss_fn=lambda out, target=None: out.mean())(x)[0] is not None
