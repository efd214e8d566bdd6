"""Reading values into Python gives the whole tensor's value on every rank."""

from __future__ import annotations

import pytest
import torch

from vescale_dtensor import DTensor, distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh
from vescale_testing.oracle import all_codes, placements


def _make(value: torch.Tensor, codes: str) -> DTensor:
    return distribute_tensor(value, cached_mesh(2, 2), placements(codes))


@pytest.mark.ranks(4, pool=True)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_scalars(shape: tuple[int, ...]) -> None:
    for codes in all_codes(len(shape), 2, partial=True):
        x = _make(torch.full(shape, 2.5, dtype=torch.float64), codes)
        assert x.item() == 2.5
        assert float(x) == 2.5
        assert int(x) == 2
        assert complex(x) == 2.5
        assert bool(x)
        assert x.is_nonzero()
        assert x.tolist() == torch.full(shape, 2.5).tolist()
    assert _make(torch.tensor(3), "I I").__index__() == 3
    assert f"{_make(torch.tensor(1.25), 'P I'):.1f}" == f"{1.25:.1f}"


@pytest.mark.ranks(4, pool=True)
def test_larger_tensors() -> None:
    value = torch.arange(15.0).view(5, 3)
    for codes in all_codes(2, 2, partial=True):
        x = _make(value, codes)
        assert x.tolist() == value.tolist()
        assert 14.0 in x
        assert 15.0 not in x
        with pytest.raises(RuntimeError):
            x.item()
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(x)


@pytest.mark.ranks(4, pool=True)
def test_comparisons() -> None:
    value = torch.arange(15.0).view(5, 3)
    other = value.clone()
    other[4, 2] += 1e-3  # only one rank holds this element
    with implicit_communication("allow"):
        for left, right in [("S0 S1", "S0 S1"), ("S0 I", "I S1"), ("P I", "I I"), ("S0 S0", "P P")]:
            a, same, different = _make(value, left), _make(value, right), _make(other, right)
            assert torch.equal(a, same)
            assert not torch.equal(a, different)
            assert torch.allclose(a, different, atol=1e-2)
            assert not a.allclose(different, rtol=0, atol=1e-4)
            assert not torch.equal(a, _make(value.view(3, 5), right))
            assert torch.is_same_size(a, same)


@pytest.mark.ranks(4, pool=True)
def test_numpy_only_of_what_is_whole() -> None:
    numpy = pytest.importorskip("numpy")
    value = torch.arange(6.0)
    for codes in ("I I", "R I"):
        assert _make(value, codes).numpy().tolist() == value.tolist()
        assert numpy.asarray(_make(value, codes)).shape == (6,)
    for codes in ("S0 I", "P R"):
        with pytest.raises(UnsupportedOperationError, match="full_tensor"):
            _make(value, codes).numpy()
        with pytest.raises(UnsupportedOperationError, match="full_tensor"):
            numpy.asarray(_make(value, codes))
