"""Short messages between processes of one host, over sockets of the system.

gloo hands every message to a thread of its own at both ends, and each of them has to be woken up: on a host with few
cores that costs more than the message. Here a message is one call of the system where it is sent, and one where it is
taken, on the thread that wants it.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import struct
import sys
import time
import weakref
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["Link", "Links", "connect"]

HEADER = struct.Struct("<qq")
"""Of a message: its tag, and the number of bytes that follow."""
LONGEST = 1 << 17
"""Bytes that a message may have."""
ROOM = 4 * LONGEST
"""Bytes that are read at once at most."""
SOCKET_BYTES = 1 << 20
"""Asked of the system for what is on its way; it may grant less."""
TOKEN_BYTES = 16


class LinkError(RuntimeError):
    """The other process is gone, or was silent for too long."""


class Link:
    """A connection to one other process.

    Args:
        sock: connected, of the kind stream.
        links: all of this process, this one included once it is added.
    """

    def __init__(self, sock: socket.socket, links: Links) -> None:
        self.sock = sock
        self.unsent: deque[memoryview] = deque()
        """What the system has not taken yet."""
        self.broken = ""
        """Why nothing more can come or go."""
        self._links = links
        self._posted: dict[int, deque[_Awaited]] = {}
        self._early: dict[int, deque[bytes]] = {}
        self._room = bytearray(ROOM)
        self._view = memoryview(self._room)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._room))
        self._filled = 0
        sock.setblocking(True)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)

    def send(self, tag: int, tensor: Tensor) -> _Left:
        """Start to send.

        Args:
            tag: of the message.
            tensor: 1-D uint8 on the CPU, of at most `LONGEST` bytes; may be changed as soon as this returns.
        """
        size = tensor.numel()
        header = HEADER.pack(tag, size)
        payload = (ctypes.c_char * size).from_address(tensor.data_ptr())
        if not self.unsent and not self.broken:
            try:
                sent = self.sock.sendmsg([header, payload], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self.broken = str(error)
                sent = 0
            if sent == HEADER.size + size:
                return _Left(self, True)
            self.unsent.append(memoryview(header + bytes(payload))[sent:])
        else:
            self.unsent.append(memoryview(header + bytes(payload)))
        return _Left(self, False)

    def flush(self) -> None:
        """Send what the system takes without waiting."""
        while self.unsent and not self.broken:
            try:
                sent = self.sock.send(self.unsent[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                self.broken = str(error)
                return
            if sent == len(self.unsent[0]):
                self.unsent.popleft()
            else:
                self.unsent[0] = self.unsent[0][sent:]

    def post(self, tag: int, buffer: Tensor) -> _Awaited:
        """Say where the next message of a tag goes.

        Args:
            tag: of the message.
            buffer: 1-D uint8 on the CPU, at least as long as the message.
        """
        awaited = _Awaited(self, buffer)
        early = self._early.get(tag)
        if early:
            awaited.take(early.popleft())
        else:
            self._posted.setdefault(tag, deque()).append(awaited)
        return awaited

    def receive(self, flags: int = 0) -> None:
        """Take what has come, and wait for some of it unless `flags` say not to."""
        try:
            count = self.sock.recv_into(self._view[self._filled :], 0, flags)
        except BlockingIOError:
            return
        except OSError as error:
            self.broken = str(error)
            return
        if count == 0:
            self.broken = "the connection ended"
            return
        self._filled += count
        at = 0
        while self._filled - at >= HEADER.size:
            tag, size = HEADER.unpack_from(self._room, at)
            end = at + HEADER.size + size
            if end > self._filled:
                break
            posted = self._posted.get(tag)
            if posted:
                posted.popleft().fill(self._address + at + HEADER.size, size)
            else:
                self._early.setdefault(tag, deque()).append(bytes(self._view[at + HEADER.size : end]))
            at = end
        if at:
            rest = self._filled - at
            if rest:
                self._room[:rest] = self._room[at : self._filled]
            self._filled = rest


class _Left:
    """A message that was sent, or waits for the system to take it."""

    __slots__ = ("_done", "_link")

    def __init__(self, link: Link, done: bool) -> None:
        self._link = link
        self._done = done

    def wait(self, limit: timedelta) -> None:
        """Wait until the system has it."""
        if not self._done:
            link = self._link
            link._links.until(lambda: not link.unsent, link, limit)
            self._done = True


class _Awaited:
    """A message that is expected."""

    __slots__ = ("_buffer", "_done", "_link")

    def __init__(self, link: Link, buffer: Tensor) -> None:
        self._link = link
        self._buffer = buffer
        self._done = False

    def fill(self, address: int, size: int) -> None:
        """Take the message from memory."""
        if size > self._buffer.numel():
            raise LinkError(f"a message of {size} bytes came where at most {self._buffer.numel()} were expected")
        ctypes.memmove(self._buffer.data_ptr(), address, size)
        self._done = True

    def take(self, message: bytes) -> None:
        """Take a message that came early."""
        source = ctypes.create_string_buffer(message, len(message))
        self.fill(ctypes.addressof(source), len(message))

    def wait(self, limit: timedelta) -> None:
        """Wait for the message."""
        link = self._link
        while not self._done:
            if link._links.quiet() and not link.broken:
                before = time.monotonic()
                link.receive()
                if not self._done and time.monotonic() - before >= limit.total_seconds():
                    raise LinkError(f"Timed out after {limit.total_seconds():g} s")
            else:
                link._links.until(lambda: self._done, link, limit)
            if link.broken and not self._done:
                raise LinkError(link.broken)


class Links:
    """The connections of this process to others on its host, by rank."""

    def __init__(self, limit: timedelta) -> None:
        self._links: dict[int, Link] = {}
        self._limit = limit
        self._sockets: list[socket.socket] = []
        # An engine that is just dropped ends its connections too.
        self.close = weakref.finalize(self, _end, self._sockets)
        """End all connections; who waits at their other ends stops."""

    def add(self, rank: int, sock: socket.socket) -> None:
        """Take a connection."""
        seconds = self._limit.total_seconds()
        # The system itself ends a wait that is too long: one call less per message.
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) or 1)
        )
        self._sockets.append(sock)
        self._links[rank] = Link(sock, self)

    def get(self, rank: int) -> Link | None:
        """Return the connection to a rank, if there is one."""
        return self._links.get(rank)

    def __len__(self) -> int:
        return len(self._links)

    def quiet(self) -> bool:
        """Return whether the system has taken all that was sent."""
        return not any(link.unsent for link in self._links.values())

    def until(self, done: Any, wanted: Link, limit: timedelta) -> None:
        """Send and receive on all connections until something is done.

        Args:
            done: tells whether it is.
            wanted: connection that it depends on.
            limit: longest wait.

        Raises:
            LinkError: the connection broke, or nothing happened in time.
        """
        end = time.monotonic() + limit.total_seconds()
        while not done():
            if wanted.broken:
                raise LinkError(wanted.broken)
            left = end - time.monotonic()
            if left <= 0:
                raise LinkError(f"Timed out after {limit.total_seconds():g} s")
            poll, by_number = select.poll(), {}
            for link in self._links.values():
                if not link.broken:
                    by_number[link.sock.fileno()] = link
                    poll.register(link.sock, select.POLLIN | (select.POLLOUT if link.unsent else 0))
            for number, event in poll.poll(left * 1000):
                link = by_number[number]
                if event & select.POLLOUT:
                    link.flush()
                if event & ~select.POLLOUT:
                    link.receive(socket.MSG_DONTWAIT)


def _end(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        with suppress(OSError):  # the other end was faster
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()


def connect(store: Store, rank: int, size: int, limit: timedelta) -> Links:
    """Connect to the other ranks on this host; all ranks call it.

    Args:
        store: of these ranks alone.
        rank: of this process.
        size: number of ranks.
        limit: longest wait for a message later.

    Returns:
        The connections: none where the system has no such sockets, or where VESCALE_PIPE_LINKS is 0.
    """
    links = Links(limit)
    here = _place() if os.environ.get("VESCALE_PIPE_LINKS", "1") != "0" else ""
    name = f"vescale_pipe-{secrets.token_hex(16)}"
    token = secrets.token_bytes(TOKEN_BYTES)
    listener = _listen(name, size) if here else None
    store.set(f"links/{rank}", "\n".join((here if listener else "", name, token.hex())))
    if listener is None:
        return links
    with listener:
        for other in range(rank):
            place, address, secret = store.get(f"links/{other}").split(b"\n")
            if place.decode() == here:
                sock = _dial(address.decode(), bytes.fromhex(secret.decode()), rank)
                store.set(f"links/{other}/{rank}", "1" if sock else "0")
                if sock:
                    links.add(other, sock)
        wanted = set()
        for other in range(rank + 1, size):
            place = store.get(f"links/{other}").split(b"\n")[0]
            if place.decode() == here and store.get(f"links/{rank}/{other}") == b"1":
                wanted.add(other)
        while wanted:
            found = _answer(listener, token)
            if found is not None:
                links.add(*found)
                wanted.discard(found[0])
    return links


def _place() -> str:
    """Return what processes have in common that can meet; empty where there are no such sockets."""
    if sys.platform != "linux":
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return ""


def _listen(name: str, size: int) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")  # without a file, so nothing is left behind
        sock.listen(size)
    except OSError:
        sock.close()
        return None
    return sock


def _dial(address: str, token: bytes, rank: int) -> socket.socket | None:
    """Connect to a rank and say who calls, and that it was told the address by the store."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(f"\0{address}")
        sock.sendall(token + rank.to_bytes(8, "little"))
    except OSError:
        sock.close()
        return None
    return sock


def _answer(listener: socket.socket, token: bytes) -> tuple[int, socket.socket] | None:
    """Take a call; None if it is of somebody else."""
    sock, _ = listener.accept()
    sock.settimeout(10)
    greeting = b""
    with suppress(OSError):
        while len(greeting) < TOKEN_BYTES + 8 and (more := sock.recv(TOKEN_BYTES + 8 - len(greeting))):
            greeting += more
    if not secrets.compare_digest(greeting[:TOKEN_BYTES], token):
        sock.close()
        return None
    return int.from_bytes(greeting[TOKEN_BYTES:], "little"), sock
