"""A storage in a folder of the local file system, or of a network one that is mounted.

What a crash may leave behind is decided by the order of three calls: fsync of a file, then its name, then fsync of
the folder. No path may lead out of the root, not even through a symbolic link that came with the files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator

from ..errors import FormatError, StorageError
from .failures import storage_error
from .interface import TEMPORARY, Entry, check_folder_to_remove, check_new_path, check_path, is_temporary
from .local_file import LocalSink, LocalSource, write_all
from .space import free_bytes

ATTEMPTS = 10
"""How often a file is begun again whose folder somebody has removed meanwhile."""
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
"""What file systems without hard links say."""


class LocalStorage:
    """A folder on a local or mounted file system.

    Args:
        root: the folder; made at the first write.
        fsync: wait until bytes and names are on the device. Without it a loss of power may lose or tear what was
            written last; a crash of the process alone cannot.

    Raises:
        StorageError: `root` is a file, or may not be looked at.
    """

    random_write = True

    def __init__(self, root: str | os.PathLike[str], *, fsync: bool = True) -> None:
        # Links that lead to the root are the user's; those below it came with the files.
        self.root = os.path.realpath(root)
        self.url = self.root
        self.fsync = fsync
        self._lock = threading.Lock()
        self._settled: set[str] = set()
        """Folders whose own names are known to survive a loss of power."""
        try:
            is_folder = stat.S_ISDIR(os.stat(self.root).st_mode)
        except FileNotFoundError:
            is_folder = True
        except OSError as error:
            raise storage_error("open", "", self.url, error) from error
        if not is_folder:
            raise storage_error("open", "", self.url, NotADirectoryError(errno.ENOTDIR, "it is a file"))

    def __repr__(self) -> str:
        return f"LocalStorage({self.root!r}, fsync={self.fsync})"

    # ---- files

    def create(self, path: str) -> LocalSink:
        """Begin a new file; see Storage.create."""
        with self._told("create", check_new_path(path)):
            real, fd = self._open_new(path)
        return LocalSink(fd, real, path, self)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Write a small file whole or not at all; see Storage.put.

        On file systems without hard links an exclusive put that is killed half-way may leave a part of the file.
        """
        check_new_path(path)
        with self._told("write", path, len(data)):
            for _ in range(ATTEMPTS):
                try:
                    self._put(path, data, exclusive)
                    return
                except FileNotFoundError:  # a garbage collection removed the folder meanwhile
                    continue
            raise OSError(errno.EBUSY, "others keep removing its folder")

    def _put(self, path: str, data: bytes, exclusive: bool) -> None:
        folder, _, name = path.rpartition("/")
        if exclusive and os.path.lexists(self._inside(path)):
            raise FileExistsError(errno.EEXIST, "exists, and is not to be replaced", path)
        temporary = f"{folder}/" * bool(folder) + f"{TEMPORARY}{secrets.token_hex(8)}"
        real, fd = self._open_new(temporary)
        target = os.path.join(os.path.dirname(real), name)
        try:
            try:
                write_all(fd, 0, [memoryview(data)])
                self.flush(fd)
            finally:
                os.close(fd)
            if exclusive:
                self._publish_new(real, target, data)
            else:
                os.replace(real, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(real)
            raise
        self._settle(os.path.dirname(target))

    def _publish_new(self, temporary: str, target: str, data: bytes) -> None:
        try:
            os.link(temporary, target, follow_symlinks=False)
        except FileExistsError:
            # NFS may do the work, lose the answer and then be asked again.
            if os.stat(temporary).st_nlink != 2:
                raise
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            self._write_new(target, data)
        os.unlink(temporary)

    def _write_new(self, target: str, data: bytes) -> None:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, 0, [memoryview(data)])
            self.flush(fd)
        except BaseException:
            os.unlink(target)
            raise
        finally:
            os.close(fd)

    def get(self, path: str, limit: int) -> bytes:
        """Read a small file; see Storage.get."""
        source = self.open(path)
        try:
            if source.size > limit:
                raise FormatError(
                    f"{path!r} in {self.url} has {source.size} bytes, but a file of its kind has {limit} at most; "
                    "it is damaged or not what it claims to be"
                )
            data = bytearray(source.size)
            source.read_into(0, [memoryview(data)])
            return bytes(data)
        finally:
            source.close()

    def open(self, path: str) -> LocalSource:
        """Open a file for reading; see Storage.open."""
        with self._told("open", check_path(path)):
            # Without O_NONBLOCK a pipe in the place of the file would block for ever.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self._inside(path), flags)
            try:
                found = os.fstat(fd)
                if stat.S_ISDIR(found.st_mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EINVAL, "it is a device, a pipe or a socket where a file was expected")
                # Reads go up the file: cold ones of 1 MiB gain a tenth by a larger read-ahead.
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            except BaseException:
                os.close(fd)
                raise
        return LocalSource(fd, found.st_size, path, self)

    def remove(self, path: str) -> None:
        """Remove a file or a link, not what it leads to; see Storage.remove."""
        with self._told("remove", check_path(path)), contextlib.suppress(FileNotFoundError):
            os.unlink(self._inside(path, parent_only=True))

    # ---- folders

    def list(self, folder: str, *, temporary: bool = False) -> list[Entry]:
        """List a folder; see Storage.list."""
        with self._told("list", check_path(folder, folder=True)):
            try:
                found = os.scandir(self._inside(folder))
            except FileNotFoundError:
                return []
            with found:
                entries = [self._entry(item) for item in found if temporary or not is_temporary(item.name)]
        return sorted((entry for entry in entries if entry), key=lambda entry: entry.name)

    def _entry(self, item: os.DirEntry[str]) -> Entry | None:
        if item.is_symlink() and not self._is_inside(os.path.realpath(item.path)):
            return None
        try:
            about = item.stat()
        except FileNotFoundError:  # removed since, or a link to nothing
            return None
        except OSError:
            if item.is_symlink():  # in a circle
                return None
            raise
        is_folder = stat.S_ISDIR(about.st_mode)
        return Entry(item.name, is_folder, 0 if is_folder else about.st_size, about.st_mtime)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all in it; a link is removed, not what it leads to; see Storage.remove_folder."""
        with self._told("remove", check_folder_to_remove(folder)):
            real = self._inside(folder, parent_only=True)
            self._forget(real)
            if os.path.islink(real):
                os.unlink(real)
                return
            # Another rank may be removing the same folder: what is gone already is fine.
            for _ in range(100):
                try:
                    shutil.rmtree(real)
                except FileNotFoundError:
                    if os.path.lexists(real):
                        continue
                return
            raise OSError(errno.EBUSY, "others keep changing the folder")

    def sync(self, folder: str) -> None:
        """Make the names in a folder, and its own, survive a loss of power; see Storage.sync."""
        with self._told("sync", check_path(folder, folder=True)), contextlib.suppress(FileNotFoundError):
            self._settle(self._inside(folder))

    def free_bytes(self) -> int | None:
        """Return the bytes that are free for this user; None where the file system compresses or does not tell."""
        return free_bytes(self.root)

    # ---- inside

    def flush(self, fd: int) -> None:
        """Wait until the bytes of a file or the names in a folder are on the device, unless that is switched off."""
        if self.fsync:
            os.fsync(fd)

    @contextlib.contextmanager
    def _told(self, action: str, path: str, needed: int | None = None) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError, StorageError):
            raise
        except OSError as error:
            raise storage_error(action, path, self.url, error, needed=needed) from error

    def _is_inside(self, real: str) -> bool:
        return real == self.root or real.startswith(os.path.join(self.root, ""))

    def _inside(self, path: str, *, parent_only: bool = False) -> str:
        """Return where a path leads once all links are followed; with `parent_only` a link in the end is kept."""
        full = os.path.join(self.root, path) if path else self.root
        if parent_only:
            real = os.path.join(os.path.realpath(os.path.dirname(full)), os.path.basename(full))
        else:
            real = os.path.realpath(full)
        if not self._is_inside(real):
            message = (
                f"{path!r} in {self.url} leads to {real}, out of the storage, through a symbolic link; "
                "such links are not followed: copy the files to where the link is"
            )
            raise StorageError(message)
        return real

    def _open_new(self, path: str) -> tuple[str, int]:
        """Create a file and the folders above; return where it is and its descriptor."""
        real = self._inside(path, parent_only=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        for _ in range(ATTEMPTS):
            self._make_folder(os.path.dirname(real))
            try:
                return real, os.open(real, flags, 0o666)
            except FileNotFoundError:  # somebody removed the folder between the two calls
                continue
        raise OSError(errno.EBUSY, "others keep removing its folder")

    def _make_folder(self, real: str, attempts: int = ATTEMPTS) -> None:
        try:
            os.mkdir(real)
        except FileExistsError:
            if not os.path.isdir(real):
                raise NotADirectoryError(errno.ENOTDIR, "it is a file", real) from None
            return
        except FileNotFoundError:
            if not attempts:  # not a folder that somebody keeps removing, but one that takes none, as in /proc
                raise PermissionError(errno.EACCES, "no folder can be made here", real) from None
            self._make_folder(os.path.dirname(real))
            self._make_folder(real, attempts - 1)
            return
        self._flush_folder(os.path.dirname(real))
        with self._lock:
            self._settled.add(real)

    def _settle(self, real: str) -> None:
        """Flush a folder, and above it those whose names another process may have made just now."""
        self._flush_folder(real)
        while real != self.root and real not in self._settled:
            above = os.path.dirname(real)
            self._flush_folder(above)
            with self._lock:
                self._settled.add(real)
            real = above

    def _flush_folder(self, real: str) -> None:
        if not self.fsync:
            return
        fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network file systems cannot flush a folder, because names are durable at once.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(fd)

    def _forget(self, real: str) -> None:
        with self._lock:
            self._settled = {path for path in self._settled if path != real and not path.startswith(real + "/")}
