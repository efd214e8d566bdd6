"""Random operators of a construction that is written down: where they stand in the stream of one device.

While the model is constructed, each random operator keeps the state of its generator, and the generator moves on as
if it had drawn, so that numbers drawn after it are those of one device too. Its own numbers are drawn later, from
the state that was kept, by a generator of their own: in any order, as often as needed, and only where a value
depends on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _random
from .._spec import Spec, contiguous_stride
from ..errors import UnsupportedOperationError
from .tape import Node, base_name

_FACTORIES = frozenset("rand randn randint".split())


class _Box(NamedTuple):
    offset: tuple[int, ...]
    """First element."""
    shape: tuple[int, ...]
    """Number of elements per dim."""


def is_random(func: Any) -> bool:
    """Whether an aten overload draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def generator_of(kwargs: dict[str, Any], device: torch.device) -> torch.Generator:
    """The generator that an operator draws with."""
    return kwargs.get("generator") or _random.default_generator(device)


def advance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], drawn: Tensor, device: torch.device) -> bool:
    """Move the generator as if the operator had drawn the elements of the meta tensor `drawn`.

    Returns:
        Whether that was possible without drawing; if not, the caller draws the whole once.
    """
    generator = generator_of(kwargs, device)
    if _random.state.mode == "whole":
        return False
    provider = _random.provider()
    if provider is None:
        _random.draw_seed(generator)
        return True
    described = distribution(func, args, kwargs)
    if described is None:
        return False
    op, parameters = described
    try:
        if provider.scope(op) != "local":
            return False
    except NotImplementedError:
        return False
    shape, stride = tuple(drawn.shape), tuple(drawn.stride())
    if stride != contiguous_stride(shape):
        return False
    held = (0,) * len(shape)  # no element of it; a tensor without dims has its one
    local = torch.empty(held, dtype=drawn.dtype, device=device)
    provider.fill(op, local, shape, stride, [_Box((0,) * len(shape), held)], parameters, {"generator": generator})
    return True


def distribution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Name of the operator and parameters of its distribution, as `_random.fill` takes them; None for other kinds."""
    name = base_name(func)
    if name in ("rand", "randn"):
        return name, ()
    if name == "randint":
        return name, tuple(args[:2] if func._overloadname.startswith("low") else (0, args[0]))
    if not name.endswith("_") or name == "dropout_":
        return None
    named = [a.name for a in func._schema.arguments[1:] if a.name != "generator"]
    parameters = (*args[1:], *[kwargs[n] for n in named[len(args) - 1 :] if n in kwargs])
    if not all(isinstance(p, int | float | None) for p in parameters):
        return None
    return name, parameters


def fill(node: Node, local: Tensor, spec: Spec) -> bool:
    """Draw this rank's elements of what a node drew; False where it can be drawn only whole."""
    described = distribution(node.func, node.args, node.kwargs)
    if described is None:
        return False
    op, parameters = described
    assert node.state is not None
    generator = torch.Generator(local.device)
    generator.set_state(node.state)
    _random.fill(op, local, spec, parameters, {"generator": generator}, contiguous=True)
    return True


def run_whole(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> Any:
    """Run a random operator on real tensors at the state that was kept; the user's generators do not notice."""
    assert node.state is not None
    if kwargs.get("generator") is not None:
        own = torch.Generator(device)
        own.set_state(node.state)
        return node.run(args, {**kwargs, "generator": own})
    generator = _random.default_generator(device)
    before = generator.get_state()
    generator.set_state(node.state)
    try:
        return node.run(args, kwargs)
    finally:
        generator.set_state(before)


def require_one_stream(node: Node) -> None:
    """Raise if the numbers of a node are not those of one device, where a decision depends on them."""
    if _random.state.mode == "shard" and _random.provider() is None:
        raise UnsupportedOperationError(
            f"the construction of a deferred module reads numbers that {node.name} drew, as nn.init.trunc_normal_ does "
            "to draw again what lies outside. Without vescale-rng, each shard draws numbers of its own, which are not "
            'known yet. Install vescale-rng, or use random_mode("whole") around the construction and parallelize_module'
        )
