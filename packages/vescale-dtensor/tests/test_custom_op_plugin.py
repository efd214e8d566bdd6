"""The example of a plugin with operators of its own: installed in an environment of its own, and run on ranks."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _has(distribution: str) -> bool:
    """Whether it is installed; nothing is imported, for finders of setuptools warn when asked for pip."""
    return any(True for _ in importlib.metadata.distributions(name=distribution))


EXAMPLE = Path(__file__).parents[3] / "examples" / "custom_op_plugin"

pytestmark = [
    pytest.mark.skipif(not EXAMPLE.exists(), reason="the examples are in the repository only"),
    pytest.mark.skipif(not _has("hatchling"), reason="building the example needs hatchling"),
    pytest.mark.skipif(not _has("pip"), reason="installing the example needs pip"),
]


def test_rules_from_outside(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    folder = environment / "lib" / version / "site-packages"
    seen = [p for p in sys.path if p and Path(p).name == "site-packages"]
    folder.joinpath("ours.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in seen))
    source = tmp_path / "source"
    source.mkdir()
    for path in EXAMPLE.rglob("*"):  # building leaves files behind
        if path.suffix in (".py", ".toml", ".md") and "build" not in path.parts:
            target = source / path.relative_to(EXAMPLE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", str(source)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    assert (folder / "row_ops" / "vescale_plugin.py").exists()
    done = subprocess.run(
        [str(python), str(source / "check.py"), "--ranks", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # on 2 and 3 ranks: 2 strategies of rows, 3 of elements; of columns 2 of rows, the last dim, and pending sums
    assert done.stdout.split("\n")[:4] == [
        "4 strategies checked",
        "6 strategies checked",
        "8 strategies checked",
        "equal to one device on 2 ranks",
    ]
