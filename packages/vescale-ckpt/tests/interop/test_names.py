"""Names stay distinct."""

import pytest

from vescale_ckpt import MismatchError
from vescale_ckpt._interop.names import below, new_names


def test_rename_forms_after_the_prefix():
    names = ["m.a.w", "m.b.w", "o"]
    assert new_names(names) == {name: name for name in names}
    assert new_names(names, {"a.w": "x"}, "m.") == {"m.a.w": "x", "m.b.w": "b.w"}
    assert new_names(names, [(r"\.w$", ".weight")], "m.") == {"m.a.w": "a.weight", "m.b.w": "b.weight"}
    assert new_names(names, str.upper) == {name: name.upper() for name in names}


def test_names_that_become_one_or_none():
    with pytest.raises(MismatchError, match="a and b would both become x"):
        new_names(["a", "b"], lambda _: "x")
    with pytest.raises(MismatchError, match="becomes None"):
        new_names(["a"], lambda _: None)
    with pytest.raises(MismatchError, match=r"no name begins with 'z\.'"):
        new_names(["a"], None, "z.")


@pytest.mark.parametrize("under", [".a", "a.", "a..b", 5])
def test_below_needs_whole_keys(under):
    with pytest.raises(ValueError, match="under"):
        below(under)
