"""Messages in values of at most `PART` bytes."""

from __future__ import annotations

import pytest

from vescale_ckpt._coordination.frames import PART, Call, Frame, frames, part_keys

CALL = Call("save of\nstep 7", 3, "agree", 'a "name"\n\u00e9')


@pytest.mark.parametrize(
    ("size", "rest"), [(0, []), (1, []), (PART, []), (PART + 1, [1]), (2 * PART, [PART]), (2 * PART + 3, [PART, 3])]
)
def test_a_message_is_cut(size: int, rest: list[int]) -> None:
    data = b"\n\x00\xff" * (size // 3) + b"\n" * (size % 3)
    first, others = frames(CALL, data)
    assert [len(value) for value in others] == rest
    assert first.data + b"".join(others) == data
    assert first.parts == 1 + len(rest)
    assert part_keys("0/3", first.parts) == ["0/3.1", "0/3.2"][: len(rest)]
    again = Frame.from_bytes(first.to_bytes())
    assert again == first
    assert again.call == CALL


def test_a_call_says_where_it_is() -> None:
    assert str(Call("load", 2, "gather", "sizes")) == "gather('sizes') of 'load' (number 2)"
