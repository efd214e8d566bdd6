"""Find and load the plugins that this package asks.

Every vescale package holds the same copy of this file: a shared package would be a dependency of all.
The manager is built at the first hook call, never at import, so that packages may serve each other.
A plugin that cannot load stops the program: going on without it could change numbers quietly.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import pluggy

from . import hookspecs

PROJECT = __name__.partition(".")[0]
GROUP = "vescale"
OFF = "VESCALE_PLUGINS_OFF"

logger = logging.getLogger(PROJECT)


class PluginError(RuntimeError):
    """A plugin could not be loaded, or answered a hook with something that breaks the contract."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed plugin, as its host sees it."""

    name: str
    """Name of the entry point, which `VESCALE_PLUGINS_OFF` takes."""
    distribution: str
    """Name of the distribution that installed it."""
    version: str
    """Version of that distribution."""
    hooks: tuple[str, ...]
    """Hooks of this host that it implements, sorted."""


@functools.cache
def manager() -> pluggy.PluginManager:
    """Return the plugin manager of this package, loading all plugins at the first call.

    Plugins are asked in the order of their names, unless they say `tryfirst` or `trylast`.

    Raises:
        PluginError: if a plugin cannot be imported, breaks a contract, or has the name of another one.
    """
    plugins = pluggy.PluginManager(PROJECT)
    plugins.add_hookspecs(hookspecs)
    off = switched_off()
    owners: dict[str, str] = {}
    # pluggy asks the plugin that was registered last first.
    for entry in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda e: e.name, reverse=True):
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
        if off & {entry.name, "all"}:
            continue
        try:
            if entry.name in owners:
                raise ValueError(f"{owners[entry.name]} has a plugin of this name too")
            owners[entry.name] = owner
            plugins.register(entry.load(), name=entry.name)
            plugins.check_pending()
        except Exception as error:
            raise PluginError(
                f"{PROJECT}: plugin {entry.name!r} from {owner} ({entry.value}) did not load: "
                f"{type(error).__name__}: {error}\n"
                f"Fix or upgrade {owner}, or switch the plugin off with {OFF}={entry.name}."
            ) from error
    if off and os.environ.get("RANK", "0") == "0":
        logger.warning("%s: plugins switched off by %s: %s", PROJECT, OFF, ", ".join(sorted(off)))
    for rivals in _rivals(plugins):
        warnings.warn(rivals, RuntimeWarning, stacklevel=2)
    return plugins


def switched_off() -> frozenset[str]:
    """Return the plugin names in the environment variable `VESCALE_PLUGINS_OFF`."""
    return frozenset(name.strip() for name in os.environ.get(OFF, "").split(",") if name.strip())


def describe() -> list[Plugin]:
    """List the loaded plugins, sorted by name."""
    installed = {entry.name: entry.dist for entry in importlib.metadata.entry_points(group=GROUP)}
    plugins = []
    for name, plugin in manager().list_name_plugin():
        if plugin is None:
            continue
        hooks = sorted(caller.name for caller in manager().get_hookcallers(plugin) or ())
        dist = installed.get(name)
        owner = (dist.name, dist.version) if dist else ("registered by hand", "")
        plugins.append(Plugin(name, *owner, tuple(hooks)))
    return sorted(plugins, key=lambda plugin: plugin.name)


def fingerprint() -> str:
    """Return a short hash of the plugins that serve this host; it must be the same on every rank."""
    return hashlib.sha256(repr([plugin for plugin in describe() if plugin.hooks]).encode()).hexdigest()[:16]


def reset() -> None:
    """Forget the manager: the next hook call looks for plugins again (for tests)."""
    manager.cache_clear()


def check_answer(hook: str, answer: object, *members: str) -> None:
    """Check that the answer of a plugin has the members that the contract of `hook` asks for.

    Raises:
        PluginError: naming the plugins that implement `hook` and what the answer lacks.
    """
    missing = [member for member in members if not hasattr(answer, member)]
    if missing:
        raise wrong_answer(hook, answer, f"it lacks {', '.join(missing)}")


def wrong_answer(hook: str, answer: object, reason: str) -> PluginError:
    """Make the error for a bad answer of `hook`, naming the plugins that implement it."""
    names = _asked_in_order(getattr(manager().hook, hook))
    return PluginError(
        f"{PROJECT}: {hook} was answered with {answer!r:.200}, but {reason} (see {PROJECT}/hookspecs.py).\n"
        f"It is implemented by: {', '.join(names)}. Fix the plugin, or switch it off with {OFF}=name."
    )


def _asked_in_order(caller: pluggy.HookCaller) -> list[str]:
    return [impl.plugin_name for impl in reversed(caller.get_hookimpls())]


def _rivals(plugins: pluggy.PluginManager) -> Iterator[str]:
    """Tell the hooks that hand out one object for the whole program, but have several providers.

    A first-result hook with arguments is no conflict: each provider answers for what it knows.
    """
    for name in sorted(vars(plugins.hook)):
        caller: pluggy.HookCaller = getattr(plugins.hook, name)
        names = _asked_in_order(caller)
        single = caller.spec is not None and caller.spec.opts["firstresult"] and not caller.spec.argnames
        if single and len(names) > 1:
            yield (
                f"{PROJECT}: {name} is implemented by {len(names)} plugins: {', '.join(names)}. "
                f"{names[0]!r} is asked first and the others only if it declines; "
                f"switch the others off with {OFF}={','.join(names[1:])}."
            )
