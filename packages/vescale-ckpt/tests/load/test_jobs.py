import torch

from vescale_ckpt._format import ChunkTable, FileRecord, Index
from vescale_ckpt._geometry import Box
from vescale_ckpt._load.jobs import GAP_BYTES, JOB_BYTES, jobs_of
from vescale_ckpt._load.plan import Part, Want

PATHS = [f"steps/0000000{step}-0a0a0a0a/data/w00000-0.pack" for step in (1, 2)]


def parts_at(places):
    """Parts at (file, offset, stored) of float32 chunks."""
    table = ChunkTable()
    for file, offset, stored in places:
        table.append(file, offset, stored, stored, 0, 0)
    index = Index(0, [], [FileRecord(path, 1 << 30) for path in PATHS], [], table)
    return [Part(index, row, "t", torch.float32, Box((1,), (1,)), 0, table.raw[row] // 4) for row in range(len(table))]


def seen(jobs):
    return [(job.path, [(e.offset, e.size) for e in job.extents]) for job in jobs]


def test_neighbours_are_one_read_whatever_their_order():
    jobs = jobs_of(parts_at([(0, 800, 400), (0, 0, 400), (0, 400, 400)]), whole=True)
    assert seen(jobs) == [(PATHS[0], [(0, 400), (400, 400), (800, 400)])]


def test_small_gaps_are_read_over_and_large_ones_are_not():
    far = 400 + GAP_BYTES
    assert len(jobs_of(parts_at([(0, 0, 400), (0, far, 400)]), whole=True)) == 1
    assert len(jobs_of(parts_at([(0, 0, 400), (0, far + 4, 400)]), whole=True)) == 2


def test_files_and_equal_places_are_reads_of_their_own():
    jobs = jobs_of(parts_at([(0, 0, 400), (1, 400, 400), (0, 0, 400)]), whole=True)
    assert sorted(seen(jobs)) == [(PATHS[0], [(0, 400)]), (PATHS[0], [(0, 400)]), (PATHS[1], [(400, 400)])]


def test_reads_are_bounded():
    size = 1 << 20
    jobs = jobs_of(parts_at([(0, n * size, size) for n in range(10)]), whole=True)
    assert [len(job.extents) for job in jobs] == [JOB_BYTES // size, JOB_BYTES // size, 2]
    assert [len(job.extents) for job in jobs_of(parts_at([(0, 4 * n, 4) for n in range(300)]), whole=True)] == [256, 44]


def test_without_checksums_only_what_is_wanted_is_read():
    (part,) = parts_at([(0, 1000, 400)])
    part.wants = [Want(None, 10, 20, 0), Want(None, 40, 45, 10)]
    (extent,) = jobs_of([part], whole=False)[0].extents
    assert (extent.offset, extent.size, extent.low, extent.high) == (1040, 140, 10, 45)
    (extent,) = jobs_of([part], whole=True)[0].extents
    assert (extent.offset, extent.size, extent.low, extent.high) == (1000, 400, 0, 100)
