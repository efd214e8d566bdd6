import random
import warnings

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CorruptionError, MismatchError, MissingStepError, StateError
from vescale_ckpt.testing import MemoryStorage


@pytest.fixture
def storage():
    return MemoryStorage()


def copies(state):
    """The tensors of a flat state, to be compared with later."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def same(a, b):
    return all(torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n] for n in a)


def test_tensors_are_filled_where_they_are(storage):
    source = {"w": torch.randn(300, 40), "turned": torch.randn(50, 60), "part": torch.randn(70, 3), "n": 4}
    ck.save(storage, source, step=1)
    memory = torch.zeros(70, 9)
    target = {"w": torch.zeros(300, 40), "turned": torch.zeros(60, 50).t(), "part": memory[:, 4:7], "n": 0}
    before = {name: value for name, value in target.items() if name != "n"}
    report = ck.load(storage, target)
    assert same(source, target)
    assert all(target[name] is value for name, value in before.items())
    assert memory[:, :4].abs().sum() == memory[:, 7:].abs().sum() == 0
    assert sorted(report.loaded) == ["part", "turned", "w"]
    assert report.bytes_loaded == 4 * (300 * 40 + 50 * 60 + 70 * 3)


def test_everything_that_does_not_fit_is_told_at_once_and_nothing_is_changed(storage):
    ck.save(
        storage,
        {"shape": torch.ones(3, 4), "dtype": torch.ones(500), "gone": 1, "fine": torch.ones(9), "kind": 3},
        step=1,
    )
    target = {
        "shape": torch.zeros(4, 3),
        "dtype": torch.zeros(500, dtype=torch.float16),
        "new": torch.zeros(2),
        "fine": torch.zeros(9),
        "kind": torch.zeros(1),
        "wide": torch.zeros(1).expand(5),
    }
    before = copies(target)
    with pytest.raises(MismatchError) as caught:
        ck.load(storage, target)
    text = str(caught.value)
    for part in ("shape: shape [4, 3]", "[3, 4]", "dtype: float16", "float32", "new", "gone", "kind", "cast=True"):
        assert part in text
    assert same(before, target)


def test_partly_matching_states(storage):
    ck.save(storage, {"a": torch.ones(3), "old": torch.ones(2)}, step=1)
    target = {"a": torch.zeros(3), "new": torch.zeros(2)}
    report = ck.load(storage, target, strict=False)
    assert (report.missing, report.unexpected, report.loaded) == (("new",), ("old",), ("a",))
    assert target["a"].sum() == 3
    assert target["new"].sum() == 0
    with pytest.raises(MismatchError, match="old"):
        ck.load(storage, target, missing="keep")
    with pytest.raises(MismatchError, match="new"):
        ck.load(storage, target, unexpected="ignore")


def test_keys_choose(storage):
    ck.save(storage, {"m": {"a": torch.ones(300), "b": torch.ones(300)}, "o": torch.ones(300), "n": 5}, step=1)
    target = {"m": {"a": torch.zeros(300), "b": torch.zeros(300)}, "o": torch.zeros(300), "n": 1}
    ck.load(storage, target, keys="m.a")
    assert [int(t.sum()) for t in (target["m"]["a"], target["m"]["b"], target["o"])] == [300, 0, 0]
    ck.load(storage, target, keys=["m", "n"])
    assert [int(t.sum()) for t in (target["m"]["b"], target["o"])] == [300, 0]
    assert target["n"] == 5


def test_names_that_differ(storage):
    ck.save(storage, {"_orig_mod": {"w": torch.ones(300)}}, step=1)
    target = {"w": torch.zeros(300)}
    with pytest.raises(MismatchError, match="_orig_mod"):
        ck.load(storage, target)
    ck.load(storage, target, rename=lambda name: f"_orig_mod.{name}")
    assert target["w"].sum() == 300
    other = {"v": torch.zeros(300)}
    ck.load(storage, other, rename={"v": "_orig_mod.w"})
    assert other["v"].sum() == 300


def test_conversion_only_where_it_is_asked_for_and_makes_sense(storage):
    ck.save(storage, {"f": torch.full((90000,), 1.5), "c": torch.ones(5, dtype=torch.complex64)}, step=1)
    target = {"f": torch.zeros(300, 300, dtype=torch.float64).view(-1), "c": torch.ones(5, dtype=torch.complex128)}
    report = ck.load(storage, target, cast=True)
    assert set(report.cast) == {"f", "c"}
    assert target["f"].sum() == 1.5 * 90000
    for wrong in ({"f": torch.zeros(90000, dtype=torch.int64)}, {"c": torch.zeros(5)}):
        with pytest.raises(MismatchError, match="cannot be converted"):
            ck.load(storage, wrong, cast=True, unexpected="ignore")


def test_two_tensors_do_not_go_to_one_memory(storage):
    ck.save(storage, {"a": torch.ones(400), "b": torch.zeros(400)}, step=1)
    tied = torch.full((400,), 7.0)
    with pytest.raises(MismatchError, match="a, b"):
        ck.load(storage, {"a": tied, "b": tied})
    assert tied.sum() == 2800
    ck.load(storage, {"a": tied, "b": tied}, keys="a")
    assert tied.sum() == 400


def test_tied_in_the_checkpoint_but_not_in_the_state(storage):
    tied = torch.arange(400.0)
    ck.save(storage, {"a": tied, "b": tied}, step=1)
    target = {"a": torch.zeros(400), "b": torch.zeros(400)}
    ck.load(storage, target)
    assert torch.equal(target["a"], tied)
    assert torch.equal(target["b"], tied)


def test_resumed_training_is_the_same_bit_for_bit(storage):
    def make():
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))
        opt = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, 2)

    def train(model, opt, schedule, steps):
        for _ in range(steps):
            opt.zero_grad()
            model(torch.randn(8, 20)).square().mean().backward()
            opt.step()
            schedule.step()

    model, opt, schedule = make()
    train(model, opt, schedule, 3)
    ck.save(storage, {"m": model, "o": opt, "s": schedule, "rng": torch.get_rng_state()}, step=3)
    train(model, opt, schedule, 4)
    other, other_opt, other_schedule = make()
    torch.manual_seed(99)
    state = {"m": other, "o": other_opt, "s": other_schedule, "rng": torch.get_rng_state()}
    ck.load(storage, state)
    torch.set_rng_state(state["rng"])
    train(other, other_opt, other_schedule, 4)
    assert same(dict(model.state_dict()), dict(other.state_dict()))


def test_values_of_ranks(storage):
    ck.save(storage, {"own": ck.local({"pos": 3, "t": torch.arange(300)})}, step=1)
    target = {"own": ck.local({"pos": 0, "t": torch.zeros(300, dtype=torch.int64)})}
    memory = target["own"].value["t"]
    ck.load(storage, target)
    assert target["own"].value["pos"] == 3
    assert torch.equal(memory, torch.arange(300))


def test_meta_tensors_are_refused(storage):
    ck.save(storage, {"w": torch.ones(3)}, step=1)
    with pytest.raises(StateError, match="w"):
        ck.load(storage, {"w": torch.empty(3, device="meta")})


def test_bits_that_flipped_are_told_with_the_step_that_wrote_them(storage):
    state = {"same": torch.randn(5000), "new": torch.randn(5000)}
    ck.save(storage, state, step=1, compress=None)
    state["new"] += 1
    ck.save(storage, state, step=2, compress=None)
    first = min(path for path in storage.files() if path.endswith(".pack"))
    assert "/00000001-" in first
    rng, found = random.Random(2), set()
    good = storage.files()[first]
    for _ in range(40):
        at = rng.randrange(len(good))
        storage.put(first, good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
        target = {"same": torch.zeros(5000), "new": torch.zeros(5000)}
        error = None
        try:
            ck.load(storage, target)
        except CorruptionError as raised:
            error = raised
        if error is not None:
            assert error.tensors == ("same",)
            assert "00000001-" in str(error)
            assert "partly loaded" in str(error)
        else:  # the chunk of "new" is not referred to any more
            assert torch.equal(target["same"], state["same"])
            assert torch.equal(target["new"], state["new"])
        found.add("none" if error is None else "same")
    assert found == {"same", "none"}


def test_load_waits_for_a_save_that_runs(storage):
    handle = ck.async_save(storage, {"w": torch.ones(300000)}, step=4)
    target = {"w": torch.zeros(300000)}
    assert ck.load(storage, target).step == 4
    assert target["w"].sum() == 300000
    handle.wait()


def test_warnings_go_to_the_log(storage, caplog):
    ck.save(storage, {"a": torch.ones(3), "old": 1}, step=1)
    with caplog.at_level("WARNING", logger="vescale_ckpt"), warnings.catch_warnings():
        ck.load(storage, {"a": torch.zeros(3), "new": 2}, missing="warn", unexpected="warn")
    assert "new" in caplog.text
    assert "old" in caplog.text


@pytest.mark.parametrize("wrong", [{"missing": "x"}, {"unexpected": 1}, {"broadcast": "no"}, {"local": 3}])
def test_arguments_are_checked(storage, wrong):
    ck.save(storage, {"a": 1}, step=1)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ck.load(storage, {"a": 0}, **wrong)


def test_no_checkpoint(storage):
    with pytest.raises(MissingStepError):
        ck.load(storage, {"a": 0})
