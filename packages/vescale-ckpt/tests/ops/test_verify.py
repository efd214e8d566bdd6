"""Verify: every damaged byte is found, and the tensor that it belongs to is named."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._format import FileRecord, committed, read_index, read_manifest
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, matching


def state(seed: int = 0, times: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(700 * times, 3, generator=generator),
        "b": torch.randn(5000 * times, generator=generator).bfloat16(),
        "c: d": torch.arange(300 * times),
        "small": torch.tensor(1.5),
        "n": seed,
    }


def paths(store: MemoryStorage, *parts: str) -> list[str]:
    return sorted(path for path in store.files() if all(part in path for part in parts))


@pytest.mark.parametrize(
    "options", [{}, {"compress": None}, {"layout": "plain"}, {"dedup": "content"}, {"dedup": None}]
)
def test_a_sound_checkpoint(options: dict[str, Any]) -> None:
    store = MemoryStorage()
    for step in (1, 2):
        ck.save(store, state(), step=step, chunk_bytes=4096, **options)
    report = ck.verify(store, "all")
    assert report
    assert (report.ok, report.problems, report.tensors) == (True, [], ())
    assert [entry.step for entry in report.steps] == [1, 2]
    # b and c are cut into chunks of 4096 bytes from their beginning, a, of 8400 bytes, too; the rest is in the index.
    assert [entry.chunks for entry in report.steps] == [3 + 3 + 1] * 2
    report.raise_if_damaged()


def test_flipped_bits_of_an_ordinary_safetensors_file_name_the_tensor() -> None:
    """The file itself says which bytes are whose: its header is JSON, of which the format of safetensors tells."""
    store = MemoryStorage()
    ck.save(store, state(), step=1, layout="plain")
    (path,) = paths(store, "/data/")
    data = store.files()[path]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    spans = {
        name: [8 + length + offset for offset in entry["data_offsets"]]
        for name, entry in header.items()
        if name != "__metadata__"
    }
    chance = random.Random(0)
    for name, (begin, end) in spans.items():
        for _ in range(20):
            bit = chance.randrange(8 * begin, 8 * end)
            store.flip(path, bit)
            report = ck.verify(store)
            assert report.tensors == (name,), (bit, report.problems)
            assert path in report.problems[0].text
            store.flip(path, bit)
    assert ck.verify(store)


def test_flipped_bits_of_the_header_of_an_ordinary_safetensors_file_are_found() -> None:
    """No load of ours looks at it, but who reads the file by itself gets what it says."""
    store = MemoryStorage()
    ck.save(store, {**state(), "own": ck.local(torch.zeros(100))}, step=1, layout="plain")
    (path,) = paths(store, "/data/")
    data = store.files()[path]
    end = 8 + int.from_bytes(data[:8], "little")
    text = len(data[:end].rstrip(b" "))
    assert text < 1000 < end
    for bit in [*range(0, 8 * text, 3), 8 * text, 8 * end - 1]:
        store.flip(path, bit)
        report = ck.verify(store)
        assert [problem.text.partition(":")[0] for problem in report.problems] == [f"header of {path}"], bit
        assert f"byte {bit // 8} is not what was saved" in report.problems[0].text
        assert torch.equal(ck.load_dict(store)["b"], state()["b"])
        store.flip(path, bit)
    assert ck.verify(store)


def test_headers_follow_from_the_index_for_names_and_dtypes_of_all_kinds() -> None:
    store = MemoryStorage()
    whole = torch.randn(50, 40)
    state = {
        "columns": whole[:, ::2],
        "f8": whole.to(torch.float8_e8m0fnu),
        "__metadata__": whole + 1,
        "\u00e9@0": whole,
    }
    ck.save(store, {**state, "own": ck.local(whole)}, step=1, layout="plain", chunk_bytes=4096)
    assert ck.verify(store)
    (path,) = paths(store, "/data/")
    header = store.files()[path][:4096]
    for key in ("columns", "__metadata__@whole", "\u00e9@0", "rank 0: own"):
        assert f'"{key}":'.encode() in header


@pytest.mark.parametrize("dedup", ["position", "content"])
def test_any_flipped_bit_of_any_file_is_found(dedup: str) -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1, dedup=dedup, chunk_bytes=4096)
    chance = random.Random(1)
    named = 0
    for path in paths(store, ""):
        size = len(store.files()[path])
        for bit in [0, 8 * size - 1, *(chance.randrange(8 * size) for _ in range(12))]:
            store.flip(path, bit)
            report = ck.verify(store, "all")
            assert not report, (path, bit)
            if "/data/" in path or path.startswith("chunks/"):
                assert report.tensors, (path, bit)
                named += 1
            store.flip(path, bit)
    assert named >= 14
    assert ck.verify(store, "all")


def test_a_store_without_its_marker_is_not_as_it_was_saved() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1)
    store.remove("vckpt.json")
    for step in (1, "all"):
        report = ck.verify(store, step)
        assert [str(problem) for problem in report.problems] == [
            f"vckpt.json: {store.url}: no checkpoints here: there is no file vckpt.json."
        ]


def test_all_damage_is_told_not_only_the_first() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1, compress=None, chunk_bytes=4096)
    (path,) = paths(store, "/data/")
    data = store.files()[path]
    for name in ("a", "b"):
        begin = data.index(bytes(state()[name].reshape(-1).view(torch.uint8)[:64].tolist()))
        store.flip(path, 8 * begin + 3)
    report = ck.verify(store)
    assert sorted(report.tensors) == ["a", "b"]
    with pytest.raises(ck.CorruptionError, match="2 problems") as caught:
        report.raise_if_damaged()
    assert sorted(caught.value.tensors) == ["a", "b"]


def test_damage_in_an_earlier_step_is_damage_of_the_later_one() -> None:
    store = MemoryStorage()
    ck.save(store, state(times=10), step=1, compress=None)
    ck.save(store, {**state(times=10), "b": torch.zeros(50000, dtype=torch.bfloat16)}, step=2, compress=None)
    (path,) = paths(store, "steps/00000001", "/data/")
    begin = store.files()[path].index(bytes(state(times=10)["a"].reshape(-1).view(torch.uint8)[:64].tolist()))
    store.flip(path, 8 * begin)
    assert ck.verify(store, 2).tensors == ("a",)
    begin = store.files()[path].index(bytes(state(times=10)["b"].view(torch.uint8)[:64].tolist()))
    store.flip(path, 8 * begin)
    assert ck.verify(store, 2).tensors == ("a",), "b is not shared"
    assert sorted(ck.verify(store, 1).tensors) == ["a", "b"]
    store.remove(path)
    report = ck.verify(store, 2)
    assert set(report.tensors) == {"a", "c: d"}
    assert "missing" in report.problems[0].text


def test_what_steps_share_is_read_once() -> None:
    store = MemoryStorage()
    for step in (1, 2, 3):
        ck.save(store, state(times=10), step=step, compress=None)
    report = ck.verify(store, "all")
    assert report.bytes == 84000 + 100000 + 24000
    assert [entry.bytes for entry in report.steps] == [report.bytes] * 3


@pytest.mark.parametrize("change", ["shorter", "longer", "gone"])
def test_files_of_another_size(change: str) -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1, compress=None, chunk_bytes=4096)
    (path,) = paths(store, "/data/")
    size = len(store.files()[path])
    if change == "gone":
        store.remove(path)
    elif change == "shorter":
        store.truncate(path, size - 100)
    else:
        data = store.files()[path]
        store.remove(path)
        store.put(path, data + b"more")
    report = ck.verify(store)
    assert not report
    assert len(report.tensors) == {"shorter": 1, "longer": 0, "gone": 3}[change]


def test_a_lost_index_names_the_tensors_that_it_held() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1)
    (path,) = paths(store, "/index/")
    store.remove(path)
    report = ck.verify(store)
    assert {"a", "b", "c: d"} <= set(report.tensors)
    assert "missing, though the step is committed" in report.problems[0].text


def test_a_chunk_under_the_wrong_name() -> None:
    """Everything is consistent, the checksum too; only the name of the file is not that of its content."""
    store = MemoryStorage()
    ck.save(store, {"a": torch.arange(100)}, step=1, dedup="content", compress=None)
    (right,) = paths(store, "chunks/")
    wrong = "chunks/00/" + "00" * 32
    store.put(wrong, store.files()[right])
    (entry,) = committed(store)
    manifest = read_manifest(store, entry)
    index = read_index(store, entry, manifest, 0)
    index.files = [FileRecord(wrong, file.bytes) for file in index.files]
    data = index.to_bytes()
    store.put(f"{entry.folder}/index/w00000.json", data)
    writer = replace(manifest.writers[0], index_sha256=hashlib.sha256(data).hexdigest(), index_bytes=len(data))
    data = replace(manifest, writers=(writer,)).to_bytes()
    store.put(f"{entry.folder}/manifest.json", data)
    commit = replace(entry.commit, manifest_sha256=hashlib.sha256(data).hexdigest(), manifest_bytes=len(data))
    store.put(f"{entry.folder}/COMMIT", commit.to_bytes())
    report = ck.verify(store)
    assert report.tensors == ("a",)
    assert "named after" in report.problems[0].text


def test_a_sector_that_cannot_be_read_hides_nothing_else() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1, compress=None, chunk_bytes=4096)
    faulty = FaultyStorage(store, matching(Fail(), kind="read", name="w00000-0.pack", times=3))
    report = ck.verify(faulty, threads=1)
    # The whole run, then the first two chunks one by one; the others are read.
    assert len(report.tensors) in (1, 2)
    assert 0 < report.bytes < 8400 + 10000 + 2400


def test_steps_that_are_none_are_told_where_all_are_asked_for() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1)
    ck.save(store, state(), step=2)
    store.flip(paths(store, "steps/00000002", "COMMIT")[0], 0)
    assert ck.verify(store).steps[0].step == 1, "step 2 does not exist any more"
    report = ck.verify(store, "all")
    assert not report
    assert report.others[0].folder.startswith("steps/00000002-")


def test_progress_reaches_the_whole() -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1, compress=None)
    seen: list[tuple[int, int]] = []
    ck.verify(store, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (8400 + 10000 + 2400,) * 2
    assert seen == sorted(seen)


def test_wrong_use() -> None:
    store = MemoryStorage()
    with pytest.raises(ck.MissingStepError):
        ck.verify(store, "all")
    ck.save(store, state(), step=1)
    with pytest.raises(ck.MissingStepError, match="there are: 1"):
        ck.verify(store, 7)
    with pytest.raises(ValueError, match="threads"):
        ck.verify(store, threads=0)


@pytest.mark.parametrize("key", ["save_id", "step", "manifest_sha256", "manifest_bytes", "bytes", "chunks"])
def test_commit_must_say_what_the_other_files_say(key: str) -> None:
    store = MemoryStorage()
    ck.save(store, state(), step=1)
    (path,) = paths(store, "COMMIT")
    value = json.loads(store.files()[path])
    value[key] = (
        value[key] + 1 if isinstance(value[key], int) else value[key][:-1] + "0123456789abcdef"[value[key][-1] == "0"]
    )
    store.put(path, json.dumps(value).encode())
    report = ck.verify(store, "all")
    assert len(report.problems) == 1


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_tensor_is_two_numbers_to_its_codec(dtype: torch.dtype) -> None:
    store = MemoryStorage()
    ck.save(store, {"w": torch.arange(3000).to(dtype) / 7}, compress="planes")
    assert ck.verify(store)
