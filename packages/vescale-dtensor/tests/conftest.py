"""Settings of all tests of this package: every local result is checked against its spec."""

from __future__ import annotations

import os

# Read at import of vescale_dtensor, in this process and in the ranks.
os.environ.setdefault("VESCALE_DTENSOR_CHECKS", "1")
