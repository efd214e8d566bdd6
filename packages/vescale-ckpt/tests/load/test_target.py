import pytest
import torch

from vescale_ckpt._codec import as_bytes
from vescale_ckpt._geometry import Box
from vescale_ckpt._load.target import SERIAL, Request, Target, copy


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2, torch.bfloat16, torch.complex32, torch.complex128])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_contiguous_target_is_memory(dtype):
    out = torch.zeros(6, dtype=dtype)
    target = Target("t", Request(0, Box((0,), (6,)), out), dtype)
    target.memory[:] = bytes([1] * target.memory.nbytes)
    assert as_bytes(out).tolist() == [1] * (6 * dtype.itemsize)


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(4, 6)[:, :3],
        torch.zeros(3, 4).t(),
        torch.zeros(4, 3, dtype=torch.float64),
        torch.zeros(4, 3, dtype=torch.complex64).conj().imag,
    ],
    ids=["columns", "transposed", "another dtype", "negated"],
)
def test_any_other_target_is_not(out):
    assert Target("t", Request(0, Box((0, 0), (4, 3)), out), torch.float32).memory is None


@pytest.mark.parametrize("shape", [(SERIAL * 3 + 5,), (1, 7, 20000), (3, SERIAL + 1), ()])
def test_copies_are_whole(shape):
    source = torch.arange(float(torch.Size(shape).numel())).view(shape)
    into = torch.zeros(shape, dtype=torch.float64)
    copy(into, source)
    assert torch.equal(into, source.double())
    turned = torch.zeros(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
    copy(turned, source)
    assert torch.equal(turned, source)
