"""Random operators on sharded tensors that draw what one device would draw.

So far the package holds its hook plumbing only; README.md says what is not there yet.
"""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-rng")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
