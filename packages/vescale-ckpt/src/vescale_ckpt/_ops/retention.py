"""Which steps stay: a rule that looks at step numbers, times and metadata, and touches no storage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Keep", "Saved", "as_keep"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed step, as retention sees it."""

    step: int
    """Number of the step."""
    created: float = 0.0
    """When it was saved, in seconds since 1970."""
    metadata: Any = None
    """The caller's, as given to `save`."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Steps that stay when older ones are removed. What any of the rules wants stays; the last step always does.

    Example:
        >>> import tempfile, vescale_ckpt as ck
        >>> folder = tempfile.mkdtemp()
        >>> for step, loss in [(0, 9.0), (10, 1.0), (20, 5.0), (30, 6.0)]:
        ...     _ = ck.save(folder, {"step": step}, step=step, metadata={"loss": loss})
        >>> ck.gc(folder, keep=ck.Keep(last=1, best=("loss", "min")), dry_run=True).kept
        [10, 30]
        >>> ck.gc(folder, keep=ck.Keep(last=2, every=20), dry_run=True).kept
        [0, 20, 30]
    """

    last: int = 3
    """The newest so many; at least 1."""
    every: int | None = None
    """Those whose number is a multiple of this."""
    best: tuple[str, str] | tuple[str, str, int] | None = None
    """(name of a number in the metadata, "min" or "max", how many: 1 if left out); "eval.loss" looks into a dict. A tie
    goes to the newer step; steps without the number, or where it is NaN, are not among the best."""
    hours: float | None = None
    """Those that were saved in the last so many hours."""

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise ValueError(
                f"last: expected an integer of at least 1, since one step must stay, but got {self.last!r}."
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            raise ValueError(f"every: expected an integer of at least 1 or None, but got {self.every!r}.")
        if self.hours is not None and not self.hours >= 0:
            raise ValueError(f"hours: expected a number of at least 0 or None, but got {self.hours!r}.")
        if self.best is not None:
            self._ranking()

    @property
    def looks_inside(self) -> bool:
        """Whether times or metadata matter, which are in the manifests."""
        return self.best is not None or self.hours is not None

    def choose(self, steps: Iterable[Saved], now: float = 0.0) -> set[int]:
        """Return the numbers of the steps that stay.

        Args:
            steps: the committed steps, each once, in any order.
            now: seconds since 1970, for `hours`.
        """
        ordered = sorted(steps, key=lambda saved: saved.step)
        stay = {saved.step for saved in ordered[-self.last :]}
        if self.every is not None:
            stay |= {saved.step for saved in ordered if saved.step % self.every == 0}
        if self.hours is not None:
            stay |= {saved.step for saved in ordered if saved.created >= now - self.hours * 3600}
        if self.best is not None:
            name, sign, count = self._ranking()
            found = [
                (sign * value, saved.step) for saved in ordered if (value := _number(saved.metadata, name)) is not None
            ]
            stay |= {step for _, step in sorted(found)[-count:]}
        return stay

    def _ranking(self) -> tuple[str, int, int]:
        """Return name, 1 where more is better or -1 where less is, and how many."""
        best = self.best
        count = best[2] if isinstance(best, tuple) and len(best) == 3 else 1
        fits = (
            isinstance(best, tuple) and len(best) in (2, 3) and isinstance(best[0], str) and best[1] in ("min", "max")
        )
        if not fits or type(count) is not int or count < 1:
            raise ValueError(
                f'best: expected (name in the metadata, "min" or "max") or that and a count of at least 1, '
                f"but got {best!r}."
            )
        assert best is not None
        return best[0], 1 if best[1] == "max" else -1, count


def as_keep(keep: Keep | int | None) -> Keep | None:
    """Return the rule that a caller means: a number stands for the newest so many.

    Raises:
        ValueError: it is something else.

    Example:
        >>> as_keep(2) == Keep(last=2)
        True
    """
    if keep is None or isinstance(keep, Keep):
        return keep
    if type(keep) is not int:
        raise ValueError(f"keep: expected a number of steps, a Keep or None, but got {keep!r}.")
    return Keep(last=keep)


def _number(metadata: Any, name: str) -> float | None:
    """Return a number of the metadata; None where there is none that can be ranked."""
    if isinstance(metadata, Mapping) and name in metadata:
        value = metadata[name]
    else:
        value = metadata
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)
