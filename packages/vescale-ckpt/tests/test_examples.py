"""The examples of what users call run as a user would run them: with nothing but what they import themselves."""

from __future__ import annotations

import doctest
import inspect
from typing import Any

import pytest

import vescale_ckpt as ck

EXAMPLES = {
    test.name: test
    for name in ck.__all__
    if not name.startswith("__")
    for test in doctest.DocTestFinder(recurse=True).find(getattr(ck, name), name, globs={})
    if test.examples
}
PRIVATE = [name for name in EXAMPLES if any(part.startswith("_") for part in name.split("."))]


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - set(PRIVATE)))
def test_an_example_needs_nothing_but_itself(name: str) -> None:
    test = EXAMPLES[name]
    assert "vescale_ckpt._" not in (test.docstring or "")
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def reports() -> set[str]:
    """Names of the classes of this package that the functions of it say they return."""
    found = set()
    for name in ck.__all__:
        value: Any = getattr(ck, name)
        if inspect.isfunction(value):
            said = str(inspect.signature(value).return_annotation)
            found |= {
                word for word in said.replace("|", " ").split() if word[:1].isupper() and word not in ("None", "Any")
            }
    return found


def test_what_functions_return_has_a_public_name() -> None:
    assert {"VerifyReport", "DiffReport", "GcReport", "SaveInfo"} <= reports() <= set(ck.__all__) | {"Local"}
