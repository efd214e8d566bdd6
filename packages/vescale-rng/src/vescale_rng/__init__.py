"""Random operators on sharded tensors that draw what one device would draw for the whole tensor, bit for bit.

`install()` for torch's own DTensor; nothing to call for vescale_dtensor's; `draw` and its relatives for plain tensors.
"""

from __future__ import annotations

from . import errors
from ._agreement import check_agreement
from ._counts import advance, draws
from ._cuda.emulate import EmulatedGenerator, emulate_cuda
from ._cuda.profile import DeviceProfile
from ._doctor import doctor
from ._fingerprint import Fingerprint, check_fingerprints, fingerprint
from ._init import init_
from ._layout import Box, Part, part_of_boxes, part_of_flat, part_of_mesh, part_of_slices, part_of_tensor
from ._local_parts import local_parts
from ._plain import (
    bernoulli,
    binomial,
    cauchy,
    draw,
    dropout,
    dropout_mask,
    exponential,
    fill_,
    geometric,
    log_normal,
    multinomial,
    normal,
    poisson,
    rand,
    randint,
    randn,
    randperm,
    uniform,
)
from ._portable import PortableGenerator, portable
from ._streams import Stream
from ._torch_dtensor import install, installed, single_device, uninstall

__all__ = [
    "Box",
    "DeviceProfile",
    "EmulatedGenerator",
    "Fingerprint",
    "Part",
    "PortableGenerator",
    "Stream",
    "__version__",
    "advance",
    "bernoulli",
    "binomial",
    "cauchy",
    "check_agreement",
    "check_fingerprints",
    "doctor",
    "draw",
    "draws",
    "dropout",
    "dropout_mask",
    "emulate_cuda",
    "errors",
    "exponential",
    "fill_",
    "fingerprint",
    "geometric",
    "init_",
    "install",
    "installed",
    "local_parts",
    "log_normal",
    "multinomial",
    "normal",
    "part_of_boxes",
    "part_of_flat",
    "part_of_mesh",
    "part_of_slices",
    "part_of_tensor",
    "poisson",
    "portable",
    "rand",
    "randint",
    "randn",
    "randperm",
    "single_device",
    "uniform",
    "uninstall",
]

__version__: str


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("vescale-rng")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
