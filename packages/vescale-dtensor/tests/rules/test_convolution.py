"""Convolutions, pooling and resampling against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import Partial, Shard
from vescale_dtensor._dispatch.policy import implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes

CONVOLUTIONS: dict[str, tuple[Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "conv1d": (F.conv1d, [(3, 4, 6), (8, 4, 3), (8,)], {"padding": 1}),
    "conv1d-unbatched": (F.conv1d, [(4, 6), (8, 4, 3), (8,)], {}),
    "conv2d": (F.conv2d, [(3, 4, 5, 6), (8, 4, 3, 3)], {"stride": 2, "padding": 1}),
    "conv2d-bias": (F.conv2d, [(3, 4, 5, 6), (8, 4, 3, 3), (8,)], {"padding": "same"}),
    "conv2d-groups": (F.conv2d, [(3, 4, 5, 6), (8, 2, 3, 3), (8,)], {"groups": 2}),
    "conv2d-uneven": (F.conv2d, [(3, 3, 5, 6), (5, 3, 3, 3), (5,)], {}),
    "conv3d": (F.conv3d, [(3, 4, 4, 4, 4), (4, 4, 2, 2, 2), (4,)], {"dilation": 2}),
    "conv_transpose1d": (F.conv_transpose1d, [(3, 4, 6), (4, 8, 3), (8,)], {"stride": 2}),
    "conv_transpose2d": (F.conv_transpose2d, [(3, 4, 5, 6), (4, 8, 3, 3)], {"stride": 2, "output_padding": 1}),
    "conv_transpose2d-groups": (F.conv_transpose2d, [(3, 4, 5, 6), (4, 4, 3, 3), (8,)], {"groups": 2}),
}

IMAGES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (3, 4, 6)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (3, 4, 6, 6)),
    "max_pool2d-indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (3, 4, 6, 6)),
    "max_pool2d-unbatched": (lambda x: F.max_pool2d(x, 2), (4, 6, 6)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (3, 4, 4, 4, 4)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), (3, 4, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), (3, 4, 6, 6)),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), (3, 4, 4, 4, 4)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 2), (3, 4, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (1, 1)), (3, 4, 6, 6)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 3), (3, 4, 6, 6)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), (3, 4, 6, 6)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (3, 4, 3, 3)),
    "bilinear": (lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"), (3, 4, 3, 3)),
    "bicubic": (lambda x: F.interpolate(x, size=5, mode="bicubic", align_corners=True), (3, 4, 3, 3)),
    "linear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"), (3, 4, 6)),
    "trilinear": (lambda x: F.interpolate(x, size=3, mode="trilinear"), (3, 4, 2, 2, 2)),
    "unfold": (lambda x: F.unfold(x, 2), (3, 4, 4, 4)),
    "fold": (lambda x: F.fold(x, (4, 4), 2), (3, 16, 9)),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), (3, 8, 3, 3)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), (3, 2, 4, 4)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), (3, 4, 2, 2)),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_equals_one_device(name: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shapes, kwargs = CONVOLUTIONS[name]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    for codes in random_codes(args, len(mesh_shape), seed=len(name), count=10):
        with implicit_communication("allow"):
            check_op(fn, args, codes, cached_mesh(*mesh_shape), kwargs=kwargs)


@pytest.mark.ranks(4, pool=True)
def test_batch_and_channels_run_distributed() -> None:
    mesh = cached_mesh(2, 2)
    args = [torch.ones(s, dtype=torch.float64).cumsum(-1) / 7 for s in ((3, 4, 5, 6), (8, 4, 3, 3), (8,))]
    with implicit_communication("error"):
        out = check_op(F.conv2d, args, ["S0 I", "I S0", "I S0"], mesh)
        assert out.placements == (Shard(0), Shard(1))
        out = check_op(F.conv2d, args, ["S0 S1", "I S1", "I I"], mesh)
        assert out.placements == (Shard(0), Partial())


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", IMAGES)
def test_image_functions_equal_one_device(name: str, mesh_shape: tuple[int, ...]) -> None:
    fn, shape = IMAGES[name]
    mesh = cached_mesh(*mesh_shape)
    args = [torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    for codes in random_codes(args, len(mesh_shape), seed=len(name), count=10):
        with implicit_communication("allow"):
            check_op(fn, args, codes, mesh)
    with implicit_communication("error"):
        check_op(fn, args, [" ".join(["S0", "I"][: len(mesh_shape)])], mesh)


@pytest.mark.ranks(4, pool=True)
def test_grid_sample() -> None:
    mesh = cached_mesh(4)
    x, theta = (
        torch.sin(torch.arange(96.0).double()).view(3, 2, 4, 4),
        torch.cos(torch.arange(18.0).double()).view(3, 2, 3),
    )

    def fn(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
        return F.grid_sample(x, F.affine_grid(theta, [3, 2, 4, 4], align_corners=False), align_corners=False)

    for code in ("S0", "I"):
        with implicit_communication("allow"):
            check_op(fn, (x, theta), [code, code], mesh)
