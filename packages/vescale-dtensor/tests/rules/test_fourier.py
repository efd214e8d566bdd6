"""Fourier transforms against one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale_dtensor import Shard, implicit_communication
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, random_codes

fft = torch.fft


def _signals(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _spectra(*shape: int) -> torch.Tensor:
    return torch.view_as_complex(_signals(*shape, 2))


WINDOW = torch.hann_window(4, dtype=torch.float64)
CASES: dict[str, tuple[Any, torch.Tensor]] = {
    "fft": (fft.fft, _signals(5, 3, 6)),
    "fft-complex-n": (lambda x: fft.fft(x, 4, norm="ortho"), _spectra(5, 3, 6)),
    "rfft-dim": (lambda x: fft.rfft(x, dim=1), _signals(5, 3, 6)),
    "irfft": (fft.irfft, _spectra(5, 3, 4)),
    "hfft": (lambda x: fft.hfft(x, n=5), _spectra(5, 3, 4)),
    "ihfft": (fft.ihfft, _signals(5, 3, 6)),
    "fft2": (fft.fft2, _signals(5, 3, 4)),
    "irfft2": (fft.irfft2, _spectra(5, 3, 4)),
    "fftn-s": (lambda x: fft.fftn(x, s=(4,)), _signals(5, 3, 6)),
    "rfftn-dims": (lambda x: fft.rfftn(x, dim=(1, 2)), _signals(5, 3, 4)),
    "fftshift": (lambda x: fft.fftshift(x, dim=-1), _signals(5, 6)),
    "ifftshift": (lambda x: fft.ifftshift(x, 1), _signals(5, 6)),
    "stft": (lambda x: torch.stft(x, 4, window=WINDOW, return_complex=True), _signals(5, 12)),
    "istft": (lambda x: torch.istft(x, 4, window=WINDOW), _spectra(5, 3, 6)),
    "istft-length": (lambda x: torch.istft(x, 4, 2, window=WINDOW, length=7), _spectra(5, 3, 6)),
}


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("name", CASES)
def test_transforms_of_sharded_batches(name: str) -> None:
    from vescale_dtensor import plain_tensors

    fn, x = CASES[name]
    with plain_tensors("replicate"):
        with implicit_communication("error"):
            assert check_op(fn, [x], ["S0"], cached_mesh(4)).placements == (Shard(0),)
            check_op(fn, [x], ["P I" if x.is_floating_point() else "I I"], cached_mesh(2, 2))
        with implicit_communication("allow"):
            for codes in random_codes([x], 2, seed=len(name), count=4):
                check_op(fn, [x], codes, cached_mesh(2, 2))


@pytest.mark.ranks(4, pool=True)
def test_all_dims_are_transformed_on_whole_tensors() -> None:
    with implicit_communication("allow"):
        for fn in (fft.fftn, fft.fftshift):
            check_op(fn, [_signals(5, 6)], ["S0 S1"], cached_mesh(2, 2))
