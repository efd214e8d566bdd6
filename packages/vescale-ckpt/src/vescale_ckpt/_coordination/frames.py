"""Messages in a store: each says to which call it belongs, and long ones lie in several values.

A TCPStore drops the connection of whoever sends it more than 8 MiB at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["PART", "Call", "Frame", "frames", "part_keys"]

PART = 4 << 20
"""Most bytes of a message in one value."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a member is at."""

    kind: str
    """Of the session: "save", "load", ..."""
    number: int
    """Of the session in its group, from 1."""
    verb: str
    """"gather", "broadcast" or "agree"."""
    name: str
    """What is gathered, told or agreed on."""

    def __str__(self) -> str:
        return f"{self.verb}({self.name!r}) of {self.kind!r} (number {self.number})"


@dataclass(frozen=True, slots=True)
class Frame:
    """The first value of a message."""

    call: Call
    """At which call it was sent."""
    parts: int
    """How many values the message has."""
    data: bytes
    """The first `PART` bytes of the message."""

    def to_bytes(self) -> bytes:
        """Return what stands in the store."""
        call = self.call
        return json.dumps([call.kind, call.number, call.verb, call.name, self.parts]).encode() + b"\n" + self.data

    @classmethod
    def from_bytes(cls, value: bytes) -> Frame:
        """Read what stands in the store."""
        head, _, data = bytes(value).partition(b"\n")
        kind, number, verb, name, parts = json.loads(head)
        return cls(Call(kind, number, verb, name), parts, data)


def frames(call: Call, data: bytes) -> tuple[Frame, list[bytes]]:
    """Return the first value of a message, and the others."""
    rest = [data[begin : begin + PART] for begin in range(PART, len(data), PART)]
    return Frame(call, 1 + len(rest), data[:PART]), rest


def part_keys(key: str, parts: int) -> list[str]:
    """Return the keys of the values of a message but for the first."""
    return [f"{key}.{number}" for number in range(1, parts)]
