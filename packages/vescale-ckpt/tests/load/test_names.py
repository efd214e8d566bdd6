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


def test_hints():
    assert '"_orig_mod."' in hints(["_orig_mod.w"], ["w"])[0]
    assert '"module."' in hints(["w"], ["module.w"])[0]
    assert "weight1" in hints(["layer.weight"], ["layer.weight1"])[0]
    assert hints(["a"], ["zzz"]) == []
