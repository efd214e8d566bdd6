"""Requests that fail for a moment are tried again, others are not."""

import pytest

from vescale_ckpt._storage.retry import Retry, is_transient


def failing(errors):
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "done"

    return action, left


def test_transient_errors_are_tried_again():
    waits = []
    action, left = failing([TimeoutError(), ConnectionResetError(), ConnectionError()])
    assert Retry(5, sleep=waits.append)(action) == "done"
    assert not left
    assert len(waits) == 3
    assert all(wait >= 0 for wait in waits)


def test_attempts_are_bounded():
    action, left = failing([TimeoutError()] * 10)
    with pytest.raises(TimeoutError):
        Retry(3, sleep=lambda _: None)(action)
    assert len(left) == 6


@pytest.mark.parametrize("error", [FileNotFoundError(), PermissionError(), ValueError(), FileExistsError()])
def test_other_errors_are_not(error):
    action, left = failing([error, error])
    with pytest.raises(type(error)):
        Retry(5)(action)
    assert len(left) == 1
    assert not is_transient(error)
