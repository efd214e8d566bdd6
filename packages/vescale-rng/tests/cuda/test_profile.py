"""GPU models: what the table says, names, and limits."""

import pytest

from vescale_rng._cuda.profile import DeviceProfile
from vescale_rng.errors import RandomError


@pytest.mark.parametrize(
    ("name", "threads"),
    [
        ("A100", 221_184),
        ("H100", 270_336),
        ("H200", 270_336),
        ("H100 PCIe", 233_472),
        ("RTX 2080 Ti", 272 * 256),
        ("RTX 3060", 168 * 256),
    ],
)
def test_threads_of_the_largest_launch(name: str, threads: int) -> None:
    assert DeviceProfile.of(name).max_threads == threads


@pytest.mark.parametrize("name", ["rtx3090", "RTX-3090", "3090", "Rtx 3090"])
def test_names_are_read_loosely(name: str) -> None:
    assert DeviceProfile.of(name) == DeviceProfile("RTX 3090", 82, 1536)


def test_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(RandomError, match=r"name='A1000' is no GPU model.*A100, .*V100.*DeviceProfile\(name"):
        DeviceProfile.of("A1000")


@pytest.mark.parametrize(
    ("numel", "threads"), [(1, 256), (256, 256), (257, 512), (1024, 1024), (1025, 1024), (9999, 1024)]
)
def test_threads_of_a_launch(numel: int, threads: int) -> None:
    assert DeviceProfile("small", 2, 600).threads(numel) == threads


@pytest.mark.parametrize(("sms", "per_sm"), [(0, 2048), (4, 255)])
def test_impossible_profiles(sms: int, per_sm: int) -> None:
    with pytest.raises(RandomError, match=f"sms={sms}.*max_threads_per_sm={per_sm}"):
        DeviceProfile("none", sms, per_sm)
