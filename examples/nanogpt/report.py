"""What a run leaves behind: its loss curves as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """Loss curves of the parallel model and of its single-device twin."""

    mesh: str
    dtype: str
    seed: int
    dropout: float
    torch: str
    parallel: list[float]
    single: list[float]
    tolerance: float
    """Largest difference allowed, relative to losses above one."""
    parameter_difference: float
    """Largest difference between any two parameter elements after training."""
    tokens_per_second: float
    """Median over the steps of the parallel model."""

    @property
    def differences(self) -> list[float]:
        """|difference| of the losses, step by step."""
        return [abs(a - b) for a, b in zip(self.parallel, self.single, strict=True)]

    @property
    def within_tolerance(self) -> bool:
        """Whether no step differs by more than the tolerance. A loss that is not a number does."""
        return all(d <= self.tolerance * max(1.0, abs(s)) for d, s in zip(self.differences, self.single, strict=True))


def write_json(result: Result, path: Path) -> None:
    """Write the curves and what they were made with."""
    content = {**asdict(result), "max_difference": max(result.differences), "ok": result.within_tolerance}
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_picture(result: Result, path: Path) -> bool:
    """Draw both curves over their difference; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(7.5, 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps = range(1, len(result.parallel) + 1)
    losses.plot(steps, result.single, color="#9ecae1", linewidth=6, label="single device")
    losses.plot(steps, result.parallel, color="#08306b", linewidth=1.4, label=f"mesh {result.mesh}")
    losses.set_ylabel("loss [nats per byte]")
    losses.legend(frameon=False)
    losses.grid(alpha=0.3)
    losses.set_title(f"GPT on {result.mesh} and its single-device twin", fontsize=12)

    shown = [(s, d) for s, d in zip(steps, result.differences, strict=True) if d > 0]
    if shown:
        gaps.plot(*zip(*shown, strict=True), ".", color="#08306b", markersize=5, label="|difference|")
        gaps.axhline(result.tolerance, color="#d94801", linewidth=1.2, linestyle="--", label="tolerance")
        gaps.set_yscale("log")
        gaps.set_ylim(min(d for _, d in shown) / 5, 3 * max(result.tolerance, *result.differences))
        gaps.legend(loc="center right", fontsize=9)
        equal = len(result.parallel) - len(shown)
        if equal:
            gaps.text(0.01, 0.05, f"equal to the last bit in {equal} steps", transform=gaps.transAxes, fontsize=9)
    else:
        gaps.text(0.5, 0.5, "bit-identical", ha="center", va="center", transform=gaps.transAxes, fontsize=12)
        gaps.set_yticks([])
    gaps.set_ylabel("|difference|")
    gaps.set_xlabel("step")
    gaps.grid(alpha=0.3)
    figure.supxlabel(f"torch {result.torch}, {result.dtype}, dropout {result.dropout}, seed {result.seed}", fontsize=9)
    figure.savefig(path, dpi=120)
    return True
