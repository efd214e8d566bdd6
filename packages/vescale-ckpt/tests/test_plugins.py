"""Plugin loading, tried with toy distributions that are broken, old, new, doubled or switched off.

Every vescale package holds the same copy of this file: the package under test is the one it lies in.
"""

import importlib
import importlib.metadata
import inspect
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[1].name.replace("-", "_")
FIVE = ("dtensor", "rng", "comm", "pipe", "ckpt")
SIBLINGS = {f"vescale_{name}" for name in FIVE} - {PACKAGE}

hookspecs = importlib.import_module(f"{PACKAGE}.hookspecs")
main = importlib.import_module(f"{PACKAGE}.__main__")
plugins = importlib.import_module(f"{PACKAGE}._plugins")

SPECS = {name: spec for name, spec in vars(hookspecs).items() if name.startswith("vescale_")}
FIRSTRESULT = {name for name, spec in SPECS.items() if getattr(spec, f"{PACKAGE}_spec")["firstresult"]}
PROVIDERS = sorted(name for name in FIRSTRESULT if not inspect.signature(SPECS[name]).parameters)
HOOK = min(set(SPECS) - set(PROVIDERS))
ARGUMENTS = list(inspect.signature(SPECS[HOOK]).parameters)
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a toy distribution: one module and one entry point. The real plugins are off."""
    monkeypatch.setenv(plugins.OFF, ",".join(FIVE))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.reset()
    before = set(sys.modules)

    def install_toy(name: str, source: str, distribution: str = "", version: str = "1.0") -> None:
        distribution = distribution or f"toy-{name}"
        module = f"{distribution.replace('-', '_')}_plugin"
        marker = f"import pluggy\nhookimpl = pluggy.HookimplMarker({PACKAGE!r})\n"
        (tmp_path / f"{module}.py").write_text(marker + source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[vescale]\n{name} = {module}\n")
        importlib.invalidate_caches()
        plugins.reset()

    yield install_toy
    plugins.reset()
    for module in set(sys.modules) - before:
        if module.startswith("toy_"):
            del sys.modules[module]


def implementation(hook: str, arguments: list[str], body: str = "return None", options: str = "") -> str:
    return f"@hookimpl({options})\ndef {hook}({', '.join(arguments)}):\n    {body}\n"


def call(hook: str) -> Any:
    return getattr(plugins.manager().hook, hook)(**dict.fromkeys(inspect.signature(SPECS[hook]).parameters))


def test_a_good_plugin_is_called_and_described(install: Install) -> None:
    install("toy", implementation(HOOK, ARGUMENTS, "return 'here'", "tryfirst=True"), version="2.5")
    assert call(HOOK) in ("here", ["here"])
    (found,) = [plugin for plugin in plugins.describe() if plugin.name == "toy"]
    assert found == plugins.Plugin("toy", "toy-toy", "2.5", (HOOK,))


def test_an_old_plugin_may_take_fewer_arguments(install: Install) -> None:
    for hook in SPECS:
        install(f"old-{hook}", implementation(hook, []))
        call(hook)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import a_module_that_is_missing", "No module named 'a_module_that_is_missing'"),
        ("raise ValueError('half a plugin')", "ValueError: half a plugin"),
        ("def broken(:", "SyntaxError"),
        (implementation(HOOK, [*ARGUMENTS, "from_the_future"]), "from_the_future"),
        (implementation("vescale_hook_of_a_newer_host", []), "vescale_hook_of_a_newer_host"),
    ],
    ids=["import", "raises", "syntax", "new argument", "new hook"],
)
def test_a_bad_plugin_stops_and_names_its_distribution(install: Install, source: str, text: str) -> None:
    install("toy", source, version="3.1")
    for _ in range(2):
        with pytest.raises(plugins.PluginError, match=r"toy-toy 3\.1") as caught:
            plugins.manager()
        message = str(caught.value)
        assert message.startswith(f"{PACKAGE}: plugin 'toy'")
        assert text in message
        assert "VESCALE_PLUGINS_OFF=toy" in message
        assert caught.value.__cause__ is not None


def test_an_optional_hook_may_be_unknown_here(install: Install) -> None:
    install("toy", implementation("vescale_hook_of_a_newer_host", [], options="optionalhook=True"))
    assert "toy" in [plugin.name for plugin in plugins.describe()]


def test_a_hook_of_another_host_is_ignored(install: Install) -> None:
    install("toy", "@pluggy.HookimplMarker('another_host')\ndef vescale_anything(): ...\n")
    (found,) = [plugin for plugin in plugins.describe() if plugin.name == "toy"]
    assert found.hooks == ()


def test_two_plugins_of_one_name_are_an_error_that_names_both(install: Install) -> None:
    install("toy", "", distribution="toy-one")
    install("toy", "", distribution="toy-two")
    with pytest.raises(plugins.PluginError) as caught:
        plugins.manager()
    assert "toy-one 1.0" in str(caught.value)
    assert "toy-two 1.0" in str(caught.value)


@pytest.mark.parametrize("off", ["toy", " other, toy ", "all"])
def test_a_plugin_that_is_off_is_not_imported_and_this_is_logged_once(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, off: str
) -> None:
    install("toy", "raise ValueError")
    monkeypatch.setenv(plugins.OFF, off)
    plugins.reset()
    with caplog.at_level(logging.WARNING, logger=PACKAGE):
        plugins.manager()
        plugins.manager()
        assert "toy" not in [plugin.name for plugin in plugins.describe()]
    (record,) = caplog.records
    assert off.split(",")[-1].strip() in record.getMessage()
    assert plugins.OFF in record.getMessage()


def test_only_rank_0_logs_what_is_off(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(plugins.OFF, "all")
    monkeypatch.setenv("RANK", "1")
    plugins.reset()
    assert plugins.describe() == []
    assert caplog.records == []


@pytest.mark.parametrize("hook", PROVIDERS)
def test_rival_providers_are_warned_about_and_asked_by_name(install: Install, hook: str) -> None:
    install("0-b", implementation(hook, [], "return 'b'"))
    install("0-a", implementation(hook, [], "return 'a'"))
    with pytest.warns(RuntimeWarning, match=rf"{hook} is implemented by .*0-a, 0-b.*'0-a' is asked first"):
        plugins.manager()
    assert call(hook) == "a"


@pytest.mark.parametrize("hook", PROVIDERS)
def test_a_provider_may_ask_to_be_first_and_may_decline(install: Install, hook: str) -> None:
    install("0-a", implementation(hook, [], "return 'a'"))
    install("0-b", implementation(hook, [], "return None", "tryfirst=True"))
    with pytest.warns(RuntimeWarning, match="'0-b' is asked first"):
        plugins.manager()
    assert call(hook) == "a"


@pytest.mark.parametrize("hook", sorted(set(SPECS) - set(PROVIDERS)))
def test_several_plugins_may_share_a_hook_with_arguments(install: Install, hook: str) -> None:
    install("0-a", implementation(hook, []))
    install("0-b", implementation(hook, []))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(hook)


def test_the_fingerprint_tells_plugins_and_versions_apart(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    without = plugins.fingerprint()
    install("toy", implementation(HOOK, ARGUMENTS))
    old = plugins.fingerprint()
    with monkeypatch.context() as patch:
        patch.setenv(plugins.OFF, ",".join([*FIVE, "toy"]))
        plugins.reset()
        assert plugins.fingerprint() == without != old
    install("tool", implementation(HOOK, ARGUMENTS), version="2.0")
    assert plugins.fingerprint() not in (without, old)


def test_a_plugin_without_a_hook_here_leaves_the_fingerprint_alone(install: Install) -> None:
    before = plugins.fingerprint()
    install("toy", "")
    assert plugins.fingerprint() == before


def test_a_plugin_registered_by_hand_is_described(install: Install) -> None:
    plugins.reset()
    plugins.manager().register(ModuleType("by_hand"), name="by-hand")
    assert plugins.Plugin("by-hand", "registered by hand", "", ()) in plugins.describe()


def test_a_bad_answer_names_hook_plugins_and_what_is_missing(install: Install) -> None:
    install("toy", implementation(HOOK, ARGUMENTS))
    plugins.check_answer(HOOK, [], "append")
    with pytest.raises(plugins.PluginError) as caught:
        plugins.check_answer(HOOK, 7, "real", "fill", "scope")
    assert f"{HOOK} was answered with 7, but it lacks fill, scope" in str(caught.value)
    assert "toy" in str(caught.value)


def test_specs_are_documented_and_have_plain_arguments() -> None:
    for name, spec in SPECS.items():
        assert "Called " in (spec.__doc__ or ""), name
        for parameter in inspect.signature(spec).parameters.values():
            assert parameter.default is parameter.empty, name
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD, name


def test_the_own_plugin_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    own = PACKAGE.removeprefix("vescale_")
    monkeypatch.delenv(plugins.OFF, raising=False)
    plugins.reset()
    assert [p.distribution for p in plugins.describe() if p.name == own] == [PACKAGE.replace("_", "-")]


def test_the_version_is_that_of_the_distribution() -> None:
    package = importlib.import_module(PACKAGE)
    assert package.__version__ == importlib.metadata.version(PACKAGE.replace("_", "-"))
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_importing_builds_no_manager_and_imports_no_sibling() -> None:
    script = (
        f"import sys, {PACKAGE}, {PACKAGE}._plugins as plugins\n"
        f"assert plugins.manager.cache_info().currsize == 0\n"
        f"print(*sorted(set(sys.modules) & {SIBLINGS!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_the_command_line_lists_plugins(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("toy", implementation(HOOK, ARGUMENTS), version="9.9")
    assert main.main(["plugins"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["plugin", "distribution", "version", "hooks", "of", PACKAGE]
    assert ["toy", "toy-toy", "9.9", HOOK] in [line.split() for line in lines]
    assert lines[-1] == f"switched off by {plugins.OFF}: {', '.join(sorted(FIVE))}"


def test_the_command_line_reports_a_broken_plugin(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("toy", "raise ValueError('half a plugin')")
    assert main.main(["plugins"]) == 1
    assert "half a plugin" in capsys.readouterr().err


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", PACKAGE, "plugins"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("plugin ")
