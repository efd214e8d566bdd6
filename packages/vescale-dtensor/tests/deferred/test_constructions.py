"""Constructions in many spellings: their values and the state of the generator, against running them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from vescale_dtensor import random_mode
from vescale_dtensor._deferred import deferred_init, is_deferred, materialize
from vescale_dtensor.errors import UnsupportedOperationError


def forked() -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        inner = torch.randn(5)
    return torch.stack([inner, torch.randn(5)])


def seeded_inside() -> Tensor:
    first = torch.randn(4)
    torch.manual_seed(9)
    return torch.cat([first, torch.randn(4)])


def own_generator() -> Tensor:
    g = torch.Generator().manual_seed(3)
    return torch.cat([torch.randn(4, generator=g), torch.rand(3, generator=g), torch.rand(2)])


def rewound() -> Tensor:
    state = torch.get_rng_state()
    first = torch.randn(3)
    torch.set_rng_state(state)
    return torch.cat([first, torch.randn(3)])


def looped() -> Tensor:
    x = torch.zeros(3, 3)
    for i in range(3):
        for j in range(3):
            x[i, j] = i * 3 + j if i != j else x[i, j - 1] + 5
    return x


def assigned() -> Tensor:
    x = torch.randn(4, 4)
    x[1:3, ::2] = 1.5
    x[..., 0] += 2
    x[[0, 1]] = torch.randn(2, 4)
    x[:, [1, 3]] = torch.tensor([7.0, 8.0])
    x[x > 1] = 0
    return x + x[[2, 2, 0, 1]]


def replaced_data() -> Tensor:
    layer = nn.Linear(3, 3)
    layer.weight.data = torch.eye(3)
    layer.bias.data = torch.tensor([1.0, 2.0, 3.0])
    return torch.cat([layer.weight.data.flatten(), layer.bias.data])


def into_real() -> Tensor:
    real = torch.tensor([0.0] * 4)
    real[1:3] = torch.randn(2)
    return real


def in_double() -> Tensor:
    torch.set_default_dtype(torch.float64)
    try:
        return torch.randn(4) + torch.arange(4) / 3
    finally:
        torch.set_default_dtype(torch.float32)


def by_sign() -> Tensor:
    return torch.ones(3) if torch.randn(()) > 0 else torch.zeros(3)


def masked() -> Tensor:
    x = torch.randn(20)
    return x[x > 0].sum() + x.masked_fill(x < 0, 0.0)


def gradient() -> Any:
    w = torch.ones(3, requires_grad=True)
    (w * torch.arange(3.0)).sum().backward()
    return w.grad


CASES: dict[str, Callable[[], Tensor]] = {
    "forked": forked, "seeded inside": seeded_inside, "own generator": own_generator, "rewound": rewound,
    "looped": looped, "assigned": assigned, "data": replaced_data, "into real": into_real, "double": in_double,
    "by sign": by_sign, "masked": masked, "gradient": gradient,
    "legacy": lambda: torch.Tensor(3, 4).normal_(),
    "new": lambda: torch.randn(3).new(2, 3).fill_(2) + torch.randn(1).new([1.0, 2.0, 3.0]),
    "complex": lambda: torch.view_as_real(torch.complex(torch.randn(3), torch.rand(3)).conj() * 2),
    "like": lambda: torch.rand_like(torch.randn(4)) + torch.randn_like(torch.zeros(4)),
    "multinomial": lambda: torch.multinomial(torch.rand(6), 3),
    "bernoulli": lambda: torch.bernoulli(torch.rand(8)) + torch.empty(8).bernoulli_(0.3),
    "exponential": lambda: torch.empty(9).exponential_(),
    "normal": lambda: torch.normal(torch.zeros(3), torch.rand(3)) + torch.normal(0.0, 2.0, (3,)),
    "poisson": lambda: torch.poisson(torch.rand(5) * 4),
    "small and large": lambda: torch.cat([torch.randn(3), torch.randn(100), torch.randn(5)]),
    "half": lambda: torch.empty(33, dtype=torch.bfloat16).normal_(),
    "empty": lambda: torch.randn(0, 4),
    "scalar": lambda: torch.randn(()),
    "expanded": lambda: torch.zeros(4).expand(3, 4) + torch.randn(4),
    "strided": lambda: torch.randn(12).as_strided((2, 3), (6, 2)),
    "chunks": lambda: torch.cat([c.mul_(i) for i, c in enumerate(torch.randn(6, 2).chunk(3))]),
    "unbound": lambda: torch.stack([a * i for i, a in enumerate(torch.randn(3, 4))]),
    "spectral": lambda: parametrizations.spectral_norm(nn.Linear(4, 3)).weight.detach(),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)).weight.detach(),
    "sorted": lambda: torch.randn(9).sort()[0],
    "unique": lambda: torch.randint(0, 4, (9,)).unique(),
    "where": lambda: torch.where(torch.randn(5) > 0, 1.0, 0.0) + torch.randn(5).where(torch.randn(5) > 0, 2),
    "out": lambda: torch.add(torch.randn(3), 1, out=torch.empty(3)),
    "rrelu": lambda: F.rrelu(torch.randn(5), training=True),
    "dropouts": lambda: F.alpha_dropout(torch.randn(50)) + F.dropout1d(torch.randn(1, 50, 2))[0, :, 0],
    "item": lambda: torch.full((2,), torch.randn(3)[1].item()),
    "list": lambda: torch.tensor(torch.randn(3).tolist()),
    "indexed": lambda: torch.randn(5)[torch.randperm(5)],
}  # fmt: skip


@pytest.mark.parametrize("mode", ["whole", "shard"])
def test_values_and_generator(mode: Any) -> None:
    from vescale_dtensor import _random

    if mode == "shard" and _random.provider() is None:
        pytest.skip("without a random plugin the numbers are others")
    for name, construct in CASES.items():
        torch.manual_seed(1)
        expected, state = construct(), torch.get_rng_state()
        torch.manual_seed(1)
        with random_mode(mode):
            with deferred_init():
                x = construct()
            assert torch.equal(torch.get_rng_state(), state), name
            assert torch.equal(materialize(x), expected), name
        assert torch.equal(torch.get_rng_state(), state), name


def test_a_meta_tensor_has_no_values_to_take() -> None:
    with deferred_init(), pytest.raises(UnsupportedOperationError, match="one of the meta device, which has no values"):
        torch.zeros(3) + torch.ones(3, device="meta")


def test_values_that_are_not_written_down_are_real() -> None:
    with deferred_init():
        assert not is_deferred(torch.tensor([1.0, 2.0]) * 2)
        assert torch.tensor([1.0, 2.0]).sum().item() == 3
