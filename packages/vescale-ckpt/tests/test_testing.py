"""What users get to test the crash safety of their own programs and storages."""

import pytest

from vescale_ckpt import testing
from vescale_ckpt.errors import StorageError
from vescale_ckpt.testing import Fail, FaultyStorage, Kill, Killed, MemoryStorage, at


def test_all_names_are_there() -> None:
    assert sorted(testing.__all__) == testing.__all__
    for name in testing.__all__:
        assert getattr(testing, name).__doc__ or name in ("Fault", "Plan")


def careless(storage: FaultyStorage, content: bytes) -> None:
    """Overwrite in place: a crash in the middle loses both versions."""
    storage.remove("state")
    sink = storage.create("state")
    sink.write(0, [content[:2], content[2:]])
    sink.close()
    storage.sync("")


def careful(storage: FaultyStorage, content: bytes) -> None:
    """Write beside, then point to it."""
    sink = storage.create(f"state-{content.decode()}")
    sink.write(0, [content])
    sink.close()
    storage.sync("")
    storage.put("latest", content)


def what_a_reader_finds(inner: MemoryStorage) -> bytes:
    files = inner.files()
    return files.get("state-" + files.get("latest", b"").decode(), b"") or files.get("state", b"")


@pytest.mark.parametrize("power_loss", [False, True])
@pytest.mark.parametrize("survives", [True, False])
def test_each_crash_of_a_careful_program_leaves_the_old_or_the_new(power_loss: bool, survives: bool) -> None:
    whole = FaultyStorage(MemoryStorage())
    careful(whole, b"new!")
    found = []
    for number in range(whole.count):
        for part in (0.0, 0.5, 1.0):
            inner = MemoryStorage(files={"state-old!": b"old!", "latest": b"old!"})
            plan = at({number: Kill(part)})
            storage = FaultyStorage(inner, plan, power_loss=power_loss, survives=lambda path: survives)
            with pytest.raises(Killed):
                careful(storage, b"new!")
            found.append(what_a_reader_finds(inner))
    assert set(found) == {b"old!", b"new!"}
    assert found == sorted(found, reverse=True)


def test_some_crash_of_a_careless_program_is_found() -> None:
    whole = FaultyStorage(MemoryStorage(files={"state": b"old!"}))
    careless(whole, b"new!")
    found = set()
    for number in range(whole.count):
        inner = MemoryStorage(files={"state": b"old!"})
        with pytest.raises(Killed):
            careless(FaultyStorage(inner, at({number: Kill(0.5)})), b"new!")
        found.add(what_a_reader_finds(inner))
    assert b"ne" in found
    assert b"" in found


def test_an_error_at_each_operation_reaches_the_program() -> None:
    whole = FaultyStorage(MemoryStorage())
    careful(whole, b"new!")
    for number in range(whole.count):
        with pytest.raises(StorageError, match="made for a test"):
            careful(FaultyStorage(MemoryStorage(), at({number: Fail()})), b"new!")
