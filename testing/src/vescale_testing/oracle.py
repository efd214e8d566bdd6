"""Compare an operation on DTensors with the same operation on one device.

`check_op` is what tests of sharding rules call: it distributes the tensor arguments, runs the
function both ways, and compares results, dtypes, shapes and gradients under a random cotangent.
It must be called by every rank of the mesh.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

Codes = str
"""Placements of one tensor, one code per mesh axis: ``"S0 I"``, ``"R P"`` (I replicated, R varying, P pending sum),
``"N1/3 G2/4.0"`` (dim 1 in 3 interleaved blocks; 2 leading dims flattened and cut raggedly, 4 to 0)."""


def placements(codes: Codes) -> list[Any]:
    """Translate ``"S0 R P I"`` into placements."""
    return [_placement(c) for c in codes.split()]


def _placement(code: str) -> Any:
    from vescale_dtensor.placements import InterleavedShard, Partial, RaggedShard, Replicate, Shard, Varying

    simple = {"I": Replicate, "R": Varying, "P": Partial}
    if code in simple:
        return simple[code]()
    first, _, rest = code[1:].partition("/")
    if code[0] == "G":
        return RaggedShard(tuple(range(int(first))), tuple(map(int, rest.split("."))))
    return InterleavedShard(int(first), int(rest)) if code[0] == "N" else Shard(int(first))


def all_codes(ndim: int, mesh_ndim: int, *, partial: bool = False) -> list[Codes]:
    """Every combination of codes for a tensor of `ndim` dims."""
    single = [f"S{d}" for d in range(ndim)] + ["I", "R"] + (["P"] if partial else [])
    return [" ".join(c) for c in itertools.product(single, repeat=mesh_ndim)]


def random_codes(
    tensors: Sequence[Tensor], mesh_ndim: int, *, seed: int, count: int, partial: bool = True
) -> Iterator[list[Codes]]:
    """`count` random placements for a list of tensors, the same on every rank."""
    rng = random.Random(seed)
    for _ in range(count):
        yield [rng.choice(all_codes(t.ndim, mesh_ndim, partial=partial and t.is_floating_point())) for t in tensors]


def check_op(
    fn: Callable[..., Any],
    args: Sequence[Any],
    codes: Iterable[Codes],
    mesh: DeviceMesh,
    *,
    kwargs: dict[str, Any] | None = None,
    grad: bool = True,
    rtol: float = 1e-10,
    atol: float = 1e-10,
) -> Any:
    """Run `fn` on one device and distributed, and compare.

    Args:
        fn: function of the tensors.
        args: positional arguments; tensors anywhere inside are distributed, in pytree order.
        codes: placements of each tensor of `args` and `kwargs`, in order.
        mesh: mesh to distribute on.
        kwargs: keyword arguments.
        grad: compare gradients of the floating-point tensors too.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Returns:
        The distributed result, for further checks.
    """
    from vescale_dtensor import DTensor, distribute_tensor

    leaves, tree = tree_flatten((tuple(args), kwargs or {}))
    code_of = iter(codes)
    plain, ours = [], []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            plain.append(leaf)
            ours.append(leaf)
            continue
        wants = grad and (leaf.is_floating_point() or leaf.is_complex())
        plain.append(leaf.detach().clone().requires_grad_(wants))
        ours.append(distribute_tensor(leaf.detach(), mesh, placements(next(code_of))).requires_grad_(wants))
    described = [f"{tuple(o.shape)}:{o.placements}" for o in ours if isinstance(o, DTensor)]
    a, k = torch.utils._pytree.tree_unflatten(plain, tree)
    expected = fn(*a, **k)
    a, k = torch.utils._pytree.tree_unflatten(ours, tree)
    actual = fn(*a, **k)
    try:
        compare(actual, expected, rtol=rtol, atol=atol)
        if grad:
            compare_gradients(plain, ours, expected, actual, rtol=rtol, atol=atol)
    except AssertionError as error:
        raise AssertionError(f"{getattr(fn, '__name__', fn)} on {described}: {error}") from None
    return actual


def compare(
    actual: Any, expected: Any, *, rtol: float = 1e-10, atol: float = 1e-10, requires_grad: bool = True
) -> None:
    """Compare nested distributed results with nested plain ones: values, shapes, dtypes, `requires_grad`."""
    from vescale_dtensor import DTensor

    got, want = tree_flatten(actual)[0], tree_flatten(expected)[0]
    assert len(got) == len(want), f"{len(got)} results, expected {len(want)}"
    for g, w in zip(got, want, strict=True):
        if not isinstance(w, Tensor):
            assert g == w or (g != g and w != w), f"{g!r}, expected {w!r}"
            continue
        assert isinstance(g, DTensor), f"result is {type(g).__name__}, expected a DTensor"
        assert g.shape == w.shape, f"shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        assert g.dtype == w.dtype, f"dtype {g.dtype}, expected {w.dtype}"
        if requires_grad:
            assert g.requires_grad == w.requires_grad, f"requires_grad {g.requires_grad}, expected {w.requires_grad}"
        assert tuple(g.to_local().shape) == tuple(g.local_shape), (
            f"local part {tuple(g.to_local().shape)}: {g.local_shape}"
        )
        torch.testing.assert_close(_whole(g), w.detach(), rtol=rtol, atol=atol, equal_nan=True)


def compare_gradients(
    plain: Sequence[Any],
    ours: Sequence[Any],
    expected: Any,
    actual: Any,
    *,
    rtol: float = 1e-10,
    atol: float = 1e-10,
) -> None:
    """Compare the gradients of inputs under a random cotangent of the results.

    Args:
        plain: arguments of the run on one device, flat.
        ours: the same arguments, distributed.
        expected: results on one device.
        actual: distributed results.
        rtol: relative tolerance.
        atol: absolute tolerance.
    """
    pairs = [
        (w, g)
        for w, g in zip(tree_flatten(expected)[0], tree_flatten(actual)[0], strict=True)
        if isinstance(w, Tensor) and w.requires_grad
    ]
    if not pairs:
        return
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(w.shape, dtype=w.dtype, generator=generator) for w, _ in pairs]
    inputs = [t for t in plain if isinstance(t, Tensor) and t.requires_grad]
    ours_inputs = [t for t in ours if isinstance(t, Tensor) and t.requires_grad]
    try:
        want = torch.autograd.grad([w for w, _ in pairs], inputs, cotangents, allow_unused=True)
    except RuntimeError:
        return  # one device has no gradient here either
    assert all(g.requires_grad for _, g in pairs), "the result has no gradient"
    got = torch.autograd.grad([g for _, g in pairs], ours_inputs, cotangents, allow_unused=True)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if w is None or g is None:
            assert g is None or not _whole(g).any(), f"gradient {i} is {g}, expected none"
            assert w is None or not w.any(), f"gradient {i} is missing"
            continue
        assert g.shape == w.shape, f"gradient {i}: shape {tuple(g.shape)}, expected {tuple(w.shape)}"
        try:
            torch.testing.assert_close(_whole(g), w, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(
                f"gradient of tensor {i} ({getattr(ours_inputs[i], 'placements', None)}): {error}"
            ) from None


def _whole(distributed: Any) -> Tensor:
    """The whole of a DTensor, out of the graph."""
    whole: Tensor = distributed.detach().full_tensor()
    return whole


__all__ = ["all_codes", "check_op", "compare", "compare_gradients", "placements", "random_codes"]
