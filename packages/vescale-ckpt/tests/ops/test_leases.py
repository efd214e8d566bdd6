"""What people are told of a save that may have died: until when its lease holds."""

import time

import pytest

import vescale_ckpt as ck
from vescale_ckpt._format import Lease, step_folder
from vescale_ckpt._ops import steps
from vescale_ckpt._ops.leases import lease_text
from vescale_ckpt.testing import MemoryStorage

NOON = time.mktime((2026, 6, 1, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1740, "lease until 12:29, in 29 min; if no saver runs: gc --break-leases"),
        (45, "lease until 12:00, in 45 s; if no saver runs: gc --break-leases"),
        (3 * 3600, "lease until 15:00, in 3.0 h; if no saver runs: gc --break-leases"),
        (4 * 86400, "lease until 2026-06-05 12:00, in 4.0 days; if no saver runs: gc --break-leases"),
        (-600, "lease ended at 11:50; gc takes it when its time of grace is over too (--grace)"),
    ],
)
def test_the_text(seconds: float, text: str) -> None:
    assert lease_text(NOON + seconds, NOON) == text


def test_a_time_that_no_calendar_has() -> None:
    assert "lease until 1e+300 s after 1970" in lease_text(1e300, NOON)


def test_ls_and_gc_tell_it() -> None:
    storage, folder = MemoryStorage(), step_folder(900, "0123456789abcdef")
    ck.save(storage, {"n": 1}, step=1)
    expires = time.time() + 1740
    storage.put(f"{folder}/LEASE", Lease("0123456789abcdef", expires, ()).to_bytes())
    ((name, text),) = steps(storage).others
    assert name == folder
    assert "lease until " in text
    assert ", in 29 min; if no saver runs: gc --break-leases" in text
    report = ck.gc(storage)
    assert (report.running, report.leases) == ([folder], {folder: expires})
    assert ck.gc(storage, break_leases=True).unfinished == [folder]
