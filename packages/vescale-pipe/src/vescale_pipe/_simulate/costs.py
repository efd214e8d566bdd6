"""What the actions of a schedule cost: seconds, bytes, and how fast the ranks and the links are.

Every number is for one stage and one micro-batch; one number means the same for all stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from torch import Tensor

__all__ = ["Costs"]

PER_STAGE = ("forward", "backward", "input_grad", "weight_grad", "message_bytes", "activation", "kept_for_weights")


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the actions of a schedule, per stage and micro-batch; a number stands for all stages.

    The defaults make a forward, an input gradient and a weight gradient of a stage take 1 each, messages take no time,
    and memory count activations. Of `backward`, `input_grad` and `weight_grad`, those that are not given follow from
    those that are: `backward` is the sum of its halves; halves of a given `backward` are equal, or one is what the
    other leaves; without a `backward`, a half is as long as the forward.

    Raises:
        ValueError: a number is negative or not finite, a speed is 0, `overlap` is not in [0, 1], `link` is unknown.

    Example:
        >>> costs = Costs(forward=[1.0, 1.5], backward=3.0, latency=0.1)
        >>> costs.seconds(2)[3].tolist()
        [1.5, 1.5]
    """

    forward: float | Sequence[float] = 1.0
    """Seconds of a forward."""
    backward: float | Sequence[float] | None = None
    """Seconds of a whole backward."""
    input_grad: float | Sequence[float] | None = None
    """Seconds of the part of a backward that gives the gradients of inputs."""
    weight_grad: float | Sequence[float] | None = None
    """Seconds of the part of a backward that gives the gradients of weights."""
    latency: float = 0.0
    """Seconds that a message between two ranks takes however short it is."""
    bytes_per_second: float | None = None
    """Bandwidth of a link; None: messages of any length take the latency only."""
    message_bytes: float | Sequence[float] = 0.0
    """Bytes of what a stage gives to one that takes it; the gradient on the way back has as many."""
    activation: float | Sequence[float] = 1.0
    """Bytes that a stage keeps from F to B, or to I."""
    kept_for_weights: float | Sequence[float] | None = None
    """Bytes that a stage keeps from I to W; None: as many as `activation`."""
    overlap: float = 0.0
    """How well joined actions overlap: a pair takes the longer one, and (1 - overlap) of the shorter one."""
    rank_speed: Sequence[float] | None = None
    """Speed of each rank: the seconds above are divided by it; None: all 1."""
    link: Literal["free", "fifo"] = "free"
    """Whether messages from a rank to another share a link, one after the other, or each has its own."""

    def __post_init__(self) -> None:
        for name in PER_STAGE:
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, float)):
                value = tuple(float(one) for one in value)
                object.__setattr__(self, name, value)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None and not (math.isfinite(one) and one >= 0):
                    raise ValueError(f"{name}: {one} given; it must be finite and not negative.")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"latency: {self.latency} given; it must be finite and not negative.")
        if self.bytes_per_second is not None and not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second: {self.bytes_per_second} given; it must be positive, or None.")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap: {self.overlap} given; it must be from 0 (none) to 1 (the shorter is hidden).")
        if self.link not in ("free", "fifo"):
            raise ValueError(f'link: {self.link!r} given; it must be "free" or "fifo".')
        if self.rank_speed is not None:
            speeds = tuple(float(speed) for speed in self.rank_speed)
            if not all(math.isfinite(speed) and speed > 0 for speed in speeds):
                raise ValueError(f"rank_speed: {speeds} given; speeds must be finite and positive.")
            object.__setattr__(self, "rank_speed", speeds)

    def divided(self, chunks: int) -> Costs:
        """Return the costs of stages that hold one of `chunks` equal parts of the layers; messages stay as they are.

        Args:
            chunks: parts that each of these stages is cut into.

        Raises:
            ValueError: a number is given per stage, so that those of the parts are not known.

        Example:
            >>> Costs(forward=3.0, backward=6.0).divided(2).forward
            1.5
        """
        changes: dict[str, float] = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, tuple):
                raise ValueError(f"{name} is given per stage: give the costs of the {chunks} chunks of each.")
            if value is not None and name != "message_bytes":
                changes[name] = value / chunks
        return replace(self, **changes)  # type: ignore[arg-type]

    def seconds(self, num_stages: int) -> Tensor:
        """Return the seconds of each kind of action for each stage: float64, (4, num_stages), rows as `Kind` counts."""
        forward = self._column("forward", num_stages)
        whole = self._given("backward", num_stages)
        inputs, weights = self._given("input_grad", num_stages), self._given("weight_grad", num_stages)
        if whole is not None and inputs is None and weights is None:
            inputs = weights = whole / 2
        if inputs is None:
            inputs = forward if whole is None or weights is None else whole - weights
        if weights is None:
            weights = forward if whole is None else whole - inputs
        if whole is None:
            whole = inputs + weights
        table = torch.stack([forward, whole, inputs, weights])
        if bool((table < 0).any()):
            raise ValueError("backward: it is shorter than the half of it that is given as input_grad or weight_grad.")
        return table

    def transfer(self, num_stages: int) -> Tensor:
        """Return the seconds that what each stage gives occupies a link: float64, (num_stages,)."""
        size = self._column("message_bytes", num_stages)
        return size / self.bytes_per_second if self.bytes_per_second is not None else torch.zeros_like(size)

    def memory(self, num_stages: int) -> tuple[Tensor, Tensor]:
        """Return the bytes that each stage keeps until its B or I, and from I to W: two float64, (num_stages,)."""
        kept = self._column("activation", num_stages)
        later = self._given("kept_for_weights", num_stages)
        return kept, kept if later is None else later

    def speeds(self, num_ranks: int) -> Tensor:
        """Return the speed of each rank: float64, (num_ranks,)."""
        if self.rank_speed is None:
            return torch.ones(num_ranks, dtype=torch.float64)
        if len(self.rank_speed) != num_ranks:
            raise ValueError(f"rank_speed: {len(self.rank_speed)} speeds given for {num_ranks} ranks.")
        return torch.tensor(self.rank_speed, dtype=torch.float64)

    def _given(self, name: str, num_stages: int) -> Tensor | None:
        return None if getattr(self, name) is None else self._column(name, num_stages)

    def _column(self, name: str, num_stages: int) -> Tensor:
        value = getattr(self, name)
        if isinstance(value, tuple):
            if len(value) != num_stages:
                raise ValueError(f"{name}: {len(value)} numbers given for {num_stages} stages.")
            return torch.tensor(value, dtype=torch.float64)
        return torch.full((num_stages,), float(value), dtype=torch.float64)


NAMES = frozenset(field.name for field in fields(Costs))
"""Names of the fields of `Costs`."""
