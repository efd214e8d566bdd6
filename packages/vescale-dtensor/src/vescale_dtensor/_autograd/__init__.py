"""Where user code meets autograd below dispatch: custom Functions, hooks of modules, checkpoints.

The engine hands out plain local gradients and local saved tensors. Here they are labelled before
user code sees them, and what it returns is turned into local parts of the right type again.
"""

from . import checkpoints, engine, function, module_hooks


def install() -> None:
    """Install all; may be called again."""
    function.install()
    module_hooks.install()
    checkpoints.install()
    engine.install()


__all__ = ["install"]
