"""What goes where, for the objects of a training loop: against torch's own state_dict and what was there before."""

import collections

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt.testing import MemoryStorage


def saved(state):
    storage = MemoryStorage()
    ck.save(storage, state)
    return storage


def steps_of(count):
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 9], gamma=0.5)
    for _ in range(count):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


# The state of a MultiStepLR has a Counter in it.
def test_a_counter_stays_a_counter():
    optimizer, scheduler = steps_of(3)
    storage = saved({"optimizer": optimizer, "scheduler": scheduler, "seen": collections.Counter("abca")})
    other, resumed = steps_of(0)
    seen = collections.Counter("z")
    state = {"optimizer": other, "scheduler": resumed, "seen": seen}
    ck.load(storage, state)
    assert state["seen"] == {"a": 2, "b": 1, "c": 1}
    assert type(state["seen"]) is type(resumed.milestones) is collections.Counter
    loaded = ck.load_dict(storage)
    assert loaded["seen"] is not ck.load_dict(storage)["seen"]
    assert type(loaded["scheduler"]["milestones"]) is collections.Counter
    rates = []
    for one, stepper in ((optimizer, scheduler), (other, resumed)):
        for _ in range(8):
            one.step()
            stepper.step()
            rates.append(stepper.get_last_lr())
    assert rates[:8] == rates[8:] == [[0.5], [0.125], [0.125], [0.125], [0.125], [0.0625], [0.0625], [0.0625]]


class Extra(torch.nn.Module):
    """A module whose extra state is whatever it is given."""

    def __init__(self, value):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, {"scale": 3}),
        ({"scale": 3}, None),
        ({"a": 1, "gone": torch.ones(2)}, {"a": 2, "new": 5}),
        ([1], [1, 2, 3]),
        (5, [{"a": 1}]),
        ({"a": 1}, [1, 2]),
    ],
    ids=str,
)
def test_extra_state_is_what_was_saved_whatever_it_was_before(before, after):
    storage = saved({"m": torch.nn.Sequential(Extra(after))})
    module = Extra(before)
    ck.load(storage, {"m": torch.nn.Sequential(module)})
    assert module.value == after


# The extra state of TransformerEngine is a tensor of bytes, as long as what is in it.
def test_a_tensor_of_extra_state_may_have_another_shape_and_dtype():
    bytes_ = torch.arange(5, dtype=torch.uint8)
    storage = saved({"m": Extra(bytes_)})
    for before in (torch.zeros(3, dtype=torch.uint8), torch.zeros(5), {}):
        module = Extra(before)
        ck.load(storage, {"m": module})
        assert torch.equal(module.value, bytes_)
        assert module.value.dtype == torch.uint8
    same = torch.zeros(5, dtype=torch.uint8)
    module = Extra(same)
    ck.load(storage, {"m": module})
    assert module.value is same or torch.equal(same, bytes_)


def test_extra_state_that_is_not_there_is_missing():
    storage = saved({"m": {"linear.weight": torch.ones(1, 1), "linear.bias": torch.ones(1)}})
    with pytest.raises(ck.MismatchError, match=r"m\._extra_state.*: not in the checkpoint"):
        ck.load(storage, {"m": Extra({"a": 1})})


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("old", "new"), [([6], [2, 4]), ([2, 4], [6]), ([4], [6]), ([2, 4], [4, 2])], ids=str)
def test_groups_of_parameters_that_differ_are_told_before_anything_is_loaded(old, new, warm):
    def optimizer(sizes, fill):
        weights = [torch.nn.Parameter(torch.full((3,), fill)) for _ in range(sum(sizes))]
        cut = iter(weights)
        found = torch.optim.AdamW([{"params": [next(cut) for _ in range(size)]} for size in sizes], lr=fill)
        return weights, found

    def train(weights, found):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        found.step()

    weights, found = optimizer(old, 0.5)
    train(weights, found)
    storage = saved({"w": weights[0].detach(), "optimizer": found})
    weights, found = optimizer(new, 0.25)
    if warm:
        train(weights, found)
    before = [value.clone() for value in weights]
    with pytest.raises(
        ck.MismatchError,
        match=rf"optimizer\.param_groups: groups of \{old} parameters in the checkpoint, of \{new} in the state",
    ):
        ck.load(storage, {"w": weights[0].detach(), "optimizer": found})
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert len(found.state) == (sum(new) if warm else 0)


@pytest.mark.parametrize(
    ("state", "name"), [((3, {"a": 1}), "0: a int"), (3, "itself: a int"), (({"a": 1}, (torch.zeros(1), 2)), r"1\.1: ")]
)
def test_what_cannot_be_replaced_is_told(state, name):
    other = torch.utils._pytree.tree_map(lambda leaf: leaf + 1, state)
    storage = saved(other)
    with pytest.raises(ck.MismatchError, match=f"{name}.* cannot be replaced; put it into a dict or list"):
        ck.load(storage, state)
    ck.load(saved(state), state)  # where nothing is lost


@pytest.mark.parametrize(
    "saved_value", [[torch.ones(2), None], [{"a": 1}, torch.ones(1)], (None, [torch.ones(1)]), [[1, 2], {}]], ids=str
)
def test_none_in_a_list_or_tuple_is_filled(saved_value):
    state = {"v": type(saved_value)([None, None])}
    ck.load(saved({"v": saved_value}), state)
    assert repr(state["v"]) == repr(saved_value)


def test_a_list_with_values_beside_tensors():
    storage = saved({"v": [torch.ones(2), {"a": 1}, 7]})
    state = {"v": [torch.zeros(2), None, 0]}
    tensor = state["v"][0]
    ck.load(storage, state)
    assert state["v"][0] is tensor
    assert state["v"][1:] == [{"a": 1}, 7]
    with pytest.raises(ck.MismatchError, match=r"v\.3: not in the checkpoint"):
        ck.load(storage, {"v": [None, None, None, 5]})
    with pytest.raises(ck.MismatchError, match=r"v\.2: in the checkpoint, but not in the state"):
        ck.load(storage, {"v": [None, None]})
    with pytest.raises(ck.MismatchError, match=r"v\.1: None in the checkpoint, a tensor in the state"):
        ck.load(saved({"v": [1, None]}), {"v": [1, torch.ones(1)]})


@pytest.mark.parametrize(
    "keys", ["modle.*", ["a.b", "c"], lambda name: False, []], ids=["pattern", "names", "function", "nothing"]
)
def test_keys_that_choose_nothing_are_an_error(keys):
    storage = saved({"model": {"w": torch.ones(2)}})
    state = {"model": {"w": torch.zeros(2)}}
    with pytest.raises(
        ck.MismatchError, match="keys: no name of the state or of the checkpoint is wanted by "
    ) as caught:
        ck.load(storage, state, keys=keys, strict=False)
    assert "strict=False" not in str(caught.value)
    if keys == "modle.*":
        for call in (lambda: ck.load(storage, state, keys=keys), lambda: ck.load_dict(storage, keys=keys)):
            with pytest.raises(ck.MismatchError, match=r"is wanted by 'modle\.\*'; near are model"):
                call()
    assert not state["model"]["w"].any()
    ck.load(saved({}), {}, keys="anything")
