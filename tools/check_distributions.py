"""Check what is in the wheels and sdists of a folder: `check_distributions.py dist`.

A file too many is published for good, and a file too few shows only at a user's.
"""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGES = ("ckpt", "comm", "dtensor", "pipe", "rng")
MODULES = ("__init__.py", "__main__.py", "_hooks.py", "_plugin.py", "_plugins.py", "hookspecs.py", "py.typed")


def wheel_problems(wheel: Path, package: str) -> list[str]:
    """List the files of a wheel that are missing or should not be there."""
    names = set(zipfile.ZipFile(wheel).namelist())
    info = next(name.partition("/")[0] for name in sorted(names) if ".dist-info/" in name)
    metadata = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    required = metadata | {f"vescale_{package}/{name}" for name in MODULES}
    allowed = rf"vescale_{package}/([a-z0-9_]+/)*([a-z0-9_]+\.py|py\.typed)"
    return compare(wheel, names, required, allowed)


def sdist_problems(sdist: Path, package: str) -> list[str]:
    """List the files of an sdist that are missing or should not be there."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    names.discard(".gitignore")
    required = {"PKG-INFO", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "tests/test_plugins.py"}
    required |= {f"src/vescale_{package}/{name}" for name in MODULES}
    allowed = rf"(src/vescale_{package}|tests)/([a-z0-9_]+/)*([a-z0-9_]+\.(py|json)|py\.typed)"
    # Documents of a package, and the pictures in them; files that tests read as they are.
    allowed += r"|[A-Z]+\.md|pictures/[a-z0-9_]+\.svg|tests/([a-z0-9_]+/)*golden/.+"
    return compare(sdist, names, required, allowed)


def compare(file: Path, names: set[str], required: set[str], allowed: str) -> list[str]:
    """Print the number of files, and list those that are missing or unexpected."""
    print(f"{file.name}: {len(names)} files")
    missing = [f"{file.name}: {name} is missing" for name in sorted(required - names)]
    extra = [name for name in sorted(names - required) if not re.fullmatch(allowed, name)]
    return missing + [f"{file.name}: {name} should not be there" for name in extra]


def main(folder: str) -> int:
    """Check a folder that must hold one wheel and one sdist of each package."""
    problems = []
    for package in PACKAGES:
        for pattern, check in (("-*.whl", wheel_problems), ("-*.tar.gz", sdist_problems)):
            files = sorted(Path(folder).glob(f"vescale_{package}{pattern}"))
            if len(files) == 1:
                problems += check(files[0], package)
            else:
                problems.append(f"vescale-{package}: expected one file {pattern}, found {len(files)}")
    print("\n".join(problems) or "all distributions hold what they should")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
