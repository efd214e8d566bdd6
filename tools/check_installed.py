"""Check that one package is installed without its siblings: `check_installed.py rng`."""

from __future__ import annotations

import importlib.metadata
import sys


def main(package: str) -> str | None:
    """Return what is wrong, or None."""
    found = sorted({dist.name for dist in importlib.metadata.distributions() if dist.name.startswith("vescale")})
    if found != [f"vescale-{package}"]:
        return f"expected vescale-{package} alone, found {', '.join(found) or 'no vescale package'}"
    print(f"vescale-{package} is installed, and none of its siblings")
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
