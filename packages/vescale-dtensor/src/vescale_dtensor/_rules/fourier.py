"""Fourier transforms: the transformed dims must be whole, all others may be sharded. All are linear."""

from __future__ import annotations

from typing import Any

from .._dispatch.call import Call, Rule, Strategy, normalize_dims
from .._dispatch.table import keyed
from ..placements import P, R
from ._batched import shapes_of, spared
from .views import dim_map_rule


def _transformed(call: Call) -> tuple[int, ...]:
    """Dims that a function of `torch.fft` acts on."""
    name = call.name.removeprefix("fft_")
    if name in ("fftshift", "ifftshift"):
        return normalize_dims(call.arg(1, "dim"), call.ndim)
    if name.endswith("n"):
        sizes, dims = call.arg(1, "s"), call.arg(2, "dim")
        if dims is None and sizes is not None:
            dims = tuple(range(-len(sizes), 0))
        return normalize_dims(dims, call.ndim)
    default: Any = (-2, -1) if name.endswith("2") else -1
    return normalize_dims(call.arg(2, "dim", default), call.ndim)


def transform_rule(call: Call) -> Rule | None:
    """The functions of `torch.fft` that have a tensor argument."""
    shapes = shapes_of(call) if len(call.specs) == 1 and call.ndim else None
    if shapes is None:
        return None
    acted = _transformed(call)
    kept = [(d, d) for d in range(call.ndim) if d not in acted]
    return dim_map_rule(shapes[0], kept, lambda ins, outs: spared(call, ins, outs), view=False)


def _windowed_signals(call: Call, shape: tuple[int, ...], batch_ndim: int) -> Rule:
    windows = (R,) * (len(call.specs) - 1)
    strategies = [Strategy((0, *windows), (0,))] if call.ndim == batch_ndim else []
    strategies.append(Strategy((P, *windows), (P,), exact=True))
    return Rule([shape], strategies, lambda ins, outs: spared(call, ins, outs))


def stft_rule(call: Call) -> Rule | None:
    """`stft` of signals `(batch, time)`; the window is whole."""
    shapes = shapes_of(call)
    return None if shapes is None else _windowed_signals(call, shapes[0], 2)


def istft_rule(call: Call) -> Rule | None:
    """`istft` of spectra `(batch, frequencies, frames)`; it looks at the values of its window, which meta has not."""
    names = "input n_fft hop_length win_length window center normalized onesided length return_complex"
    bound = call.bind(names, center=True)
    if call.ndim not in (2, 3):
        return None
    n_fft, length = bound["n_fft"], bound["length"]
    if length is None:
        hop = bound["hop_length"] if bound["hop_length"] is not None else n_fft // 4
        length = n_fft + hop * (call.shape[-1] - 1) - (2 * (n_fft // 2) if bound["center"] else 0)
    return _windowed_signals(call, (*call.shape[:-2], length), 3)


keyed(
    "fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.hfft2 "
    "fft.ihfft2 fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn fft.ihfftn fft.fftshift fft.ifftshift",
    transform_rule,
    inplace=False,
)
keyed("stft", stft_rule, inplace=False)
keyed("istft", istft_rule, inplace=False)
