"""What may draw goes back to where it was: the default generator, the active sampler, and one that the caller gives."""

from __future__ import annotations

import torch

from vescale_rng import PortableGenerator, portable
from vescale_rng._draw.keep import keep

CPU = torch.device("cpu")


def test_the_default_generator_and_a_given_one() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)  # a normal waits
    states = torch.get_rng_state(), generator.get_state()
    go_back = keep(CPU, generator)
    for _ in range(2):
        torch.rand(700)
        torch.randn(5, generator=generator)
        go_back()
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(generator.get_state(), states[1])


def test_samplers() -> None:
    given = PortableGenerator(1)
    with portable(2):
        go_back = keep(CPU, given)
        first = torch.rand(3)
        token = given.save()
        go_back()
        assert torch.equal(torch.rand(3), first)
    assert given.save() == token
