"""Waiting until a number in shared memory changes, without spinning: Linux futexes, called through ctypes."""

from __future__ import annotations

import ctypes
import platform
import sys

__all__ = ["SUPPORTED", "fence", "wait", "wake"]

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
"""Number of the system call."""
_WAIT, _WAKE, _EVERYBODY = 0, 1, 0x7FFFFFFF

SUPPORTED = sys.platform == "linux" and sys.maxsize > 2**32 and _FUTEX >= 0
"""Whether this machine has it."""


class _Duration(ctypes.Structure):
    """`struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if SUPPORTED:
    _call = ctypes.CDLL(None).syscall
    _call.restype = ctypes.c_long
    _call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.POINTER(_Duration),
        ctypes.c_void_p,
        ctypes.c_uint32,
    )


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the 32-bit number at an address is still `seen`, until somebody calls `wake`.

    It may also return for no reason, such as a signal.

    Args:
        address: of a number in memory that processes share.
        seen: what was read there.
        seconds: how long at most.
    """
    duration = _Duration(int(seconds), int(seconds % 1 * 1e9))
    _call(_FUTEX, address, _WAIT, seen, ctypes.byref(duration), None, 0)


def wake(address: int) -> None:
    """Wake all that sleep at an address; call it after the number there was changed."""
    _call(_FUTEX, address, _WAKE, _EVERYBODY, None, None, 0)


if platform.machine() == "x86_64":

    def fence(address: int) -> None:
        """Order memory accesses before and after; x86 does that by itself for what is needed here."""

else:

    def fence(address: int) -> None:
        """Order memory accesses before and after: the kernel has a full barrier in this call."""
        wake(address)
