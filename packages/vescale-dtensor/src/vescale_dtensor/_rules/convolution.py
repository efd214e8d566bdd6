"""Convolutions, pooling and resampling: batch and channels may be sharded, positions are not.

Shapes come from a run of the function on the meta device, once per kind of call.
"""

from __future__ import annotations

from torch import Tensor

from .._dispatch.call import Call, Rewrite, Rule, Strategy
from .._dispatch.entry import RuleFunction
from .._dispatch.table import keyed
from .._spec import Spec
from ..placements import P, R
from ._batched import meta_shapes

_CONV = "input weight bias stride padding dilation groups"
_TRANSPOSED = "input weight bias stride padding output_padding groups dilation"


def convolution_rule(dims: int, transposed: bool) -> RuleFunction:
    """Rule of a convolution over `dims` positions."""
    names = _TRANSPOSED if transposed else _CONV

    def rule(call: Call) -> Rule | None:
        bound = call.bind(names, groups=1)
        order = names.split()
        given = [path[0] if isinstance(path[0], str) else order[path[0]] for path in call.paths]
        if given not in (order[:2], order[:3]):
            return None
        has_bias, batched = len(given) == 3, call.ndim == dims + 2
        channel = 1 if batched else 0
        strategies = []
        if batched:
            strategies.append(Strategy((0, R, *(R,) * has_bias), (0,)))
        if bound["groups"] == 1:
            into, out_of = (0, 1) if transposed else (1, 0)  # dims of the weight
            # Sharding what is summed over or produced leaves no channels on some ranks unless it is even.
            strategies.append(Strategy((R, out_of, *(0,) * has_bias), (channel,), ((1, out_of),)))
            strategies.append(Strategy((channel, into, *(P,) * has_bias), (P,), ((0, channel), (1, into))))
        if not has_bias:
            strategies += [Strategy((P, R), (P,), exact=True), Strategy((R, P), (P,), exact=True)]
        return Rule(meta_shapes(call), strategies)

    return rule


def leading_rule(trailing: int, *, linear: bool = False, channels: bool = True) -> RuleFunction:
    """Rule of a function that treats everything but the last dims of its argument alike.

    Args:
        trailing: number of last dims that stay whole.
        linear: keeps a pending sum pending.
        channels: whether the dim before those is channels, of which torch wants some on every rank.
    """

    def rule(call: Call) -> Rule | None:
        if len(call.specs) != 1:
            return None
        shapes = meta_shapes(call)
        ndim = call.ndim
        strategies = []
        for dim in range(ndim - trailing):
            batch = not channels or (dim == 0 and ndim > trailing + 1)
            even = () if batch else ((0, dim),)
            strategies.append(Strategy((dim,), (dim,) * len(shapes), even))
        if linear:
            strategies.append(Strategy((P,), (P,) * len(shapes), exact=True))
        return Rule(shapes, strategies, None if channels else _reshape_nothing)

    return rule


def _reshape_nothing(ins: list[Spec], outs: list[Spec]) -> Rewrite | None:
    """Torch's pixel shuffles return a tensor without elements as it is, in the wrong shape."""
    return Rewrite(Tensor.reshape, (outs[0].local_shape,)) if 0 in outs[0].local_shape else None


def batch_rule(batched: int, num: int = 1, *, linear: bool = False) -> RuleFunction:
    """Rule of a function of `num` tensors of `batched` dims that share their batch dim 0 and nothing else."""

    def rule(call: Call) -> Rule | None:
        if len(call.specs) != num or call.ndim != batched:
            return None
        if any(not s.ndim or s.shape[0] != call.shape[0] for s in call.specs):
            return None
        shapes = meta_shapes(call)
        strategies = [Strategy((0,) * num, (0,) * len(shapes))]
        if linear:
            strategies.append(Strategy((P,) * num, (P,) * len(shapes), exact=True))
        return Rule(shapes, strategies)

    return rule


def affine_grid_rule(call: Call) -> Rule | None:
    """`affine_grid_generator(theta, size, align_corners)`: the size names the batch once more."""
    bound = call.bind("theta size align_corners", align_corners=False)
    if len(call.specs) != 1 or call.ndim != 3 or bound["size"][0] != call.shape[0]:
        return None

    def localize(ins: list[Spec], outs: list[Spec]) -> Rewrite:
        return Rewrite(call.func, ([ins[0].local_shape[0], *bound["size"][1:]], bound["align_corners"]))

    return Rule(meta_shapes(call), [Strategy((0,), (0,)), Strategy((P,), (P,), exact=True)], localize)


for _dims in (1, 2, 3):
    keyed(f"conv{_dims}d", convolution_rule(_dims, transposed=False), inplace=False)
    keyed(f"conv_transpose{_dims}d", convolution_rule(_dims, transposed=True), inplace=False)

    _maximum = f"max_pool{_dims}d max_pool{_dims}d_with_indices adaptive_max_pool{_dims}d"
    _average = f"avg_pool{_dims}d adaptive_avg_pool{_dims}d"
    for _names, _linear in ((_maximum, False), (_average, True)):
        for _name in _names.split():
            for _space in ("torch", "_nn"):
                keyed(f"{_space}.{_name}", leading_rule(_dims, linear=_linear), inplace=False)

keyed(
    "_nn.upsample_nearest1d _nn._upsample_nearest_exact1d _nn.upsample_linear1d",
    leading_rule(1, linear=True),
    inplace=False,
)
keyed(
    "_nn.upsample_nearest2d _nn._upsample_nearest_exact2d _nn.upsample_bilinear2d _nn.upsample_bicubic2d "
    "_nn._upsample_bilinear2d_aa _nn._upsample_bicubic2d_aa",
    leading_rule(2, linear=True),
    inplace=False,
)
keyed(
    "_nn.upsample_nearest3d _nn._upsample_nearest_exact3d _nn.upsample_trilinear3d",
    leading_rule(3, linear=True),
    inplace=False,
)
keyed("pixel_shuffle pixel_unshuffle", leading_rule(3, linear=True, channels=False), inplace=False)
keyed("channel_shuffle native_channel_shuffle", batch_rule(4, linear=True), inplace=False)
keyed("_nn.im2col", batch_rule(4, linear=True), inplace=False)
keyed("_nn.col2im", batch_rule(3, linear=True), inplace=False)
keyed("affine_grid_generator", affine_grid_rule, inplace=False)
keyed("grid_sampler grid_sampler_2d", batch_rule(4, 2), inplace=False)
keyed("grid_sampler_3d", batch_rule(5, 2), inplace=False)

__all__ = ["batch_rule", "convolution_rule", "leading_rule"]
