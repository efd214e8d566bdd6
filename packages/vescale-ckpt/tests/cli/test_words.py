"""Messages of functions in the words of the command line."""

import argparse

import pytest

from vescale_ckpt._cli import _parser
from vescale_ckpt._cli.words import NAMES, in_options


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("step: 2 is there; pass overwrite=True, or", "step: 2 is there; give --overwrite, or"),
        ("last: expected an integer", "--keep-last: expected an integer"),
        ("Choose the tensors with keys=..., or", "Choose the tensors with --keys, or"),
        ("out: at last: a file", "out: at last: a file"),
        ("lasting: x", "lasting: x"),
    ],
)
def test_messages(text: str, told: str) -> None:
    assert in_options(text) == told


def test_every_option_that_is_named_is_one() -> None:
    (commands,) = [action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)]
    there = {text for command in commands.choices.values() for a in command._actions for text in a.option_strings}
    assert set(NAMES.values()) <= there
    assert "--overwrite" in there
