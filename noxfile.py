"""Every task of this repository: `pip install nox`, then `nox -s demo` or `nox -s tests`; `nox -l` lists all.

torch is a gigabyte, so it is installed once, into a shared environment that the environments of all
sessions see through a `.pth` file. Environments are reused: a stamp file says what is installed already.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import urllib.request
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.sessions = ["lint", "types", "tests"]
nox.options.reuse_venv = "yes"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PACKAGES = ["dtensor", "rng", "comm", "pipe", "ckpt"]
FOLDERS = {name: ROOT / "packages" / f"vescale-{name}" for name in PACKAGES}
TORCH = os.environ.get("VESCALE_TORCH", "torch==2.13.0")
CPU_INDEX = "https://download.pytorch.org/whl/cpu/"
BUILD_TOOLS = ["build>=1.2", "hatchling>=1.27"]
TEST_TOOLS = [
    *("expecttest>=0.2", "hypothesis>=6.100", "numpy>=1.26"),
    *("pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6"),
]
WORKERS = ["-n", str(max(2, (os.cpu_count() or 2) // 2)), "--dist", "loadfile"]
"""Ranks of a test wait for each other much of the time, so two files at once make use of two cores."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    # Processes that share the tests must name them alike, also those whose names come from sets.
    "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
    # On some CPUs the bits of MKL's products depend on where their operands lie, unless it is told otherwise.
    "MKL_CBWR": os.environ.get("MKL_CBWR", "AVX2,STRICT"),
}


@nox.session
def demo(session: nox.Session) -> None:
    """Train a small GPT on 4 ranks and show that its losses are those of one device."""
    install(session, ["numpy>=1.26", "matplotlib>=3.8"], editable("dtensor", "rng", "comm", "pipe", "ckpt"))
    script = ROOT / "examples" / "nanogpt" / "train.py"
    session.run("python", str(script), *(session.posargs or ["--mesh", "dp=2,tp=2"]), env=ENVIRONMENT)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the whole test suite with all packages installed; arguments after -- go to pytest."""
    extra = ["matplotlib>=3.8", "transformers>=5.0"]
    install(session, TEST_TOOLS + extra, editable(*PACKAGES, testing=True))
    session.run("python", "-m", "pytest", *(session.posargs or WORKERS), env=ENVIRONMENT)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def alone(session: nox.Session, package: str) -> None:
    """Test the wheel of one package with its hard dependencies only: it needs none of its siblings."""
    wheel = build(session, package)
    install(session, [str(wheel)], ["--force-reinstall", "--no-deps", str(wheel)], files=[wheel])
    session.run("python", "-m", "pip", "check")
    installed = str(ROOT / "tools" / "check_installed.py")
    session.run("python", installed, package)
    session.run("python", "-m", f"vescale_{package}", "plugins")

    # The test tools stay outside of the environment, lest one of them bring an undeclared dependency.
    tools = shared_environment(session, "test-tools", *TEST_TOOLS)
    paths = [ROOT / "testing" / "src", tools]
    session.run(
        "python", "-m", "pytest", *(session.posargs or [*WORKERS, str(FOLDERS[package] / "tests")]),
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, paths))},
    )  # fmt: skip


@nox.session
@nox.parametrize("pluggy", ["pluggy==1.5.0", "pluggy<2"], ids=["oldest", "newest"])
def plugins(session: nox.Session, pluggy: str) -> None:
    """Try broken, old and new toy plugins with the oldest and the newest pluggy."""
    install(session, TEST_TOOLS, editable(*PACKAGES, testing=True), ["--upgrade", pluggy])
    session.run("python", "-c", "import pluggy; print('pluggy', pluggy.__version__)")
    files = sorted(ROOT.glob("packages/*/tests/test_plugins.py")) + sorted(ROOT.glob("packages/*/tests/test_hooks.py"))
    session.run("python", "-m", "pytest", *map(str, files), *session.posargs, env=ENVIRONMENT)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, and the rules that hold between packages."""
    install(session, ["ruff==0.17.6"], torch=False)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tools/check_repository.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, package by package: all of them, or those named after --."""
    install(session, ["mypy==2.4.1", "nox", "safetensors", "zstandard", "matplotlib", *TEST_TOOLS])
    for package in session.posargs or PACKAGES:
        session.run("mypy", str(FOLDERS[package] / "src"))
    if not session.posargs:
        session.run("mypy", "testing/src")
        session.run("mypy", "noxfile.py", *map(str, sorted((ROOT / "tools").glob("*.py"))))


@nox.session(name="build")
def build_all(session: nox.Session) -> None:
    """Build wheels and sdists into dist/ and check what is in them."""
    install(session, BUILD_TOOLS, torch=False)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for folder in FOLDERS.values():
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(folder), silent=True)
    session.run("python", "tools/check_distributions.py", str(dist))


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark, or those named after --, and keep their rows in bench-results/."""
    install(session, ["numpy>=1.26", "expecttest>=0.2"], editable(*PACKAGES, testing=True))
    results = ROOT / "bench-results"
    results.mkdir(exist_ok=True)
    for script in sorted((ROOT / "benchmarks").glob("[!_]*.py")):
        if session.posargs and script.stem not in session.posargs:
            continue
        rows = results / f"{script.stem}.json"
        session.run("python", str(script), "--json", str(rows), env=ENVIRONMENT)


