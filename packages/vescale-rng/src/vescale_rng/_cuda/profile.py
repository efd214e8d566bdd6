"""The two numbers of a GPU model that decide what its random operators draw.

torch launches at most `SMs * (threads per SM // 256)` blocks of 256 threads; a draw of more elements than threads wraps
around, so the same seed gives different numbers on different GPU models.
"""

from __future__ import annotations

import functools
import operator
import re
from dataclasses import dataclass

import torch

from ..errors import RandomError

__all__ = ["BLOCK_SIZE", "DeviceProfile"]

BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A GPU model, as far as random numbers depend on it.

    Args:
        name: for messages.
        sms: streaming multiprocessors.
        max_threads_per_sm: threads that one of them holds.

    Raises:
        RandomError: if a number is too small.
        TypeError: if `name` is no string, or a number no integer.
    """

    name: str
    sms: int
    max_threads_per_sm: int

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name: expected a string, got {self.name!r}")
        for argument in ("sms", "max_threads_per_sm"):
            value = getattr(self, argument)
            try:
                object.__setattr__(self, argument, operator.index(value))
            except TypeError:
                raise TypeError(f"{argument}: expected an integer, got {value!r}") from None
        if self.sms < 1 or self.max_threads_per_sm < BLOCK_SIZE:
            raise RandomError(
                f"DeviceProfile {self.name!r}: sms={self.sms} must be at least 1 and "
                f"max_threads_per_sm={self.max_threads_per_sm} at least {BLOCK_SIZE}"
            )

    @property
    def max_blocks(self) -> int:
        """Blocks of the largest launch."""
        return self.sms * (self.max_threads_per_sm // BLOCK_SIZE)

    @property
    def max_threads(self) -> int:
        """Threads of the largest launch; draws of more elements depend on the model.

        >>> DeviceProfile.of("H100").max_threads
        270336
        """
        return self.max_blocks * BLOCK_SIZE

    def threads(self, numel: int) -> int:
        """Threads that torch launches for so many elements."""
        return BLOCK_SIZE * min(-(-numel // BLOCK_SIZE), self.max_blocks)

    @classmethod
    def of(cls, name: str) -> DeviceProfile:
        """Return the profile of a known GPU model.

        Args:
            name: such as "H100", "A100" or "RTX 3090", or as `torch.cuda.get_device_name` has it, such as "NVIDIA H100
                80GB HBM3"; case, spaces and dashes do not matter. Plain "H100" is the SXM board.

        Raises:
            RandomError: for a model that is not in the table; `DeviceProfile(name, sms, max_threads_per_sm)` takes any.
            TypeError: if it is no string.

        >>> DeviceProfile.of("NVIDIA H100 80GB HBM3").name, DeviceProfile.of("NVIDIA H100 PCIe").name
        ('H100 SXM', 'H100 PCIe')
        """
        if not isinstance(name, str):
            raise TypeError(f"name: expected the name of a GPU model, got {name!r}")
        found = _BY_KEY.get(_key(name)) or _by_device_name(name)
        if found is None:
            known = ", ".join(model for model, _, _ in _MODELS)
            raise RandomError(
                f"name={name!r} is no GPU model of the table ({known}); "
                "for another one write DeviceProfile(name, sms, max_threads_per_sm)"
            )
        return found

    @classmethod
    def current(cls, device: torch.device | int | str | None = None) -> DeviceProfile:
        """Return the profile of a CUDA device of this machine.

        Args:
            device: a CUDA device or its index; None is the current one.
        """
        index = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        return _of_device(torch.cuda.current_device() if index.index is None else index.index)


@functools.cache
def _of_device(index: int) -> DeviceProfile:
    properties = torch.cuda.get_device_properties(index)
    return DeviceProfile(
        str(properties.name), int(properties.multi_processor_count), int(properties.max_threads_per_multi_processor)
    )


def _key(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _by_device_name(name: str) -> DeviceProfile | None:
    """Find the model in a driver's name for a device: vendor, model, and words that do not change the numbers.

    Any other word (Ti, Laptop, MIG, ...) makes it another device.
    """
    words = [w for w in re.split(r"[\s-]+", name.lower()) if w]
    while words and words[0] in ("nvidia", "tesla", "geforce"):
        del words[0]
    for end in range(len(words), 0, -1):
        found = _BY_KEY.get(_key("".join(words[:end])))
        if found is not None and set(words[end:]) <= _SAME.get(found.name, frozenset()):
            return found
    return None


# Multiprocessors enabled on the product and threads that the compute capability allows per multiprocessor.
_MODELS: tuple[tuple[str, int, int], ...] = (
    ("A100", 108, 2048),
    ("A10", 72, 1536),
    ("A10G", 80, 1536),
    ("A30", 56, 2048),
    ("A40", 84, 1536),
    ("RTX A6000", 84, 1536),
    ("B200", 148, 2048),
    ("GH200", 132, 2048),
    ("H100 SXM", 132, 2048),
    ("H100 PCIe", 114, 2048),
    ("H100 NVL", 132, 2048),
    ("H200", 132, 2048),
    ("L4", 58, 1536),
    ("L40", 142, 1536),
    ("L40S", 142, 1536),
    ("P100", 56, 2048),
    ("RTX 2080 Ti", 68, 1024),
    ("RTX 3060", 28, 1536),
    ("RTX 3070", 46, 1536),
    ("RTX 3080", 68, 1536),
    ("RTX 3090", 82, 1536),
    ("RTX 4090", 128, 1536),
    ("RTX 5090", 170, 1536),
    ("RTX 6000 Ada", 142, 1536),
    ("T4", 40, 1024),
    ("V100", 80, 2048),
)
_BY_KEY = {_key(model): DeviceProfile(model, sms, threads) for model, sms, threads in _MODELS}
_BY_KEY["h100"] = _BY_KEY["h100sxm"]
_BY_KEY.update({_key(model[4:]): _BY_KEY[_key(model)] for model, _, _ in _MODELS if model.startswith("RTX ")})
# Words that follow the model in names of devices that have the same two numbers.
_SAME: dict[str, frozenset[str]] = {
    "A100": frozenset({"sxm4", "pcie", "40gb", "80gb"}),
    "GH200": frozenset({"120gb", "480gb"}),
    "H100 SXM": frozenset({"80gb", "hbm3"}),
    "H200": frozenset({"nvl"}),
    "P100": frozenset({"pcie", "sxm2", "12gb", "16gb"}),
    "RTX 6000 Ada": frozenset({"generation"}),
    "V100": frozenset({"pcie", "sxm2", "sxm3", "16gb", "32gb"}),
}
