"""On a real GPU: emulation is what it draws, and parts are slices of its own whole draws. Skipped without one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from vescale_rng._cuda.kernels import emulate
from vescale_rng._cuda.laws import law_of, vector_size
from vescale_rng._cuda.profile import DeviceProfile
from vescale_rng._cuda.sources import cuda_source
from vescale_rng._draw.fill import fill
from vescale_rng._layout import part_of_slices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPS: list[tuple[str, torch.dtype, tuple[Any, ...]]] = [
    *[("uniform_", d, (-1.0, 2.0)) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)],
    *[("normal_", d, (1.0, 2.0)) for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)],
    *[(op, d, ()) for op in ("log_normal_", "exponential_", "cauchy_") for d in (torch.float32, torch.float64)],
    *[("geometric_", d, (0.2,)) for d in (torch.float32, torch.float64, torch.int64)],
    *[("bernoulli_", d, (0.4,)) for d in (torch.float32, torch.float64, torch.bool)],
    *[("random_", torch.int64, a) for a in ((), (0, 100), (0, 2**28 - 1), (0, 2**28), (-5, 2**50), (-(2**63), None))],
    *[("random_", d, ()) for d in (torch.float32, torch.float64, torch.int32, torch.uint8, torch.bool, torch.bfloat16)],
]
EXACT = ("uniform_", "bernoulli_", "random_")


def shapes() -> list[tuple[int, int]]:
    """Below and above one round of threads, and several rounds."""
    threads = DeviceProfile.current().max_threads
    return [(37, 41), (threads // 512 + 3, 509), (threads // 100, 403), (threads // 64, 1027)]


def native(op: str, shape: tuple[int, ...], dtype: torch.dtype, args: tuple[Any, ...]) -> tuple[torch.Tensor, int]:
    generator = torch.Generator("cuda").manual_seed(1234)
    generator.set_offset(8)
    out = torch.empty(shape, dtype=dtype, device="cuda")
    getattr(out, op)(*args, generator=generator)
    return out, generator.get_offset()


@pytest.mark.parametrize(("op", "dtype", "args"), OPS)
def test_parts_are_slices(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
    for shape in shapes():
        whole, end = native(op, shape, dtype, args)
        for slices in (
            (slice(0, shape[0] // 3), slice(None)),
            (slice(shape[0] // 3, None), slice(None)),
            (slice(None), slice(5, shape[1] // 2)),
        ):
            part = part_of_slices(shape, slices)
            generator = torch.Generator("cuda").manual_seed(1234)
            generator.set_offset(8)
            local = torch.empty(part.local_shape, dtype=dtype, device="cuda")
            fill(op, local, part, args, {"generator": generator})
            assert torch.equal(local, whole[slices]), (shape, slices)
            assert generator.get_offset() == end


@pytest.mark.parametrize(("op", "dtype", "args"), OPS)
def test_emulation(op: str, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
    profile = DeviceProfile.current()
    for shape in shapes():
        numel = shape[0] * shape[1]
        whole, end = native(op, (numel,), dtype, args)
        law = law_of(op, dtype, (numel,), (1,), args)
        assert end == 8 + law.increment(numel, profile)
        out = torch.empty(numel, dtype=dtype)
        emulate(law, out, 0, args, numel=numel, seed=1234, offset=8, profile=profile)
        if op in EXACT:
            assert torch.equal(out, whole.cpu()), shape
        else:
            close = torch.isclose(out.double(), whole.cpu().double(), rtol=1e-2, atol=1e-3)
            assert float(close.double().mean()) > 0.999, shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool])
def test_chances_given_as_a_tensor(dtype: torch.dtype) -> None:
    shape = (300, 1001)
    p = torch.rand(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    whole, end = native("bernoulli_", shape, dtype, (p,))
    for slices in ((slice(7, 100), slice(None)), (slice(None), slice(3, 555))):
        part = part_of_slices(shape, slices)
        generator = torch.Generator("cuda").manual_seed(1234)
        generator.set_offset(8)
        local = torch.empty(part.local_shape, dtype=dtype, device="cuda")
        fill("bernoulli_", local, part, (p[slices].contiguous(),), {"generator": generator})
        assert torch.equal(local, whole[slices])
        assert generator.get_offset() == end


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_dropout(dtype: torch.dtype, shift: int) -> None:
    profile = DeviceProfile.current()
    default = torch.cuda.default_generators[torch.cuda.current_device()]
    for numel in (64, 66, 67, 4 * profile.max_threads + 8, 17 * profile.max_threads + 8, 9 * profile.max_threads + 3):
        x = torch.ones(numel + shift, dtype=dtype, device="cuda")[shift:]
        torch.cuda.manual_seed(5)
        out, mask = torch.native_dropout(x, 0.3, True)
        end = default.get_offset()
        vector = vector_size(dtype, (numel,), (1,), x.data_ptr())
        args = (0.3, vector)
        law = law_of("dropout", dtype, (numel,), (1,), args)
        emulated = torch.empty(numel, dtype=dtype)
        emulate(law, emulated, 0, args, numel=numel, seed=5, offset=0, profile=profile)
        assert torch.equal(emulated.bool(), mask.cpu()), (numel, vector)
        assert end == law.increment(numel, profile)
        torch.cuda.manual_seed(5)
        source = cuda_source("dropout", dtype, x.device, (numel,), (1,), args)
        start = numel // 3
        part = torch.empty(numel - start, dtype=dtype, device="cuda")
        source.emit(part, start, args)
        source.finish()
        assert torch.equal(part.bool(), mask[start:]), (numel, vector)
        assert default.get_offset() == end
        torch.cuda.manual_seed(5)
        assert torch.equal(F.dropout(x, 0.3), out)


@pytest.mark.slow
def test_a_draw_beyond_32_bit_offsets() -> None:
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of device memory")
    numel = 2**29 + 5
    whole, end = native("uniform_", (numel,), torch.float32, ())
    generator = torch.Generator("cuda").manual_seed(1234)
    generator.set_offset(8)
    source = cuda_source("uniform_", torch.float32, whole.device, (numel,), (1,), (), generator)
    for start in (0, 2**28 - 3, numel // 2 - 1000, numel - 5000):
        out = torch.empty(5000, device="cuda")
        source.emit(out, start, ())
        assert torch.equal(out, whole[start : start + 5000]), start
    source.finish()
    assert generator.get_offset() == end
