"""Which storage a path means: a folder, or what is registered for its scheme."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from .. import _hooks, _plugins
from ..errors import CheckpointError
from .interface import Storage
from .local import LocalStorage

if TYPE_CHECKING:
    import pluggy

Factory = Callable[..., Any]

ANY = "*"
"""Scheme of the factory that is asked for whatever nobody else registered."""

BUILT_IN = ("", "file")

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")
"""Also chains such as `simplecache::s3://`."""

EATEN = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")
"""What is left of a URL after pathlib joined its two slashes."""


class Registry:
    """Factories of storages by scheme; what plugins get with `vescale_register_storage`.

    Example:
        >>> from vescale_ckpt.testing import MemoryStorage
        >>> schemes = Registry()
        >>> schemes.register("mine", MemoryStorage)
        >>> schemes.open("mine://here", fsync=True, retries=5).url
        'mine://here'
    """

    def __init__(self) -> None:
        self._factories: dict[str, Factory] = {}

    def register(self, scheme: str, factory: Factory) -> None:
        """Add the storage for `scheme://...`.

        Args:
            scheme: what stands before `://`, in small letters; "*" for all that nobody else takes.
            factory: called with the whole URL, and with `fsync` and `retries` where it has arguments of these names.

        Raises:
            ValueError: the scheme is taken, or is none.
        """
        if scheme != ANY and not SCHEME.fullmatch(f"{scheme}://"):
            raise ValueError(f"scheme must be letters, digits, '+', '-' and '.', or \"*\", but is {scheme!r}")
        if scheme != scheme.lower() or scheme in BUILT_IN:
            raise ValueError(f"scheme {scheme!r} cannot be registered: use small letters; file:// is built in")
        if not callable(factory):
            raise ValueError(f"the factory for {scheme!r} must be callable, but is {factory!r:.200}")
        other = self._factories.setdefault(scheme, factory)
        if other is not factory:
            raise ValueError(
                f"scheme {scheme!r} is registered twice: by {_name(other)} and by {_name(factory)}. "
                f"Switch the plugin of one of them off with {_plugins.OFF}=name"
            )

    def open(self, url: str, *, fsync: bool, retries: int) -> Storage:
        """Make the storage for a URL.

        Raises:
            ValueError: nobody knows its scheme; the text says what to install.
        """
        scheme = url.partition("://")[0].lower()
        factory = self._factories.get(scheme) or self._factories.get(ANY)
        if factory is None:
            known = ", ".join(sorted(f"{name}://" for name in ("file", *self._factories)))
            raise ValueError(
                f"no storage for {url!r}: nothing is registered for {scheme}://, only {known}. "
                'Install "vescale-ckpt[fsspec]" for object stores, or the plugin that brings this scheme'
            )
        wishes = {"fsync": fsync, "retries": retries}
        parameters = inspect.signature(factory).parameters
        storage = factory(url, **{name: value for name, value in wishes.items() if name in parameters})
        return _check(storage, f"the storage that {_name(factory)} made for {url!r}")


def open_storage(where: str | os.PathLike[str] | Storage, *, fsync: bool = True, retries: int = 5) -> Storage:
    """Open a place for checkpoints.

    Args:
        where: a folder, `file://...`, a URL of any scheme that fsspec or a plugin knows, or a storage as it is.
            "~" is the home folder.
        fsync: wait until bytes are on the device, for storages that have a choice.
        retries: how often a request is tried again after a transient error, for storages that have any.

    Returns:
        The storage; nothing is written yet.

    Raises:
        StorageError: a folder that is none, or a client that failed.
        ValueError: an unknown scheme, or no path at all.
        TypeError: neither a path nor a storage.

    Example:
        >>> open_storage("/tmp/run").url
        '/tmp/run'
        >>> open_storage("memory://run").random_write
        False
    """
    if isinstance(where, str | os.PathLike):
        return _open_path(where, fsync, retries)
    return _check(where, "where")


def _open_path(where: str | os.PathLike[str], fsync: bool, retries: int) -> Storage:
    path = os.fspath(where)
    if not isinstance(path, str):
        raise TypeError(f"where must be a str, not {type(path).__name__}: use os.fsdecode")
    if not path or "\0" in path:
        raise ValueError(f'where must be the path of a folder or a URL, but is {path!r}; "." is the current folder')
    if isinstance(where, str) and SCHEME.match(where):
        if not where.lower().startswith("file://"):
            return registry().open(where, fsync=fsync, retries=retries)
        parts = urlsplit(where)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ValueError(f"where is {where!r}, but a file URL is file:///absolute/path: it names no other machine")
        path = unquote(where.partition("://")[2].removeprefix(parts.netloc))
    elif not isinstance(where, str) and EATEN.match(path):
        raise ValueError(f"where is {where!r}: pathlib has joined the two slashes of a URL; pass the URL as a str")
    return LocalStorage(os.path.expanduser(path), fsync=fsync)


def registry() -> Registry:
    """Return the schemes that plugins have registered; they are asked once."""
    return _registry(_plugins.manager())


@functools.lru_cache(maxsize=1)
def _registry(manager: pluggy.PluginManager) -> Registry:
    schemes = Registry()
    _hooks.register_storage(schemes)
    return schemes


def _check(storage: Any, what: str) -> Storage:
    missing = [name for name in _members() if not hasattr(storage, name)]
    if missing:
        raise TypeError(
            f"{what} must be a path, a URL or a storage, but is {storage!r:.200} ({type(storage).__name__}): "
            f"it lacks {', '.join(missing)}"
        )
    found: Storage = storage
    return found


def _members() -> list[str]:
    return sorted(name for name in vars(Storage) if not name.startswith("_"))


def _name(factory: Factory) -> str:
    name = getattr(factory, "__qualname__", None)
    return f"{factory.__module__}.{name}" if name else repr(factory)


def open_fsspec(url: str, retries: int) -> Storage:
    """Make the storage for a URL that fsspec knows: what this package registers for all schemes.

    Raises:
        ValueError: fsspec does not know the scheme, or its client is not installed.
        StorageError: the client failed.
    """
    from .failures import storage_error
    from .fsspec_storage import FsspecStorage

    try:
        return FsspecStorage(url, retries=retries)
    except ImportError as error:
        raise ValueError(
            f"no storage for {url!r}: {error}. Install the client that fsspec names; "
            '"vescale-ckpt[fsspec]" brings fsspec itself'
        ) from error
    except (ValueError, CheckpointError) as error:
        raise ValueError(f"no storage for {url!r}: {error} (asked fsspec; no plugin registered the scheme)") from error
    except Exception as error:
        raise storage_error("open", "", url, error) from error
