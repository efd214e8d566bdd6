"""torch.nn.init on torch's own DTensor: numbers and generators are those of a plain tensor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import init

from vescale_rng._torch_dtensor import single_device
from vescale_testing import cached_mesh

FUNCTIONS = {
    "uniform_": lambda t, g: init.uniform_(t, -1, 2, generator=g),
    "normal_": lambda t, g: init.normal_(t, 0.5, 2.0, generator=g),
    "xavier_uniform_": lambda t, g: init.xavier_uniform_(t, generator=g),
    "xavier_normal_": lambda t, g: init.xavier_normal_(t, generator=g),
    "kaiming_uniform_": lambda t, g: init.kaiming_uniform_(t, a=5**0.5, generator=g),
    "kaiming_normal_": lambda t, g: init.kaiming_normal_(t, generator=g),
    "trunc_normal_ wide": lambda t, g: init.trunc_normal_(t, a=-1.0, b=1.0, generator=g),
    "trunc_normal_ narrow": lambda t, g: init.trunc_normal_(t, mean=0.5, std=2.0, a=0.0, b=1.0, generator=g),
    "trunc_normal_ one round": lambda t, g: init.trunc_normal_(t, a=-9.0, b=9.0, generator=g),
    "orthogonal_": lambda t, g: init.orthogonal_(t, 1.5, generator=g),
    "orthogonal_ by position": lambda t, g: init.orthogonal_(t, 1.0, g),
    "sparse_": lambda t, g: init.sparse_(t, 0.4, generator=g),
}


def _layouts(world):
    line = cached_mesh(world)
    layouts = [(line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]
    if world == 4:
        layouts = [(cached_mesh(2, 2), [Shard(0), Shard(1)]), (cached_mesh(2, 2), [Shard(0), Shard(0)]), *layouts[:1]]
    return layouts


def _check(world, shapes):
    with single_device():
        for shape in shapes:
            for name, function in FUNCTIONS.items():
                if name == "sparse_" and len(shape) != 2:
                    continue
                for explicit in (False, True):
                    runs = []
                    for layout in (None, *_layouts(world)):
                        x = torch.zeros(shape)
                        if layout is not None:
                            x = distribute_tensor(x, *layout, src_data_rank=None)
                        x.requires_grad_()
                        torch.manual_seed(3)
                        generator = torch.Generator().manual_seed(8) if explicit else None
                        assert function(x, generator) is x
                        own = torch.zeros(0) if generator is None else generator.get_state()
                        runs.append((x.detach(), torch.get_rng_state(), own))
                    plain, *sharded = runs
                    for layout, run in zip(_layouts(world), sharded, strict=True):
                        where = f"{name} of {shape} on {layout[1]}, generator {explicit}"
                        assert torch.equal(run[0].full_tensor(), plain[0]), where
                        assert torch.equal(run[1], plain[1]), where
                        assert torch.equal(run[2], plain[2]), where


@pytest.mark.ranks(2, pool=True)
def test_two_ranks(world):
    _check(world, [(8, 12), (7, 5), (3, 4, 6), (1, 9)])


@pytest.mark.ranks(4, pool=True)
def test_four_ranks(world):
    _check(world, [(9, 6), (2, 3)])


@pytest.mark.ranks(2, pool=True)
def test_any_is_local_again_after_trunc_normal_(rank, world):
    """Only the rejection loop sees the answer for the whole; elsewhere torch's behaviour is its own business."""
    x = distribute_tensor(torch.tensor([1.0, 0.0]), cached_mesh(world), [Shard(0)], src_data_rank=None)
    before = bool(x.any())
    with single_device():
        init.trunc_normal_(distribute_tensor(torch.zeros(5), cached_mesh(world), [Shard(0)], src_data_rank=None))
        assert bool(x.any()) == before


def test_wrong_arguments_are_torchs_errors():
    with single_device():
        with pytest.raises(ValueError, match="2 or more dimensions"):
            init.orthogonal_(torch.zeros(3))
        assert init.sparse_(torch.empty(4, 3), 0.5).shape == (4, 3)


@pytest.mark.ranks(2, pool=True)
def test_wrong_arguments_on_dtensors(world):
    x = distribute_tensor(torch.zeros(5), cached_mesh(world), [Shard(0)], src_data_rank=None)
    with single_device(), pytest.raises(ValueError, match="2 or more dimensions"):
        init.orthogonal_(x)


def _trunc_normal(t, how, g):
    mean, std, a, b = how
    return init.trunc_normal_(t, mean, std, a, b, generator=g)


@pytest.mark.ranks(2, pool=True)
def test_trunc_normal_in_inference_mode(world):
    """torch's `|` of DTensors leaves out its second operand there."""
    for shape in ((40, 30), (7, 5)):
        for how in ((0.0, 1.0, -1.0, 1.0), (0.5, 2.0, 0.0, 1.0), (0.0, 1.0, -2.0, 2.0)):
            for made_inside in (False, True):
                runs = []
                for layout in (None, *_layouts(world)):
                    x = torch.zeros(shape)
                    if layout is not None:
                        x = distribute_tensor(x, *layout, src_data_rank=None)
                    torch.manual_seed(3)
                    with single_device(), torch.inference_mode():
                        x = x.clone() if made_inside else x
                        _trunc_normal(x, how, None)
                        whole = x if layout is None else x.full_tensor()
                        runs.append((whole.clone(), torch.get_rng_state()))
                for whole, state in runs[1:]:
                    assert torch.equal(whole, runs[0][0]), (shape, how, made_inside)
                    assert torch.equal(state, runs[0][1])


FIXED = {
    "eye_": ([(8, 12), (7, 5), (3, 3)], lambda t: init.eye_(t)),
    "dirac_": ([(4, 4, 3), (6, 5, 3, 3), (5, 2, 1, 2, 3)], lambda t: init.dirac_(t)),
    "dirac_ groups": ([(6, 5, 3), (4, 9, 3, 3)], lambda t: init.dirac_(t, groups=2)),
    "constant_": ([(7, 5)], lambda t: init.constant_(t, 3)),
}


@pytest.mark.ranks(2, pool=True)
@pytest.mark.parametrize("name", FIXED)
def test_inits_that_draw_nothing(world, name):
    shapes, function = FIXED[name]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with single_device():
        for shape in shapes:
            for mesh, placements in _layouts(world):
                x = distribute_tensor(torch.full(shape, 9.0), mesh, placements, src_data_rank=None).requires_grad_()
                assert function(x) is x
                assert x.requires_grad
                assert torch.equal(x.detach().full_tensor(), function(torch.full(shape, 9.0))), (shape, placements)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks(2, pool=True)
def test_padding_rows_of_embeddings(world):
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for index in (0, 4, 6, -1):
            torch.manual_seed(3)
            plain = kind(7, 5, padding_idx=index)
            for mesh, placements in _layouts(world):
                torch.manual_seed(3)
                module = kind(7, 5, padding_idx=index, device="meta")
                empty = distribute_tensor(torch.full((7, 5), 9.0), mesh, placements, src_data_rank=None)
                module.weight = nn.Parameter(empty)
                with single_device():
                    module.reset_parameters()
                assert torch.equal(module.weight.detach().full_tensor(), plain.weight.detach()), (index, placements)
    with single_device():
        assert kind(7, 5).weight.shape == (7, 5)
