"""Which codec tensors of different content get."""

import pytest
import torch

from vescale_ckpt._codec.choose import choose


def sample(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


def normal(count: int = 1 << 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(count, dtype=dtype).normal_(0, 0.02, generator=torch.Generator().manual_seed(0))


def noise(count: int = 1 << 17) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_weights_are_taken_apart() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        data = sample(normal(dtype=dtype))
        assert choose(data, dtype.itemsize, True, "auto") == "planes"
        assert choose(data, dtype.itemsize, True, "auto") == "planes"


def test_fp8_bool_indices_and_repetition_go_to_zstandard() -> None:
    assert choose(sample(normal().to(torch.float8_e4m3fn)), 1, True, "auto") == "zstd"
    assert choose(sample(normal() > 0.02), 1, False, "auto") == "zstd"
    assert choose(sample(torch.arange(10_000)), 8, False, "auto") == "zstd"
    assert choose(sample(torch.zeros(10_000)), 4, True, "auto") == "zstd"
    assert choose(sample(normal(512).repeat(64)), 4, True, "auto") == "zstd"


def test_noise_and_little_stay_raw() -> None:
    for width in (1, 2, 4, 8):
        for is_float in (True, False):
            assert choose(noise(), width, is_float, "auto") == "raw"
    assert choose(sample(torch.zeros(1000)), 4, True, "auto") == "raw"
    assert choose(noise(0), 4, True, "auto") == "raw"


def test_less_than_a_twentieth_does_not_pay() -> None:
    for zeros, expected in ((0.03, "raw"), (0.08, "zstd")):
        data = noise()
        data[: int(zeros * data.numel())] = 0
        assert choose(data, 1, False, "auto") == expected


def test_a_name_is_taken_as_it_is() -> None:
    data = sample(normal())
    assert choose(noise(), 4, True, "planes") == "planes"
    assert choose(data, 4, True, "zstd") == "zstd"
    assert choose(data, 4, True, "raw") == choose(data, 4, True, None) == "raw"
    with pytest.raises(ValueError, match=r"compress = 'lz4': expected None, \"auto\", \"raw\" or .*: planes, zstd"):
        choose(data, 4, True, "lz4")


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="itemsize = 16"):
        choose(noise(), 16, True, "auto")
    with pytest.raises(ValueError, match=r"sample: expected a 1-D contiguous torch.uint8"):
        choose(normal(), 4, True, "auto")
