"""GPU models: what the table says, names, and limits."""

from typing import Any

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


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("A10G", "A10G"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla T4", "T4"),
    ],
)
def test_names_as_drivers_have_them(name: str, model: str) -> None:
    assert DeviceProfile.of(name).name == model


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM2e",
        "H100 80GB PCIe",
        "Quadro RTX 6000",
        "NVIDIA A100X",
        "NVIDIA",
        "",
    ],
)
def test_other_devices_of_similar_names_are_unknown(name: str) -> None:
    with pytest.raises(RandomError, match="is no GPU model of the table"):
        DeviceProfile.of(name)


def test_boards_of_a_name_may_differ() -> None:
    """Counts that torch reports: 72 and 80 multiprocessors."""
    assert (DeviceProfile.of("A10").sms, DeviceProfile.of("A10G").sms) == (72, 80)


@pytest.mark.parametrize("name", [None, 5, b"A100"])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(TypeError, match="name: expected the name of a GPU model"):
        DeviceProfile.of(name)


def test_profiles_of_wrong_types() -> None:
    with pytest.raises(TypeError, match=r"sms: expected an integer, got 1.5"):
        DeviceProfile("x", 1.5, 2048)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_threads_per_sm: expected an integer, got None"):
        DeviceProfile("x", 1, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name: expected a string, got None"):
        DeviceProfile(None, 1, 2048)  # type: ignore[arg-type]
