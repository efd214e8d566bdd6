"""Static eager: a call is recorded once per input signature, and repeated as a straight local program.

`recorder` sees what a call does, `values` stand for its tensors, `program` writes it down as Python, `passes` improves
what it sends, `region` decides which program a call may run, `api` what becomes a region.
"""

from .api import static, static_eager

__all__ = ["static", "static_eager"]
