"""One process alone agrees with itself."""

from __future__ import annotations

import pytest

from vescale_ckpt._coordination import Alone


def test_it_answers_itself() -> None:
    alone = Alone(7)
    assert (alone.rank, alone.world, alone.ranks) == (0, 1, (7,))
    with alone.session("save") as talk:
        assert talk.gather("x", b"1") == [b"1"]
        assert talk.broadcast("x", b"2") == b"2"
        assert talk.agree("x", b"3", lambda answers: b"-".join([b"a", *answers])) == b"a-3"
        with pytest.raises(ValueError, match="member 0 has to give data"):
            talk.broadcast("x", None)


def test_its_errors_are_its_own() -> None:
    with pytest.raises(KeyError, match="mine"), Alone().session("save") as talk:
        talk.agree("x", b"", lambda answers: {}["mine"])
