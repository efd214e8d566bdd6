"""Hints about names."""

from vescale_pipe._nearest import nearest


def test_close_names_come_first_and_else_all_or_a_dozen() -> None:
    names = [f"layers.{number}" for number in range(20)]
    assert nearest("layer.3", names).startswith(" Nearest names: 'layers.3', ")
    assert nearest("x", ["", "head"], "modules") == " There are modules 'head'."
    many = nearest("zzz", names)
    assert many.count("layers.") == 12
    assert many.endswith(" and 8 more.")
    assert nearest("x", [""]) == ""
