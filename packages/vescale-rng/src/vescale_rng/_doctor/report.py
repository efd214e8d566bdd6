"""What the doctor found: one finding per operator, and a report that reads as a table or as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from .._fingerprint import Fingerprint

__all__ = ["Finding", "Report", "Verdict"]

Verdict = Literal["closed form", "drawn whole", "ok", "NOT bitwise"]
"""How an operator is drawn on shards here; "ok" for a rule that holds and is no operator."""

_WORDS = {
    "closed form": "bitwise (closed form)",
    "drawn whole": "bitwise (drawn whole)",
    "ok": "as expected",
    "NOT bitwise": "NOT bitwise here",
}
_SENTENCES: dict[Verdict, str] = {
    "closed form": "Bitwise on {}, each rank drawing its own part",
    "drawn whole": "Bitwise on {}, every rank drawing the whole and keeping its part",
    "NOT bitwise": "NOT bitwise on {}",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Outcome of one line of the doctor's tables."""

    section: str
    """What was looked at: "stream", "cpu", "cuda"."""
    name: str
    """The operator, with its arguments where they matter, or the rule."""
    dtypes: tuple[str, ...]
    """Dtypes that behave like this; empty where dtypes do not matter."""
    verdict: Verdict
    """How it is drawn on shards on this machine."""
    why: str = ""
    """What differs from the model; empty if nothing does."""

    @property
    def ok(self) -> bool:
        """True if torch behaves as the model says; a law that is broken but worked around is not ok."""
        return not self.why


@dataclass(frozen=True, slots=True)
class Report:
    """All findings on one machine. `print(report)` shows the tables and the summary."""

    fingerprint: Fingerprint
    """What ranks and checkpoints must share for the findings to mean the same numbers."""
    findings: tuple[Finding, ...]
    """In the order in which they were made."""

    @property
    def ok(self) -> bool:
        """True if everything is as the model says."""
        return all(finding.ok for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return builtins, for JSON."""
        return {
            "ok": self.ok,
            "fingerprint": self.fingerprint.to_dict(),
            "findings": [{**dataclasses.asdict(finding), "ok": finding.ok} for finding in self.findings],
            "summary": self.summary(),
        }

    def summary(self) -> list[str]:
        """Say in sentences what is bitwise equal to one device here, what is not, and on which conditions."""
        lines = []
        for section, device in (("cpu", "CPU"), ("cuda", "CUDA")):
            for verdict, text in _SENTENCES.items():
                names = _names([f for f in self.findings if f.section == section], verdict)
                if names:
                    lines.append(f"{text.format(device)}: {', '.join(names)}.")
        lines += [f"{f.name}{_of(f)}: {f.why}." for f in self.findings if not f.ok]
        if not any(f.section == "cuda" for f in self.findings):
            lines.append("CUDA was not looked at: this torch sees no GPU.")
        lines.append(f"Ranks, and runs that continue one another, must share {_shared(self.fingerprint)}.")
        lines.append(
            "Equal numbers need eager operators: torch.compile, flash attention's dropout and cuDNN's RNN dropout have "
            "streams of their own."
        )
        return lines

    def __str__(self) -> str:
        blocks = [_table(section, [f for f in self.findings if f.section == section]) for section in self._sections()]
        blocks.append("\n".join(textwrap.fill(line, 110, subsequent_indent="  ") for line in self.summary()))
        bad = sum(not finding.ok for finding in self.findings)
        blocks.append("All is as expected." if not bad else f"{bad} of {len(self.findings)} lines are not as expected.")
        return "\n\n".join(blocks)

    def _sections(self) -> list[str]:
        return _unique(finding.section for finding in self.findings)


def _table(section: str, findings: list[Finding]) -> str:
    rows = [(section, "dtypes", "verdict")]
    rows += [(f.name, " ".join(f.dtypes) or "-", _WORDS[f.verdict] + (f": {f.why}" if f.why else "")) for f in findings]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a.ljust(first)}  {b.ljust(second)}  {c}" for a, b, c in rows)


def _of(finding: Finding) -> str:
    return f" of {' '.join(finding.dtypes)}" if finding.dtypes else ""


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _names(findings: list[Finding], verdict: Verdict) -> list[str]:
    """Names of the operators with this verdict; without their arguments where those make no difference."""
    verdicts: dict[str, set[Verdict]] = {}
    for finding in findings:
        verdicts.setdefault(_short(finding), set()).add(finding.verdict)
    found = [f for f in findings if f.verdict == verdict]
    return _unique(_short(f) if len(verdicts[_short(f)]) == 1 else f"{f.name}{_of(f)}" for f in found)


def _short(finding: Finding) -> str:
    return finding.name.partition("(")[0].partition(",")[0]


def _shared(here: Fingerprint) -> str:
    kernels = here.cpu_capability
    if kernels in ("AVX2", "AVX512"):
        kernels += " (AVX2 and AVX512 give equal bits but for gumbel_softmax)"
    shared = f"torch {here.torch}, CPU kernels {kernels} on {here.machine}"
    if here.gpu is not None:
        shared += f", the GPU model {here.gpu} ({here.sm_count} SMs of {here.threads_per_sm} threads)"
    return f"{shared}, and stream law {here.stream_law} of vescale_rng {here.vescale_rng}"
