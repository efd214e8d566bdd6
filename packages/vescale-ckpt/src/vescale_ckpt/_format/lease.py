"""The lease of a save that runs: nobody may remove its folder, nor the steps that it refers to, before it expires."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Fields, by, check_format
from .jsonio import dumps, loads, refuse
from .limits import COMMIT_BYTES, FORMAT
from .paths import LEASE, SAVE_ID, parse_step_folder

__all__ = ["Lease"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The content of a LEASE file."""

    save_id: str
    """The save that runs."""
    expires: float
    """Unix seconds, by the clock of the saver."""
    bases: tuple[str, ...]
    """Folders of the steps that hold chunks it refers to."""

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        value = {"format": FORMAT, "by": by(), "save_id": self.save_id, "expires": self.expires}
        return dumps({**value, "bases": list(self.bases)}, LEASE)

    @classmethod
    def from_bytes(cls, data: bytes, at: str = LEASE) -> Lease:
        """Return the lease that `data` holds.

        Raises:
            FormatError: naming the field, what it holds and the rule.
        """
        value = loads(data, at, COMMIT_BYTES)
        check_format(value, at)
        fields = Fields(value, at, "format by save_id expires bases")
        bases = fields.strings("bases", 64)
        for number, name in enumerate(bases):
            if parse_step_folder(name) is None:
                refuse(f"{fields.at('bases')}[{number}]", name, "must be the folder of a step")
        return cls(
            fields.text("save_id", SAVE_ID, "8 to 64 lower-case hex digits"), fields.number("expires"), tuple(bases)
        )