@nox.session
def drills(session: nox.Session) -> None:
    """Kill savers and ranks of pipelines, flip bits of checkpoints: nothing may be lost, loaded wrong, or hang."""
    install(session, editable("ckpt", "pipe"))
    for script in sorted((ROOT / "drills").glob("[!_]*.py")):
        if not session.posargs or script.stem in session.posargs:
            session.run("python", str(script), env=ENVIRONMENT)


def editable(*packages: str, testing: bool = False) -> list[str]:
    """Return pip's arguments that install packages in place, in one command since they name each other."""
    folders = [FOLDERS[name] for name in packages] + [ROOT / "testing"] * testing
    return ["--no-build-isolation", *(part for folder in folders for part in ("-e", str(folder)))]


def install(session: nox.Session, *commands: list[str], files: list[Path] | None = None, torch: bool = True) -> None:
    """Run `pip install` with the arguments of each command, unless exactly this is installed already."""
    pyprojects = [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "testing" / "pyproject.toml"]
    in_place = any("-e" in command for command in commands)
    done = stamp(Path(session.virtualenv.location), [*commands, torch], pyprojects if in_place else files)
    if torch:
        layer = shared_environment(session, "torch", TORCH)
    if done.exists():
        return
    if torch:
        (site_packages(session, "python") / "torch-layer.pth").write_text(f"{layer}\n")
    if in_place:
        session.install(*BUILD_TOOLS)
    for command in commands:
        session.install(*command)
    done.touch()


def shared_environment(session: nox.Session, name: str, *requirements: str) -> Path:
    """Return the site-packages of an environment that several sessions look into, made at first use."""
    folder = Path(session.virtualenv.location).parent / f"shared-{name}"
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    done = stamp(folder, [sys.version, *requirements])
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder), external=True)
        index = torch_index() if name == "torch" else []
        session.run(python, "-m", "pip", "install", "--quiet", *index, *requirements, external=True)
        done.touch()
    return site_packages(session, python)


def site_packages(session: nox.Session, python: str) -> Path:
    """Ask an interpreter where its packages are."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(str(session.run(python, "-c", code, silent=True, log=False, external=True)).strip())


def torch_index() -> list[str]:
    """Return pip's arguments for the CPU wheels of torch, a tenth of the download, where they serve.

    pip itself would try for long to reach an index that a firewall hides.
    """
    has_gpu = shutil.which("nvidia-smi") is not None
    if has_gpu or sys.platform != "linux":
        return []
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}torch/", timeout=5):
            return ["--extra-index-url", CPU_INDEX]
    except OSError:
        return []


def build(session: nox.Session, package: str) -> Path:
    """Build the wheel of one package, outside of the environment of the session."""
    tools = shared_environment(session, "build-tools", *BUILD_TOOLS)
    outdir = Path(session.create_tmp()) / "wheel"
    shutil.rmtree(outdir, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(outdir)]
    session.run(*command, str(FOLDERS[package]), env={"PYTHONPATH": str(tools)}, external=True, silent=True)
    (wheel,) = outdir.glob("*.whl")
    return wheel


def stamp(folder: Path, keys: list[object], files: list[Path] | None = None) -> Path:
    """Return the file that exists if what `keys` and the content of `files` describe is installed."""
    digest = hashlib.sha256(repr(keys).encode())
    for file in sorted(files or []):
        digest.update(file.read_bytes())
    return folder / f".installed-{digest.hexdigest()[:16]}"
