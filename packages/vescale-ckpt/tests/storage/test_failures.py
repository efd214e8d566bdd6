"""What an error of the system becomes."""

import errno

import pytest

from vescale_ckpt._storage.failures import ADVICE, FULL, storage_error
from vescale_ckpt.errors import CheckpointError, StorageError


def test_a_full_disk_says_how_much_and_what_to_do() -> None:
    cause = OSError(errno.ENOSPC, "No space left on device")
    error = storage_error("write", "a/b", "/run", cause, needed=10)
    assert str(error) == (
        "cannot write 'a/b' in /run: the disk is full: 10 more bytes were to be written there. "
        "Free some space (vescale-ckpt gc removes what no step needs) and retry"
    )
    assert "more bytes" not in str(storage_error("write", "a", "/run", cause))


@pytest.mark.parametrize("code", [*ADVICE, *FULL, errno.ETIMEDOUT])
def test_the_number_is_kept_and_the_classes_are_caught(code: int) -> None:
    error = storage_error("read", "a", "/run", OSError(code, "why"))
    assert error.errno == code
    assert isinstance(error, StorageError)
    assert isinstance(error, OSError)
    assert isinstance(error, CheckpointError)
    assert str(error).startswith("cannot read 'a' in /run: ")


def test_an_error_without_a_number_is_named() -> None:
    error = storage_error("open", "", "s3://b", KeyError("token"))
    assert str(error) == "cannot open s3://b: KeyError: 'token'"
    assert error.errno is None
