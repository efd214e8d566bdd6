"""Objects that do not give or take their state, and modules that were made in inference mode."""

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt.testing import MemoryStorage


class Broken:
    def __init__(self, gives, takes=True):
        self.gives, self.takes = gives, takes

    def state_dict(self):
        if not self.gives:
            raise KeyError("gone")
        return {"x": 1}

    def load_state_dict(self, state):
        if not self.takes:
            raise KeyError("shape")


def test_objects_that_fail_are_named():
    storage = MemoryStorage()
    with pytest.raises(ck.StateError, match=r"a\.b: state_dict of this Broken failed: KeyError: 'gone'") as caught:
        ck.save(storage, {"a": {"b": Broken(False)}})
    assert isinstance(caught.value.__cause__, KeyError)
    ck.save(storage, {"a": {"b": Broken(True)}})
    with pytest.raises(
        ck.StateError, match=r"a\.b: load_state_dict of this Broken .*'shape'.* partly loaded"
    ) as caught:
        ck.load(storage, {"a": {"b": Broken(True, False)}})
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_of_this_package_stay_as_they_are():
    class Own(Broken):
        def state_dict(self):
            raise ck.MismatchError("mine")

    with pytest.raises(ck.MismatchError, match=r"^mine$"):
        ck.save(MemoryStorage(), {"a": Own(True)})


@pytest.mark.parametrize("inside", [False, True])
def test_tensors_of_inference_mode_are_filled(inside):
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    storage = MemoryStorage()
    ck.save(storage, {"model": model, "turned": torch.arange(6.0).view(2, 3)})
    with torch.inference_mode():
        other = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
        turned = torch.zeros(3, 2).t()
    assert turned.is_inference()
    with torch.inference_mode(inside):
        ck.load(storage, {"model": other, "turned": turned})
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert turned.tolist() == [[0, 1, 2], [3, 4, 5]]
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    ck.save(storage, {"model": other, "turned": turned, "optimizer": optimizer})
    fresh = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    ck.load(storage, {"model": other, "turned": turned, "optimizer": fresh})
    assert not fresh.state[weight]["momentum_buffer"].is_inference()  # it goes on training
    fresh.step()
