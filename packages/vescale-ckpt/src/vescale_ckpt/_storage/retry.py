"""Try again what a network has spoilt: transient errors only, a bounded number of times, less and less often."""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that say something about the request: asking again gives the same answer."""

TRANSIENT_ERRNO = {
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH,
    errno.EINTR, errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EPIPE, errno.ESTALE,
    errno.ETIMEDOUT,
}  # fmt: skip

TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
"""HTTP: too late, too early, too many, and the server's own failures."""

TRANSIENT_NAMES = {
    # asyncio before Python 3.11, and the time limit of fsspec
    "TimeoutError", "FSTimeoutError",
    # aiohttp
    "ClientConnectionError", "ClientPayloadError", "ServerTimeoutError",
    # botocore
    "HTTPClientError", "IncompleteReadError", "ResponseStreamingError",
    # requests and urllib3
    "ConnectionError", "Timeout", "ChunkedEncodingError", "ProtocolError", "MaxRetryError",
    # azure, google
    "ServiceRequestError", "ServiceResponseError", "TransportError",
}  # fmt: skip
"""Classes of clients that may not be installed, so they are known by name."""


class ShortReadError(OSError):
    """A server sent fewer bytes than the range that was asked for; asked again, it may send all."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EIO, message)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how long to try.

    Example:
        >>> answers = [ConnectionResetError(), TimeoutError(), "bytes"]
        >>> def ask():
        ...     answer = answers.pop(0)
        ...     if isinstance(answer, Exception):
        ...         raise answer
        ...     return answer
        >>> waits = []
        >>> Retry(sleep=waits.append, jitter=lambda: 1.0)(ask)
        'bytes'
        >>> waits
        [0.2, 0.4]
    """

    retries: int = 5
    """Tries after the first one."""
    first: float = 0.2
    """Seconds before the second try; doubled each time."""
    longest: float = 20.0
    """Seconds between two tries at most."""
    sleep: Callable[[float], object] = time.sleep
    """Waits; for tests."""
    jitter: Callable[[], float] = random.random
    """A number in [0, 1): waits are stretched from half to whole by it, so that ranks do not ask all at once."""

    def __call__(self, action: Callable[[], T]) -> T:
        """Call `action` until it returns, raises an error that is not transient, or was tried often enough."""
        waits = self.waits()
        while True:
            try:
                return action()
            except Exception as error:
                wait = next(waits, None)
                if wait is None or not is_transient(error):
                    raise
            self.sleep(wait)

    def waits(self) -> Iterator[float]:
        """Yield the seconds to wait before each further try."""
        for attempt in range(self.retries):
            yield min(self.longest, self.first * 2.0 ** min(attempt, 60)) * (0.5 + 0.5 * self.jitter())


def is_transient(error: BaseException) -> bool:
    """Tell whether the same request may work a moment later.

    Looks at the error and at what it was raised from: clients wrap the errors of the layer below.
    """
    chain: BaseException | None = error
    for _ in range(8):
        if chain is None or isinstance(chain, FINAL):
            return False
        if _is_transient_itself(chain):
            return True
        chain = chain.__cause__
    return False


def _is_transient_itself(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError) and error.errno in TRANSIENT_ERRNO:
        return True
    if any(cls.__name__ in TRANSIENT_NAMES for cls in type(error).__mro__):
        return True
    return _status(error) in TRANSIENT_STATUS


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that an error of some client carries."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        about = response.get("ResponseMetadata")
        response = about.get("HTTPStatusCode") if isinstance(about, dict) else None
    places = [response, getattr(response, "status_code", None)]
    places += [getattr(error, name, None) for name in ("status", "code", "status_code")]
    for value in places:
        if isinstance(value, int):
            return value
        if isinstance(value, str) and value.isdigit():
            return int(value)
    return None
