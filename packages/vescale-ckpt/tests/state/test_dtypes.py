"""Names of dtypes, against torch and against the file format of safetensors."""

import json
import struct

import pytest
import safetensors.torch
import torch

from vescale_ckpt._format.limits import ITEMSIZE
from vescale_ckpt._state.dtypes import (
    DTYPES,
    dtype_name,
    dtype_of,
    dtype_of_safetensors,
    itemsize,
    safetensors_name,
)
from vescale_ckpt.errors import FormatError, StateError


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", DTYPES)
def test_names_are_those_of_torch(name):
    dtype = getattr(torch, name)
    assert dtype_of(name) is dtype
    assert dtype_name(dtype) == name == str(dtype).removeprefix("torch.")
    assert itemsize(name) == torch.empty(0, dtype=dtype).element_size() == ITEMSIZE[name]


def test_every_ordinary_dtype_is_known():
    ordinary = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    assert set(ordinary.split()) <= set(DTYPES)


@pytest.mark.parametrize("name", [name for name in DTYPES if safetensors_name(name)])
def test_safetensors_says_the_same(name):
    try:
        data = safetensors.torch.save({"x": torch.zeros(2, dtype=dtype_of(name))})
    except (KeyError, safetensors.SafetensorError) as error:
        pytest.skip(f"this safetensors does not write {name}: {error}")
    (length,) = struct.unpack("<Q", data[:8])
    assert json.loads(data[8 : 8 + length])["x"]["dtype"] == safetensors_name(name)
    assert dtype_of_safetensors(safetensors_name(name)) is dtype_of(name)


def test_dtypes_without_a_name_in_safetensors():
    assert {name for name in DTYPES if safetensors_name(name) is None} <= {
        "complex32",
        "complex128",
        "float4_e2m1fn_x2",
    }


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint32, torch.bits8])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(StateError, match=f"{dtype} cannot be saved.*convert it"):
        dtype_name(dtype)


@pytest.mark.parametrize(
    "name", ["torch.float32", "float", "quint8", "Tensor", "", "__doc__", None, 3, ["float32"], {}]
)
def test_other_names_are_refused(name):
    with pytest.raises(FormatError, match=r"dtype: .* is none of"):
        dtype_of(name)
    with pytest.raises(FormatError, match=r"dtype: .* is none of"):
        dtype_of_safetensors(name)
