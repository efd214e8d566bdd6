"""Tensors that only a plugin knows, whose boxes no rank can tell of another, on real ranks."""

from types import ModuleType, SimpleNamespace

import pluggy
import pytest
import torch
from torch.distributed.tensor import Replicate

import vescale_ckpt as ck
from vescale_ckpt import _plugins
from vescale_ckpt._geometry import Box
from vescale_testing import cached_mesh

hookimpl = pluggy.HookimplMarker("vescale_ckpt")
ROWS = [(0, 1), (1, 3), (4, 0), (4, 2)]  # of each rank: first, and how many
WHOLE = torch.arange(18.0).view(6, 3)


class Rows(torch.Tensor):
    """Some rows of a tensor."""


def layout_of(tensor):
    if not isinstance(tensor, Rows):
        return None
    boxes = (Box((tensor.first, 0), tuple(tensor.shape)),)
    local = tensor.as_subclass(torch.Tensor)
    about = {"global_shape": (6, 3), "global_stride": (3, 1), "replicas": (0, 1), "partial": False}
    return SimpleNamespace(boxes=boxes, local=local, **about)


def rows(rank, fill):
    first, count = ROWS[rank]
    found = (WHOLE[first : first + count].clone() if fill else torch.zeros(count, 3)).as_subclass(Rows)
    found.first = first
    return found


@pytest.mark.ranks(4)
def test_boxes_of_all_ranks_are_known_to_all(rank, world):
    plugin = ModuleType("toy")
    plugin.vescale_layout = hookimpl(lambda tensor: layout_of(tensor))
    _plugins.manager().register(plugin, name="toy")
    moved = ck.reshard({"w": rows(rank, True)}, (cached_mesh(4, names=("x",)), [Replicate()]))
    assert torch.equal(moved["w"].to_local(), WHOLE)
    back = {"w": rows(rank, False)}
    ck.reshard(moved, back)
    assert torch.equal(back["w"].as_subclass(torch.Tensor), WHOLE[ROWS[rank][0] :][: ROWS[rank][1]])
