"""What vescale_dtensor asks plugins.

Write a plugin with `pluggy.HookimplMarker("vescale_dtensor")` and an entry point in the group `vescale`:
docs/plugins.md has an example. Specs and implementations take positional arguments without defaults;
an implementation may leave out arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pluggy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

hookspec = pluggy.HookspecMarker("vescale_dtensor")


class Box(Protocol):
    """Elements of the whole tensor: those with `offset[d] <= i[d] < offset[d] + shape[d]` in every dim d."""

    @property
    def offset(self) -> tuple[int, ...]:
        """First element of the box, one number per dim."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements per dim; 0 in some dim for an empty box."""


class RandomProvider(Protocol):
    """Draws the local part of what one device would have drawn for the whole tensor.

    A random operator on a sharded tensor becomes: allocate the local result, one call of `fill`, and
    whatever the operator does with its draws (scaling a dropout mask, for instance) on local tensors.
    `fill` never communicates and never records gradients.
    """

    def scope(self, op: str) -> Literal["local", "global"]:
        """Tell whether `op` can be drawn box by box, or only for the whole tensor.

        Called once per operator name; the answer is kept. `"local"`: where the draws of an element stand in
        the stream follows from shapes alone (rand, normal_, bernoulli_, dropout, randint, exponential_ ...).
        `"global"`: the number of draws depends on the data, or the result is no elementwise draw (poisson,
        binomial, multinomial, randperm, rrelu ...). For these the host gathers the tensor arguments, passes a
        tensor and one box for the whole result, and keeps its slice.

        Args:
            op: as for `fill`.

        Raises:
            NotImplementedError: if `op` is not covered; the text names it. Nothing is drawn locally instead.
        """

    def fill(
        self,
        op: str,
        local: torch.Tensor,
        global_shape: tuple[int, ...],
        global_stride: tuple[int, ...],
        boxes: Sequence[Box],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Fill `local` with the elements of `boxes` and advance the generator as one device would.

        Called exactly once per random operator by every rank of the mesh, also where `local` is empty: the
        generator must move everywhere. Afterwards it is in the state that one device would leave it in.

        Args:
            op: the aten base name, without overload, of the operator that one device would run: "rand",
                "randn", "randint", "uniform_", "normal_", "bernoulli_", "exponential_", "multinomial" ...
                The `_like` forms are passed under their own names ("rand_like"). "dropout" asks for the keep
                mask: ones and zeros in the dtype of the input, `args == (p,)` with p the chance of a zero.
            local: contiguous tensor that is overwritten in place, its elements in the order of `boxes`.
                Its dtype and device are those of the draw. For the scope "global" it is the whole result.
            global_shape: shape of the whole tensor.
            global_stride: strides that one device would give it; they decide the order of the draws.
            boxes: the local elements in global coordinates. Replicas pass the same boxes.
            args: positional arguments of the operator without the tensor to fill and without sizes: the
                parameters of the distribution, `(low, high)` for randint, `(mean, std)` for normal_.
                Tensors among them are local parts, sharded like `local` and of its shape; whole tensors for
                the scope "global".
            kwargs: the named parameters of the distribution, and `generator` where the user gave one. Without
                one, the default generator of the device of `local` is used.
        """


class PreparingProvider(RandomProvider, Protocol):
    """A provider that works out a draw once, for many calls. `prepare` is optional: a host that finds none fills."""

    def prepare(
        self,
        op: str,
        local: torch.Tensor,
        global_shape: tuple[int, ...],
        global_stride: tuple[int, ...],
        boxes: Sequence[Box],
    ) -> Callable[[torch.Tensor, tuple[Any, ...], Mapping[str, Any]], None]:
        """Return a function `(local, args, kwargs)` that does what `fill` does for one operator and one layout.

        Called once per operator of the scope "local", layout, dtype and device; the answer is kept and called for
        every draw, with tensors like `local`. What changes from call to call, such as the generator or a mode of
        the provider, is looked up by the function. It draws nothing itself.

        Args:
            op: as for `fill`.
            local: tensor of the shape, the strides (any), the dtype and the device of those to come.
            global_shape: as for `fill`.
            global_stride: as for `fill`.
            boxes: as for `fill`; if there is one box, `local` has its shape.
        """


class OpRegistry(Protocol):
    """Takes sharding rules for operators that vescale_dtensor does not know."""

    def register(self, fn: Callable[..., Any], rule: Callable[..., Any]) -> None:
        """Add a rule; `vescale_dtensor.register_op` says what a rule gets and returns.

        Args:
            fn: what the user calls: a `torch.ops` operator, a function, or `autograd.Function.apply`.
            rule: the sharding rule.
        """


class PlanRegistry(Protocol):
    """Takes named parallel plans, for `parallelize_module(module, mesh, "name")`."""

    def register(self, name: str, plan: Mapping[str, Any]) -> None:
        """Add a plan under a name that is not taken yet.

        Args:
            name: what the user writes in place of a plan.
            plan: the plan: a mapping with the keys "parameter" and "forward".
        """


class Waitable(Protocol):
    """A communication in flight."""

    def wait(self) -> None:
        """Return once the result may be read; on a GPU, once the current stream waits for it."""


class Collectives(Protocol):
    """Collectives over one or several mesh axes at once, on one or several tensors in one message.

    Every rank of the mesh calls them in the same order, with lists of the same lengths and dtypes. `axes` are
    indices of mesh axes; several of them count as one flat group, the first varying slowest.
    """

    def all_reduce(self, tensors: Sequence[torch.Tensor], mesh: DeviceMesh, axes: tuple[int, ...], op: str) -> Waitable:
        """Reduce in place; `op` is "sum", "avg", "min", "max" or "product"."""

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        axes: tuple[int, ...],
    ) -> Waitable:
        """Put the inputs of all ranks, along dim 0 in rank order, into the outputs."""

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        axes: tuple[int, ...],
        op: str,
    ) -> Waitable:
        """Reduce the inputs and leave each rank its even share along dim 0."""

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        mesh: DeviceMesh,
        axes: tuple[int, ...],
    ) -> Waitable:
        """Send the i-th even share of each input along dim 0 to the i-th rank."""


class Timeline(Protocol):
    """Records spans of time; spans may overlap, since communication is asynchronous."""

    def begin(self, category: str, name: str) -> object:
        """Open a span and return a token for `end`; called on the thread that starts the work."""

    def end(self, token: object) -> None:
        """Close the span of `token`; may be called on another thread."""


@hookspec(firstresult=True)
def vescale_random() -> RandomProvider | None:
    """Hand out the object that draws random numbers for sharded tensors.

    Called once, at the first random operator on a sharded tensor; the answer is kept. Without a provider,
    each shard draws from a stream of its own: reproducible, but not the numbers of one device.

    Returns:
        The provider, or None to decline.
    """


@hookspec
def vescale_register_ops(registry: OpRegistry) -> None:
    """Add sharding rules for custom operators.

    Called once, before the first operator on a DTensor.

    Args:
        registry: where to register; a rule that exists already cannot be replaced.
    """


@hookspec
def vescale_register_plans(registry: PlanRegistry) -> None:
    """Add named parallel plans.

    Called once, when a plan is first asked for by name.

    Args:
        registry: where to register; a name that is taken is an error.
    """


@hookspec(firstresult=True)
def vescale_collectives() -> Collectives | None:
    """Hand out the object that communicates.

    Called once, at the first communication; the answer is kept. Without a provider, torch.distributed's
    functional collectives are used, one tensor per message.

    Returns:
        The collectives, or None to decline.
    """


@hookspec(firstresult=True)
def vescale_timeline() -> Timeline | None:
    """Hand out the recorder of spans.

    Called once, at the first operation that could be recorded; the answer is kept.

    Returns:
        The recorder, which tells by itself whether it records; None: this plugin has none.
    """
