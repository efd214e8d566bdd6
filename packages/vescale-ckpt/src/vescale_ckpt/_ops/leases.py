"""What to tell people of a save that runs, or has died: until when its lease holds, and what they can do."""

from __future__ import annotations

import time

__all__ = ["lease_text"]

DAY = 86400.0


def lease_text(expires: float | None, now: float) -> str:
    """Return until when a save is left alone.

    Args:
        expires: when its lease ends or ended, in seconds since 1970; None where it has none that can be read.
        now: seconds since 1970.

    Example:
        >>> print(lease_text(None, 0.0))
        no lease that can be read; gc takes it when nothing in it has changed for its time of grace (--grace)
    """
    if expires is None:
        return "no lease that can be read; gc takes it when nothing in it has changed for its time of grace (--grace)"
    if expires <= now:
        return f"lease ended at {_when(expires, now)}; gc takes it when its time of grace is over too (--grace)"
    return f"lease until {_when(expires, now)}, in {_span(expires - now)}; if no saver runs: gc --break-leases"


def _when(seconds: float, now: float) -> str:
    form = "%H:%M" if abs(seconds - now) < DAY / 2 else "%Y-%m-%d %H:%M"
    try:
        return time.strftime(form, time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # no time that a calendar has
        return f"{seconds:.4g} s after 1970"


def _span(seconds: float) -> str:
    """Return a time that is left, in one unit.

    Example:
        >>> _span(29.0), _span(1740.0), _span(9000.0), _span(1e6)
        ('29 s', '29 min', '2.5 h', '11.6 days')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY else f"{seconds / DAY:.1f} days"
