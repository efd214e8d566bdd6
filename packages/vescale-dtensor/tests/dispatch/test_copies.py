import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vescale_dtensor import Partial, Replicate, Shard, Varying, distribute_tensor, implicit_communication
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_testing import cached_mesh

pytestmark = pytest.mark.ranks(4, pool=True)

X = torch.arange(16.0, dtype=torch.float64).view(4, 4) - 7
VIEWS = {
    "chunk": lambda x: x.chunk(2)[1],
    "select": lambda x: x[1],
    "narrow": lambda x: torch.narrow(input=x, dim=0, start=1, length=2),
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "expanded": lambda x: x[:1].expand(2, 4),
    "diagonal": lambda x: torch.diagonal(input=x),
    "unbind": lambda x: x.unbind(0)[1],
    "bits": lambda x: x.view(torch.int64),
    "detached": lambda x: x.detach()[1:],
}
WRITES = {
    "add": lambda x: x.add_(1),
    "set": lambda x: x.__setitem__(0, 5),
    "copy": lambda x: x.copy_(torch.tensor(3)),
    "fill": lambda x: x.fill_(2),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "draw": lambda x: x.uniform_(1, 1),
    "relu": lambda x: F.relu(x, inplace=True),
    "square": lambda x: torch.square_(input=x),
    "detached": lambda x: x.detach().exp_(),
    "data": lambda x: x.data.mul_(3),
}


def _written(x: Tensor, view: str, write: str, into: str) -> list[Tensor]:
    v = VIEWS[view](x)
    WRITES[write](x if into == "source" else v)
    return [x * 1, v * 1]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("into", ["source", "view"])
@pytest.mark.parametrize("placement", [Partial(), Shard(0), Shard(1), Replicate()], ids=str)
def test_a_write_shows_in_all_views_or_is_an_error(view, into, placement):
    for write in WRITES:
        try:
            expected = _written(X.clone(), view, write, into)
        except RuntimeError:
            continue  # integers cannot be drawn or exponentiated
        with implicit_communication("allow"):
            try:
                actual = _written(distribute_tensor(X, cached_mesh(4), [placement]), view, write, into)
            except UnsupportedOperationError:
                assert placement != Replicate()
                continue
            except RuntimeError:  # torch's own, for memory that several elements share
                if view == "expanded":
                    continue
                raise
        for got, want in zip(actual, expected, strict=True):
            assert torch.equal(got.full_tensor(), want), write


def test_stale_copies_say_so_however_they_are_read():
    x = distribute_tensor(X, cached_mesh(4), [Shard(0)])
    with implicit_communication("allow"):
        part = x.chunk(2)[1]
    x.add_(1)
    for read in (torch.sum, lambda t: t.shape, lambda t: t.full_tensor(), repr, lambda t: x[2:] + t, copy.deepcopy):
        with pytest.raises(UnsupportedOperationError, match="add_ has written into that tensor since"):
            read(part)
    with implicit_communication("allow"):
        part = x.chunk(2)[1]  # a new one shows it
    assert torch.equal(part.full_tensor(), X[2:] + 1)


def test_copies_of_copies_are_ordinary():
    x = distribute_tensor(X, cached_mesh(4), [Shard(0)])
    with implicit_communication("allow"):
        part = x.chunk(2)[1]
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part)), part.clone()):
        other.add_(1)
        assert torch.equal(other.full_tensor(), X[2:] + 1)
    pickle.dumps(x)


@pytest.mark.parametrize("name", ["relu", "silu", "elu", "celu", "selu", "leaky_relu", "hardtanh", "relu6", "mish"])
@pytest.mark.parametrize("placement", [Partial(), Shard(1)], ids=str)
def test_functions_told_to_work_in_place(name, placement):
    expected, x = X.clone(), distribute_tensor(X, cached_mesh(4), [placement])
    getattr(F, name)(expected, inplace=True)
    assert getattr(F, name)(x, inplace=True) is x
    assert torch.allclose(x.full_tensor(), expected)


def test_casts_are_not_written_to_with_gradients() -> None:
    """Autograd would send the gradients of what is written past the sum over ranks."""
    mesh = cached_mesh(4, names=("tp",))
    for grown in (True, False):
        w = distribute_tensor(torch.ones(6), mesh, [Replicate()]).requires_grad_(grown)
        cast = (w * 2).redistribute(placements=[Varying()])
        if grown:
            with pytest.raises(UnsupportedOperationError, match=r"mul_ writes into .*clone\(\)"):
                cast.mul_(3)
            cast.clone().mul_(3)
            with torch.no_grad():
                cast.mul_(3)
        else:
            cast.mul_(3)
        assert cast.full_tensor().tolist() == [6.0] * 6
