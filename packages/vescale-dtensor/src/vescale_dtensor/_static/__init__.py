"""Static eager: a call is recorded once per input signature, and repeated as a straight local program.

`recorder` sees what a call does, `program` writes it down as Python, `region` decides which program a call may run.
"""

from .region import static

__all__ = ["static"]
