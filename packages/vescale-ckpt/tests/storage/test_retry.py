"""Which errors are worth another try, how many tries, and how long between them."""

import asyncio
import errno
from types import SimpleNamespace

import pytest

from vescale_ckpt._storage.retry import Retry, ShortReadError, is_transient


def named(name: str, base: type[Exception] = Exception, **attributes: object) -> Exception:
    """Make an error of a client that is not installed."""
    error = type(name, (base,), {})("from a client")
    vars(error).update(attributes)
    return error


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(),
        BrokenPipeError(),
        TimeoutError(),
        asyncio.TimeoutError(),
        OSError(errno.EBUSY, "SlowDown"),
        OSError(errno.EIO, "500"),
        OSError(errno.ESTALE, "stale"),
        ShortReadError("half"),
        named("FSTimeoutError"),
        named("ServerDisconnectedError", type("ClientConnectionError", (Exception,), {})),
        named("EndpointConnectionError", type("HTTPClientError", (Exception,), {})),
        named("HttpError", code=503),
        named("HttpError", code="429"),
        named("ClientResponseError", status=502),
        named("HttpResponseError", status_code=500),
        named("HTTPError", response=SimpleNamespace(status_code=504)),
        named("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_an_error_of_the_way_is_transient(error: Exception) -> None:
    assert is_transient(error)
    wrapped = ValueError("from the layer above")
    wrapped.__cause__ = error
    assert is_transient(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        FileExistsError(),
        PermissionError(),
        IsADirectoryError(),
        NotADirectoryError(),
        OSError(errno.ENOSPC, "full"),
        OSError("no number"),
        ValueError("bad"),
        KeyError("x"),
        named("HttpError", code=404),
        named("ClientError", response={"ResponseMetadata": {"HTTPStatusCode": 403}}),
        named("ClientError", response={"ResponseMetadata": None}),
        named("Odd", code="E5", status=None),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_an_error_of_the_request_is_final(error: Exception) -> None:
    assert not is_transient(error)


def test_an_answer_is_final_whatever_it_was_raised_from() -> None:
    error = FileNotFoundError("no such key")
    error.__cause__ = ConnectionResetError()
    assert not is_transient(error)


def test_the_number_of_tries_is_bounded() -> None:
    waits: list[float] = []
    tries = 0

    def fail() -> None:
        nonlocal tries
        tries += 1
        raise ConnectionResetError(f"number {tries}")

    with pytest.raises(ConnectionResetError, match="number 4"):
        Retry(3, sleep=waits.append, jitter=lambda: 1.0)(fail)
    assert waits == [0.2, 0.4, 0.8]
    with pytest.raises(ConnectionResetError, match="number 5"):
        Retry(0, sleep=waits.append)(fail)


def test_a_final_error_is_not_tried_again() -> None:
    tries: list[int] = []

    def fail() -> None:
        tries.append(1)
        raise PermissionError

    with pytest.raises(PermissionError):
        Retry(3, sleep=lambda seconds: tries.append(2))(fail)
    assert tries == [1]


def test_waits_grow_to_a_limit_and_jitter_halves_them_at_most() -> None:
    longest = list(Retry(6, first=1.0, longest=10.0, jitter=lambda: 1.0).waits())
    assert longest == [1, 2, 4, 8, 10, 10]
    assert list(Retry(6, first=1.0, longest=10.0, jitter=lambda: 0.0).waits()) == [wait / 2 for wait in longest]
    assert max(Retry(5000).waits()) <= 20
    drawn = set(Retry(50, first=20.0).waits())
    assert len(drawn) > 40
    assert all(10 <= wait <= 20 for wait in drawn)


def test_an_exit_is_never_swallowed() -> None:
    def leave() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Retry(3, sleep=lambda seconds: pytest.fail("waited"))(leave)
