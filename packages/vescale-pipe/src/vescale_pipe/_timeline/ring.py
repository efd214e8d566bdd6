"""Where spans are kept until they are written: a ring of fixed size that all threads share.

A span takes a number, and with it a slot, when it begins, and its end is stored beside it; or when it ends, if it is
told of only then. What is not fetched before the ring comes round is overwritten, oldest first, and counted.
"""

from __future__ import annotations

import itertools
from typing import Any

__all__ = ["Raw", "Ring", "Token", "Whole"]

Token = tuple[int, str, "str | None", int, int, Any, int]
"""Number, category, name (None: an action), step, track, tags, start (ns)."""
Whole = tuple[int, str, "str | None", int, int, Any, int, int]
"""The same, and the end (ns), for a span that is told of when it is over."""
Raw = tuple[Token, int]
"""A token and its end (ns); 0: it has not ended."""


class Ring:
    """A ring of spans.

    Threads only take numbers (`next` of a counter, which is atomic) and store into slots that are theirs; one thread
    at a time may call `drain`.

    Args:
        capacity: spans that it holds; rounded up to a power of two.

    Raises:
        ValueError: the capacity is not positive.

    Example:
        >>> ring = Ring(2)
        >>> for start in range(1, 4):
        ...     number = next(ring.numbers)
        ...     ring.spans[number & ring.mask] = (number, "user", "work", 0, 0, None, start, start + 1)
        >>> [token[6] for token, end in ring.drain()], ring.dropped
        ([2, 3], 1)
    """

    __slots__ = ("_open", "_seen", "dropped", "ends", "mask", "numbers", "spans")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: {capacity} given; a timeline holds at least one span.")
        size = 1 << (capacity - 1).bit_length()
        self.mask = size - 1
        self.numbers = itertools.count()
        self.spans: list[Token | Whole | None] = [None] * size
        self.ends: list[int] = [0] * size
        self.dropped = 0
        """Spans that were overwritten before anybody fetched them."""
        self._seen = 0
        self._open: list[int] = []

    def drain(self) -> list[Raw]:
        """Return the spans that ended since the last call, in the order of their numbers."""
        # Taking a number is the only way to learn how many were taken; its slot is never filled.
        last = next(self.numbers)
        oldest = last - self.mask - 1
        first = max(self._seen, oldest)
        self.dropped += first - self._seen
        numbers = [*self._open, *range(first, last)]
        self._seen, self._open = last + 1, []
        found: list[Raw] = []
        for number in numbers:
            place = number & self.mask
            token = self.spans[place]
            end = token[7] if token is not None and len(token) == 8 else self.ends[place]
            if number < oldest or (token is not None and token[0] > number) or self.spans[place] is not token:
                self.dropped += 1
            elif token is None or token[0] < number or end == 0:
                self._open.append(number)
            else:
                found.append((token[:7], end))
        return found

    def unfinished(self) -> list[Token]:
        """Return the spans that had begun and not ended when `drain` was last called."""
        found = []
        for number in self._open:
            token = self.spans[number & self.mask]
            if token is not None and token[0] == number:
                found.append(token[:7])
        return found
