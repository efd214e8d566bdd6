import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt._load.names import asked, chooser, hints, leave_out, renamer
from vescale_ckpt.testing import MemoryStorage


def test_patterns():
    wanted = chooser(["model", "opt.*.lr"])
    assert [wanted(n) for n in ("model", "model.a.b", "models.a", "opt.0.lr", "opt.lr")] == [
        True,
        True,
        False,
        True,
        False,
    ]
    assert chooser(None)("anything")
    assert chooser(lambda name: name.endswith("x"))("ax")
    assert not chooser([])("a")
    with pytest.raises(ValueError, match="keys"):
        chooser([1])


def test_renaming():
    assert renamer({"a": "b"})("a") == "b"
    assert renamer({"a": "b"})("c") == "c"
    assert renamer([("^x", "y"), ("y$", "z")])("xy") == "yz"
    assert renamer(str.upper)("a") == "A"
    assert renamer(None)("a") == "a"


@pytest.mark.parametrize("rename", [5, "ab", [("(", "x")], [("a",)], [("a", "b", "c")], [(1, "a")], [1]], ids=str)
def test_what_is_no_renaming_is_refused(rename):
    with pytest.raises(ValueError, match=r"^rename: expected a mapping of names, a list of"):
        renamer(rename)


@pytest.mark.parametrize("keys", [5, [1], b"a", 1.5, ["a", None]], ids=str)
def test_what_is_no_pattern_is_refused(keys):
    with pytest.raises(ValueError, match=r"^keys: expected patterns"):
        chooser(keys)


def test_hints():
    assert '"_orig_mod."' in hints(["_orig_mod.w"], ["w"])[0]
    assert '"module."' in hints(["w"], ["module.w"])[0]
    assert "weight1" in hints(["layer.weight"], ["layer.weight1"])[0]
    assert hints(["a"], ["zzz"]) == []


def test_a_prefix_that_the_checkpoint_has_is_put_into_a_rename_that_works():
    missing, there = ["m.0.w", "m.1.w"], ["m._orig_mod.0.w", "m._orig_mod.1.w"]
    (line,) = hints(missing, there)
    text = line.partition("rename=")[2]
    assert text == '[(r"^m\\.", "m._orig_mod.")]'
    assert [renamer([(r"^m\.", "m._orig_mod.")])(name) for name in missing] == there
    assert hints(["w"], ["module.w"]) == [
        'the names of the checkpoint have "module." in them: pass rename=[(r"^", "module.")]'
    ]
    for missing, there in ((["m.0.w", "x.1"], ["m.module.0.w"]), (["a.w", "b.w"], ["a.module.w", "b.module.w"])):
        assert "pass rename=lambda name: ... that adds it" in hints(missing, there)[0]


def test_what_was_asked_for_and_what_may_be_meant():
    names = ["model.layers.0.w", "model.layers.0.b", "epoch"]
    assert asked("modle.*", names) == "by 'modle.*'; near are model"
    assert asked(["epcoh", "zz"], names) == "by 'epcoh', 'zz'; near are epoch"
    assert asked("zz", names) == "by 'zz'; there are model.layers.0.w, model.layers.0.b, epoch"
    assert asked([], names).startswith("by an empty list; there are model.")
    assert asked(lambda name: False, []) == "by the function; there are none"


def test_what_to_leave_out():
    known = ["a.w", "a.b", "c"]
    shape, dtype = "a.w: shape [2], in the checkpoint [3]", "a.b: float16, in the checkpoint float32; pass cast=True to"
    first = "to load the rest, leave out what does not fit: keys=lambda name: name not in ['a.w']"
    assert leave_out([shape], known, strict=True) == [first]
    assert leave_out([shape], known, strict=False) == [first + ", strict=False"]
    assert leave_out([shape, dtype], known, strict=True) == [first]  # the other line says itself what helps
    assert leave_out([dtype], known, strict=True) == []
    assert leave_out([], known, strict=True) == []
    assert leave_out([shape, "a: a dict in the checkpoint, a list in the state"], known, strict=True) == []
    assert leave_out([shape], ["a.w"], strict=True) == []


def test_the_advice_of_a_load_works():
    storage = MemoryStorage()
    ck.save(storage, {"w": torch.ones(3), "b": torch.ones(2), "n": 5}, step=1)

    def load(state, **options):
        with pytest.raises(ck.MismatchError) as caught:
            ck.load(storage, state, **options)
        return str(caught.value)

    text = load({"w": torch.zeros(4), "b": torch.zeros(2), "n": 0})
    assert "strict=False" not in text
    assert text.endswith("hint: to load the rest, leave out what does not fit: keys=lambda name: name not in ['w']")
    state = {"w": torch.zeros(4), "b": torch.zeros(2), "n": 0}
    ck.load(storage, state, keys=lambda name: name not in ["w"])
    assert (state["b"].tolist(), state["n"], state["w"].sum()) == ([1, 1], 5, 0)

    text = load({"w": torch.zeros(4), "b": torch.zeros(2)})
    assert text.endswith("keys=lambda name: name not in ['w'], strict=False")
    state = {"w": torch.zeros(4), "b": torch.zeros(2)}
    ck.load(storage, state, keys=lambda name: name not in ["w"], strict=False)
    assert state["b"].tolist() == [1, 1]
    assert "strict=False" not in load({"w": torch.zeros(4), "b": torch.zeros(2)}, strict=False).partition("\n")[0]

    text = load({"w": torch.zeros(3), "b": torch.zeros(2), "n": 0, "new": 1})
    assert text.partition("\n")[0].endswith("nothing was loaded. strict=False loads what both have.")
    state = {"w": torch.zeros(3), "b": torch.zeros(2), "n": 0, "new": 1}
    ck.load(storage, state, strict=False)
    assert state["w"].sum() == 3
