import pytest

from vescale_ckpt._load.names import chooser, hints, renamer


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
