"""Values as bytes: nothing but graphs is lost, strides included."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from vescale_pipe._transport.message import Layout, describe, leaf_of, local_copy, tensors_of
from vescale_pipe.errors import TransportError

Pair = namedtuple("Pair", "left right")
WORD = torch.zeros(64, dtype=torch.uint8)


def through(values: list[Any], packed: bool) -> list[Any]:
    """What the other end of a channel gets."""
    signature, tensors = describe(values)
    mine = Layout(signature)
    theirs = Layout.of_header(mine.header())
    assert theirs.signature == signature
    if packed:
        message = mine.pack(WORD, tensors)
        assert message.numel() == mine.nbytes == theirs.nbytes
        return theirs.values(theirs.unpack(message))
    return theirs.values(theirs.shaped([flat.clone() for flat in mine.flat(tensors)]))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_every_dtype_arrives(dtype: torch.dtype, packed: bool) -> None:
    values = [torch.arange(7).to(dtype), torch.ones((), dtype=dtype), torch.zeros(0, 3, dtype=dtype)]
    got = through(values, packed)
    for one, want in zip(got, values, strict=True):
        assert one.dtype == want.dtype
        assert one.shape == want.shape
        assert torch.equal(one.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))


@pytest.mark.parametrize("packed", [True, False])
def test_strides_arrive_where_memory_is_one_piece(packed: bool) -> None:
    base = torch.randn(2, 3, 4, 5)
    cases = {
        "transposed": base.transpose(0, 2),
        "channels last": base.to(memory_format=torch.channels_last),
        "expanded": torch.randn(3, 1).expand(3, 4),
        "expanded scalar": torch.randn(()).expand(2, 3),
        "offset": base[1],
        "one row": torch.randn(4, 1).t(),
    }
    for name, value in cases.items():
        (got,) = through([value], packed)
        assert torch.equal(got, value), name
        assert got.stride() == value.stride(), name
        assert got.data_ptr() != value.data_ptr(), name


@pytest.mark.parametrize("packed", [True, False])
def test_a_slice_with_gaps_arrives_contiguous(packed: bool) -> None:
    value = torch.randn(4, 6)[:, ::2]
    (got,) = through([value], packed)
    assert torch.equal(got, value)
    assert got.is_contiguous()


def test_expanded_values_send_each_element_once() -> None:
    signature, tensors = describe([torch.ones(1).expand(1000)])
    assert [flat.numel() for flat in Layout(signature).flat(tensors)] == [1]


@pytest.mark.parametrize("packed", [True, False])
def test_structure_arrives(packed: bool) -> None:
    x = torch.randn(3, requires_grad=True)
    values = [
        x * 2,
        None,
        3,
        True,
        2.5,
        "text",
        {"a": x * 3, "b": [None, 4]},
        (x.detach(), {}),
        Pair(1, x),
        OrderedDict(k=2),
        range(3),
        (),
    ]
    got = through(values, packed)
    assert got[0].requires_grad
    assert torch.equal(got[0], x * 2)
    assert got[1:6] == [None, 3, True, 2.5, "text"]
    assert [type(one) for one in got[1:6]] == [type(one) for one in values[1:6]]
    assert torch.equal(got[6]["a"], x * 3)
    assert got[6]["a"].requires_grad
    assert got[6]["b"] == [None, 4]
    assert torch.equal(got[7][0], x)
    assert not got[7][0].requires_grad
    assert got[8].left == 1
    assert got[8].right.requires_grad
    assert got[9:] == [OrderedDict(k=2), range(3), ()]


def test_signatures_tell_apart_what_must_be_told_apart() -> None:
    x = torch.zeros(4, 4)
    seen = [
        describe(values)[0]
        for values in (
            [x],
            [x.t()],
            [x.double()],
            [x[:2]],
            [x.clone().requires_grad_()],
            [None],
            [1],
            [True],
            [1.0],
            ["1"],
            [x, x],
            [[x]],
            [(x,)],
        )
    ]
    assert len(seen) == len(set(seen))
    assert describe([x, 1])[0] == describe([x + 1, 1])[0]


def test_conjugates_and_parameters_arrive_as_numbers() -> None:
    value = torch.tensor([1 + 2j, 3 - 1j]).conj()
    weight = nn.Parameter(torch.ones(2))
    imaginary = value.imag
    got = local_copy([value, weight, imaginary])
    assert torch.equal(got[0], torch.tensor([1 - 2j, 3 + 1j]))
    assert type(got[1]) is torch.Tensor
    assert got[1].requires_grad
    assert torch.equal(got[2], torch.tensor([-2.0, 1.0]))


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TransportError, match=r"a Tensor of layout torch.sparse_coo.*to_dense"):
        describe([torch.ones(2, 2).to_sparse()])
    with pytest.raises(TransportError, match="a function, which cannot be pickled"):
        describe([lambda: 0])


def test_a_local_copy_shares_nothing_and_a_leaf_shares_memory() -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    (copy,) = local_copy([y])
    leaf = leaf_of(y)
    with torch.no_grad():
        y.zero_()
    assert bool((copy != 0).all())
    assert bool((leaf == 0).all())
    assert leaf.is_leaf
    assert leaf.requires_grad
    nested = leaf_of({"a": [y, 3]})
    assert nested["a"][0].is_leaf
    assert nested["a"][1] == 3


def test_both_ends_list_tensors_alike() -> None:
    x = torch.ones(2, requires_grad=True)
    values = [None, x, {"a": x, "b": (3, x)}, 7, [], (x,)]
    mine, theirs = tensors_of(values), tensors_of(local_copy(values))
    assert (
        [one is None for one in mine]
        == [one is None for one in theirs]
        == [True, False, False, True, False, True, False]
    )
