"""Custom `autograd.Function`s with DTensor arguments against the same Functions on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from vescale_dtensor import DTensor, Shard, distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements, random_codes


class SquareTimes(Function):
    """Saves inputs, a non-tensor attribute, and uses needs_input_grad."""

    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, scale: float = 1.0) -> Any:
        ctx.save_for_backward(x, w)
        ctx.scale, ctx.shape = scale, x.shape
        return (x * x) @ w * scale

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, w = ctx.saved_tensors
        assert x.shape == ctx.shape
        assert type(grad) is type(x)
        gx = (grad @ w.t()) * 2 * x * ctx.scale if ctx.needs_input_grad[0] else None
        gw = (x * x).t() @ grad * ctx.scale if ctx.needs_input_grad[1] else None
        return gx, gw, None


class ExpSetup(Function):
    """The setup_context style; saves an output; several results, one of them not differentiable."""

    @staticmethod
    def forward(x: Any) -> Any:
        y = x.exp()
        return y, x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y


class Identity(Function):
    """Returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 3


class Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


class Unmaterialized(Function):
    """Two outputs of which one is not used: its gradient is None."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        assert second is None
        return first * 2


class Vjp(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 5

    @staticmethod
    def vjp(ctx: Any, grad: Any) -> Any:
        return grad * 5


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2


CASES = {
    "saved-inputs": (lambda x, w: SquareTimes.apply(x, w), [(8, 6), (6, 5)]),
    "non-tensor-argument": (lambda x, w: SquareTimes.apply(x, w, 2.0), [(8, 6), (6, 5)]),
    "uneven": (lambda x, w: SquareTimes.apply(x, w), [(7, 3), (3, 5)]),
    "setup-context": (lambda x: ExpSetup.apply(x)[0], [(8, 6)]),
    "identity": (Identity.apply, [(8, 6)]),
    "once": (Once.apply, [(5, 6)]),
    "unmaterialized": (lambda x: Unmaterialized.apply(x)[0], [(8, 6)]),
    "materialized": (lambda x: ExpSetup.apply(Identity.apply(x))[0], [(8, 6)]),
    "vjp": (Vjp.apply, [(8, 6)]),
    "in-place": (lambda x: InPlace.apply(x * 1), [(8, 6)]),
    "nested": (lambda x, w: Once.apply(SquareTimes.apply(Identity.apply(x), w)), [(8, 6), (6, 5)]),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_custom_function_equals_one_device(case: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes = CASES[case]
    mesh = cached_mesh(*mesh_shape)
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    with implicit_communication("allow"):
        for codes in random_codes(args, len(mesh_shape), seed=len(case), count=12):
            check_op(fn, args, codes, mesh)


def _pair(codes: str, shape: tuple[int, ...] = (8, 6), seed: int = 0) -> tuple[Any, Any]:
    mesh = cached_mesh(2, 2)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.clone().requires_grad_(), distribute_tensor(x, mesh, placements(codes)).requires_grad_()


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("codes", ["S0 I", "I I", "R S1", "R R"])
def test_double_backward_through_saved_output(codes: str) -> None:
    class Exp(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.saved_tensors[0]

    results = []
    with implicit_communication("allow"):
        for x in _pair(codes):
            (g,) = torch.autograd.grad((Exp.apply(x) * 0.5).sum(), x, create_graph=True)
            (g * g).sum().backward()
            results.append(x.grad)
        torch.testing.assert_close(results[1].full_tensor(), results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
def test_once_differentiable_refuses_a_second_derivative() -> None:
    _, x = _pair("S0 I")
    with implicit_communication("allow"):
        (g,) = torch.autograd.grad(Once.apply(x).pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()


@pytest.mark.ranks(4, pool=True)
def test_saved_tensors_survive_saved_tensor_hooks() -> None:
    results = []
    with implicit_communication("allow"):
        for x in _pair("S0 S1"):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
                y = ExpSetup.apply(x * 2)[0].sum()
            y.backward()
            results.append(x.grad)
        torch.testing.assert_close(results[1].full_tensor(), results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(4, pool=True)
def test_plain_tensors_pass_through_and_the_class_keeps_its_name() -> None:
    x = torch.randn(3, requires_grad=True)
    y = Identity.apply(x)
    assert type(y) is torch.Tensor
    assert type(y.grad_fn).__name__ == "IdentityBackward"
    _, d = _pair("S0 I")
    z = Identity.apply(d)
    assert isinstance(z, DTensor)
    assert type(z.grad_fn).__name__ == "IdentityBackward"


@pytest.mark.ranks(4, pool=True)
def test_dtensors_made_of_plain_tensors_are_refused() -> None:
    mesh = cached_mesh(4)

    class Place(Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return distribute_tensor(x, mesh, [Shard(0)]) * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2  # of this rank's part

    x = torch.randn(8, 2, requires_grad=True)
    with pytest.raises(UnsupportedOperationError, match=r"Place.apply made a DTensor of plain tensors"):
        Place.apply(x)
    place = lambda x: distribute_tensor(x, mesh, [Shard(0)]) * 2  # noqa: E731
    with pytest.raises(UnsupportedOperationError, match="pass use_reentrant=False to torch"):
        checkpoint(place, x, use_reentrant=True)
    assert Place.apply(x.detach()).shape == (8, 2), "without gradients nothing is lost"
