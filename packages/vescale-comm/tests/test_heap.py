"""Memory that is taken in each step is not taken from the system in each step."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

BUFFER, ROUNDS = 3 << 20, 20
PAGES = BUFFER // resource.getpagesize()
SCRIPT = f"""
import resource, torch
from vescale_comm._heap import keep_freed_memory

storages = [torch.empty({BUFFER}, dtype=torch.uint8).untyped_storage() for _ in range(4)]
for storage in storages:
    storage.resize_(0)

def once():
    for storage in storages:  # all of them are there, and then none
        storage.resize_({BUFFER}).fill_(1)
    for storage in storages:
        storage.resize_(0)

def faults():
    for _ in range(5):  # until every block has found its place
        once()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({ROUNDS}):
        once()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults())
keep_freed_memory()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have their own ways")
def test_pages_are_kept() -> None:
    # In a process of its own, for what the C library learns stays.
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    # All four blocks end at the end of the heap, which is where pages are given back.
    assert before >= ROUNDS * PAGES
    assert after <= ROUNDS * PAGES // 10
