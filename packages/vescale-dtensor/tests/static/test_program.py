"""What a program looks like: no dead steps, names deleted after use, constants made once; and none where it may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_dtensor import static
from vescale_dtensor._static import fold
from vescale_dtensor.errors import StaticWarning


def program_of(function: Callable[..., Any], *args: Any) -> str:
    """Call something static until it has a program; every call must give what the function gives."""
    fixed = static(function)
    for _ in range(4):
        torch.manual_seed(0)
        expected = function(*args)
        torch.manual_seed(0)
        found = fixed(*args)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    code: str = fixed.static_code()
    return code.partition("\n")[2]


def test_dead_steps_are_left_out_and_names_deleted() -> None:
    def function(x: Tensor) -> Tensor:
        (x * 5).sum()
        y = x + 1
        z = y * 2
        return z - x

    lines = [
        "def program(x0):",
        "t0 = add(x0, 1)",
        "t1 = mul(t0, 2)",
        "del t0",
        "t2 = sub(t1, x0)",
        "del t1",
        "return (t2, )",
    ]
    assert [line.strip() for line in program_of(function, torch.ones(2)).splitlines()] == lines


def test_writes_and_draws_stay_though_nobody_uses_their_result() -> None:
    def function(x: Tensor) -> Tensor:
        torch.rand(3)
        y = torch.zeros(3)
        y.add_(x)
        y[1] = 5.0
        torch.exp(x, out=(out := torch.empty(3)))
        return y * torch.rand(3) + out

    code = program_of(function, torch.ones(3))
    assert code.count("rand(3)") == 2
    for text in ("add_(", "__setitem__(", "out="):
        assert text in code


def test_what_follows_from_constants_is_made_once() -> None:
    def function(x: Tensor) -> Tensor:
        positions = torch.arange(4).view(2, 2)
        mask = torch.full((2, 2), -1.0).triu(1)
        return x + positions + mask

    assert [line.strip() for line in program_of(function, torch.ones(2, 2)).splitlines()][1:3] == [
        "t0 = add(x0, k0)",
        "t1 = add(t0, k1)",
    ]


def test_constants_that_are_written_to_returned_or_large_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def written(x: Tensor) -> Tensor:
        count = torch.zeros(2)
        view = count.view(2)
        view += x
        return count * 2

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.arange(3)
        return x + 1, whole[1:]

    assert "zeros" in program_of(written, torch.ones(2))
    assert "arange" in program_of(returned, torch.ones(2))
    fixed = static(returned)
    for _ in range(4):
        fixed(torch.ones(2))[1].add_(7)
    assert fixed(torch.ones(2))[1].tolist() == [1, 2]
    monkeypatch.setattr(fold, "MOST", 7)
    assert "arange" in program_of(lambda x: x + torch.arange(2), torch.ones(2))


def test_slices_containers_and_words_of_python_have_a_spelling() -> None:
    def function(x: Tensor) -> dict[str, Any]:
        parts = torch.stack([x[..., 1:], x[:, :-1]])
        largest = parts.max(0)
        return {"a": [largest.values, largest.indices], "b": parts[None, 0].to(torch.float64), "c": float("nan")}

    fixed = static(function)
    x = torch.arange(6.0).view(2, 3)
    for _ in range(4):
        out = fixed(x)
    assert "def program" in fixed.static_code()
    assert torch.equal(out["a"][0], torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert out["b"].dtype == torch.float64
    assert out["c"] != out["c"]


def test_a_traceback_shows_the_line_of_the_program() -> None:
    fixed = static(lambda x, y: torch.linalg.cholesky(x) + y)
    for _ in range(3):
        fixed(torch.eye(2), torch.ones(2))
    with pytest.raises(RuntimeError) as caught:
        fixed(-torch.eye(2), torch.ones(2))
    assert "linalg_cholesky(x0)" in "".join(str(entry) for entry in caught.traceback)


def test_reasons_name_the_line() -> None:
    def reads(x: Tensor) -> Tensor:
        return x * float(x.sum())

    with pytest.warns(
        StaticWarning, match=rf"reads runs dynamically: __float__ hands a value .*:{reads.__code__.co_firstlineno + 1}"
    ):
        static(reads)(torch.ones(2))


def test_a_function_without_a_tensor_for_a_result_stays_dynamic() -> None:
    seen = torch.zeros(2)
    fixed = static(lambda x: x.add_(1) is None)
    with pytest.warns(StaticWarning, match="returns no tensor"):
        assert fixed(seen) is False
    for _ in range(3):
        assert fixed(seen) is False
    assert seen.tolist() == [4.0, 4.0]
    assert "def program" not in fixed.static_code()
