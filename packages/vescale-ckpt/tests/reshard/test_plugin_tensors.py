"""Tensors that only a plugin knows, whose boxes no rank can tell of another, on real ranks."""

from types import ModuleType, SimpleNamespace

import pluggy
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import vescale_ckpt as ck
from vescale_ckpt import _plugins
from vescale_ckpt._geometry import Box, Explicit, Rule
from vescale_ckpt._state import describe
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


def rows(rank, fill, cuts=ROWS, **others):
    first, count = cuts[rank]
    found = (WHOLE[first : first + count].clone() if fill else torch.zeros(count, 3)).as_subclass(Rows)
    vars(found).update(first=first, **others)
    return found


def register():
    plugin = ModuleType("toy")
    plugin.vescale_layout = hookimpl(lambda tensor: layout_of(tensor))
    _plugins.manager().register(plugin, name="toy")


@pytest.mark.ranks(4)
def test_boxes_of_all_ranks_are_known_to_all(rank):
    register()
    moved = ck.reshard({"w": rows(rank, True)}, (cached_mesh(4, names=("x",)), [Replicate()]))
    assert torch.equal(moved["w"].to_local(), WHOLE)
    back = {"w": rows(rank, False)}
    ck.reshard(moved, back)
    assert torch.equal(back["w"].as_subclass(torch.Tensor), WHOLE[ROWS[rank][0] :][: ROWS[rank][1]])


@pytest.mark.ranks(4)
def test_a_rule_on_some_ranks_and_boxes_on_others(rank, tmp_path):
    register()
    mesh = cached_mesh(4, names=("x",))
    cuts = [(0, 2), (2, 1), (3, 3), (6, 0)]  # ranks 0 and 3 hold what Shard(0) gives them, the others do not
    about = {"cuts": cuts, "device_mesh": mesh, "placements": (Shard(0),)}
    kind = describe("w", rows(rank, True, **about), range(4), rank).spec.layout
    assert isinstance(kind, Rule if rank in (0, 3) else Explicit)
    plain = torch.arange(5.0)
    ck.save(tmp_path, {"w": rows(rank, True, **about), "plain": plain}, step=1)
    loaded = ck.load_dict(tmp_path)
    assert torch.equal(loaded["w"], WHOLE)
    for target in (rows(rank, False, **about), rows(rank, False)):  # the same cut, and another one
        ck.load(tmp_path, {"w": target, "plain": torch.zeros(5)})
        assert torch.equal(target.as_subclass(torch.Tensor), WHOLE[target.first :][: len(target)])
    moved = ck.reshard({"w": rows(rank, True, **about)}, (mesh, [Replicate()]))
    assert torch.equal(moved["w"].to_local(), WHOLE)
    back = {"w": rows(rank, False, **about)}
    ck.reshard(moved, back)
    assert torch.equal(back["w"].as_subclass(torch.Tensor), WHOLE[cuts[rank][0] :][: cuts[rank][1]])
    wrong = rows(rank, True, [(0, 2), (2, 1), (4, 2), (6, 0)], device_mesh=mesh, placements=(Shard(0),))
    with pytest.raises(ck.LayoutError if rank == 0 else ck.RanksError, match="no rank holds 3 of the 18 elements"):
        ck.save(tmp_path, {"w": wrong, "plain": plain}, step=2)
