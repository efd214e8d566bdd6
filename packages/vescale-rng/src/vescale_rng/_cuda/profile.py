"""The two numbers of a GPU model that decide what its random operators draw.

torch launches at most `SMs * (threads per SM // 256)` blocks of 256 threads; a draw of more elements than threads wraps
around, so the same seed gives different numbers on different GPU models.
"""

from __future__ import annotations

import functools
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
    """

    name: str
    sms: int
    max_threads_per_sm: int

    def __post_init__(self) -> None:
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
            name: such as "H100", "A100" or "RTX 3090"; case, spaces and dashes do not matter. Plain "H100" is the SXM
                board.

        Raises:
            RandomError: for a model that is not in the table; `DeviceProfile(name, sms, max_threads_per_sm)` takes any.
        """
        found = _BY_KEY.get(_key(name))
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


# Multiprocessors enabled on the product and threads that the compute capability allows per multiprocessor.
_MODELS: tuple[tuple[str, int, int], ...] = (
    ("A100", 108, 2048),
    ("A10", 72, 1536),
    ("A30", 56, 2048),
    ("A40", 84, 1536),
    ("RTX A6000", 84, 1536),
    ("B200", 148, 2048),
    ("GH200", 132, 2048),
    ("H100 SXM", 132, 2048),
    ("H100 PCIe", 114, 2048),
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
