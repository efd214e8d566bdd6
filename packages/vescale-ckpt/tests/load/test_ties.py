"""Tensors that are one in the state and several in the checkpoint, as formats without ties write them."""

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._load import ties
from vescale_ckpt.testing import MemoryStorage


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self, tied=True):
        super().__init__()
        self.a = torch.nn.Linear(40, 40, bias=False)
        self.b = torch.nn.Linear(40, 40, bias=False)
        if tied:
            self.b.weight = self.a.weight


@pytest.mark.filterwarnings("ignore")
def test_a_tied_model_that_torch_has_saved(tmp_path):
    import torch.distributed.checkpoint as dcp

    model = Tied()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    ck.import_dcp(tmp_path / "dcp", tmp_path / "store")
    other = Tied()
    report = ck.load(tmp_path / "store", {"model": other})
    assert torch.equal(other.a.weight, model.a.weight)
    assert other.a.weight is other.b.weight
    assert (report.loaded, report.missing, report.unexpected) == (("model.a.weight",), (), ())


@pytest.mark.parametrize("at", [(0, 0), (17, 3), (39, 39)])
def test_tensors_that_differ_are_an_error_with_the_call_that_works(monkeypatch, at):
    monkeypatch.setattr(ties, "STRETCH", 1000)  # so that several stretches are compared
    storage, saved = MemoryStorage(), Tied(tied=False)
    saved.b.weight.data.copy_(saved.a.weight.data)
    ck.save(storage, {"model": saved}, step=1)
    saved.b.weight.data[at] += 1
    ck.save(storage, {"model": saved}, step=2)
    target = Tied()
    before = target.a.weight.clone()
    call = r"keys=lambda name: name != 'model\.b\.weight'"
    with pytest.raises(ck.MismatchError, match=r"a\.weight, model\.b\.weight: two tensors .* that differ.*" + call):
        ck.load(storage, {"model": target})
    assert torch.equal(target.a.weight, before)
    ck.load(storage, {"model": target}, keys=lambda name: name != "model.b.weight")
    assert torch.equal(target.a.weight, saved.a.weight)
    target.a.weight.data.zero_()
    assert ck.load(storage, {"model": target}, step=1).step == 1
    assert torch.equal(target.a.weight, saved.a.weight)


def test_three_of_one_and_not_a_number():
    storage, nan = MemoryStorage(), torch.full((9,), float("nan"))
    ck.save(storage, {"a": nan, "b": nan.clone(), "c": nan.clone(), "d": -nan}, step=1)
    one = torch.zeros(9)
    assert ck.load(storage, {"a": one, "b": one, "c": one}, unexpected="ignore").loaded == ("a",)
    assert bool(one.isnan().all())
    with pytest.raises(ck.MismatchError, match="a, d: two tensors"):  # bits count
        ck.load(storage, {"a": one, "b": one, "d": one}, unexpected="ignore")


def test_other_shapes_and_dtypes_are_not_the_same():
    storage = MemoryStorage()
    ck.save(storage, {"a": torch.zeros(4), "b": torch.zeros(5), "c": torch.zeros(4, dtype=torch.int32)}, step=1)
    for other, problem in (("b", r"b: shape \[4\], in|a, b: two tensors"), ("c", "a, c: two tensors")):
        one = torch.ones(4)
        with pytest.raises(ck.MismatchError, match=problem):
            ck.load(storage, {"a": one, other: one}, unexpected="ignore", cast=True)
        assert one.sum() == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("odd", [None, 1, 6])
def test_each_rank_compares_what_it_holds(rank, tmp_path, odd):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    a, b = torch.arange(24.0).view(8, 3), torch.arange(24.0).view(8, 3)
    if odd is not None:
        b[odd, 1] = -1
    ck.save(tmp_path, {"a": a, "b": b}, step=1)
    one = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)])
    if odd is None:
        ck.load(tmp_path, {"a": one, "b": one})
        assert torch.equal(one.full_tensor(), a)
        return
    with pytest.raises(ck.MismatchError, match=f"a, b: two tensors .* .rank {odd // 4}"):
        ck.load(tmp_path, {"a": one, "b": one})
    assert one.to_local().sum() == 0
