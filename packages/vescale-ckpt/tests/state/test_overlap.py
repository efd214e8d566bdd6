"""Elements that share memory, against counting the places of all of them."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._state import shares_elements

DIMS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 13)), max_size=4)


@given(DIMS)
@settings(max_examples=500, deadline=None)
def test_any_strides(dims):
    shape, strides = [size for size, _ in dims], [step for _, step in dims]
    places = [sum(map(int.__mul__, at, strides)) for at in itertools.product(*map(range, shape))]
    view = torch.zeros(200).as_strided(shape, strides)
    assert shares_elements(view) == (len(set(places)) < len(places))


def test_strides_that_do_not_nest_and_still_do_not_meet():
    assert not shares_elements(torch.zeros(9).as_strided((2, 3), (3, 2)))
    assert shares_elements(torch.zeros(13).as_strided((3, 3), (4, 2)))
