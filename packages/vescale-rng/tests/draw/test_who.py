"""`who_draws`: a generator given, that of the block around, or torch's default one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from vescale_rng import PortableGenerator
from vescale_rng._draw.mode import use_sampler
from vescale_rng._draw.who import default_generator, who_draws


def test_outside_of_a_block() -> None:
    own, sampler = torch.Generator(), PortableGenerator(1)
    assert who_draws(None) is None
    assert who_draws(torch.default_generator) is None
    assert who_draws(own) is own
    assert who_draws(sampler) is sampler


def test_within_a_block_the_default_generator_is_none() -> None:
    own, sampler, other = torch.Generator(), PortableGenerator(1), PortableGenerator(2)
    with use_sampler(sampler):
        assert who_draws(None) is sampler
        assert who_draws(torch.default_generator) is sampler
        assert who_draws(default_generator(torch.device("cpu"))) is sampler
        assert who_draws(own) is own
        assert who_draws(other) is other


@pytest.mark.parametrize("generator", [5, "cpu", random.Random(1), torch.Generator])
def test_what_is_no_generator(generator: Any) -> None:
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, or a PortableGenerator"):
        who_draws(generator)
