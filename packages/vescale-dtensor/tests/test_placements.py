"""The small algebra of axis types."""

from __future__ import annotations

import pytest

from vescale_dtensor import Partial, Replicate, Shard, Varying
from vescale_dtensor.placements import I, P, R, dual, duals, short, to_axis_types, to_placement


@pytest.mark.parametrize("axis_type", [0, 3, R, I, P])
def test_dual_is_its_own_inverse(axis_type: int) -> None:
    assert dual(dual(axis_type)) == axis_type


def test_gradients_of_each_type() -> None:
    assert duals((2, R, I, P)) == (2, P, I, R)


@pytest.mark.parametrize("placement", [Shard(1), Replicate(), Varying(), Partial()])
def test_translation_round_trips(placement: object) -> None:
    (axis_type,) = to_axis_types([placement], mesh_ndim=1, ndim=2)
    again = to_placement(axis_type)
    assert again == placement
    assert type(again) is type(placement)


def test_negative_dims_and_names() -> None:
    assert to_axis_types([Shard(-1), Varying()], mesh_ndim=2, ndim=3) == (2, R)
    assert short((0, R, I, P)) == "S(0),R,I,P"
