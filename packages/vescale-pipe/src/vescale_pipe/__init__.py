"""Pipeline parallelism: schedules as data, and one engine that runs them.

So far the package holds its hook plumbing only; README.md says what is not there yet.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-pipe")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
