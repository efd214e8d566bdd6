"""What every rank did when: recorded at about half a microsecond a span or less, and put together on one clock.

On each rank, `with timeline.record(mesh=mesh, path="timeline.{rank}.jsonl"): ...`; then, anywhere,
`merge(["timeline.0.jsonl", ...]).save("trace.json.gz")` for ui.perfetto.dev, and `print(report(...))`.
"""

from ._timeline.bars import bars
from ._timeline.merge import Merged, MergedRank, Message, merge
from ._timeline.recorder import Recorder, recorder
from ._timeline.recording import Timeline, current, record, start, step, stop, sync
from ._timeline.report import LinkReport, RankReport, Report, report
from ._timeline.span import Span
from ._timeline.spanning import device_span, span
from ._timeline.tables import summary
from ._timeline.transport import RecordedTransport

__all__ = [
    "LinkReport",
    "Merged",
    "MergedRank",
    "Message",
    "RankReport",
    "RecordedTransport",
    "Recorder",
    "Report",
    "Span",
    "Timeline",
    "bars",
    "current",
    "device_span",
    "merge",
    "record",
    "recorder",
    "report",
    "span",
    "start",
    "step",
    "stop",
    "summary",
    "sync",
]
