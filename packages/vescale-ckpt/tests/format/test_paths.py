"""Names of step folders, and the only two forms of path that an index may name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import parse_step_folder, step_folder
from vescale_ckpt._format.paths import DATA_PATH, chunk_path, data_path


@given(st.integers(0, 10**15), st.text("0123456789abcdef", min_size=8, max_size=64))
def test_step_folders_round_trip(step: int, save_id: str) -> None:
    assert parse_step_folder(step_folder(step, save_id)) == (step, save_id[:8])


@pytest.mark.parametrize("step", [-1, 10**15 + 1])
def test_steps_out_of_range_have_no_folder(step: int) -> None:
    with pytest.raises(ValueError, match="step: must be from 0 to"):
        step_folder(step, "0" * 32)


@pytest.mark.parametrize("save_id", ["", "1234567", "ABCDEF00", "0123456g", "0" * 65, "../../etc"])
def test_save_ids_are_hex(save_id: str) -> None:
    with pytest.raises(ValueError, match="save_id: must be 8 to 64"):
        step_folder(1, save_id)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "latest",
        "1-3f2a9c1b",
        "00001000",
        "00001000-3f2a9c1",
        "00001000-3F2A9C1B",
        "000001000-3f2a9c1b",
        "1000000000000001-3f2a9c1b",
        "00001000-3f2a9c1b\n",
        "00001000-3f2a9c1b/data",
        "steps/steps/00001000-3f2a9c1b",
        "-0001000-3f2a9c1b",
        "\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661-3f2a9c1b",
    ],
)
def test_other_names_are_no_step(name: str) -> None:
    assert parse_step_folder(name) is None


def test_paths_of_data() -> None:
    assert DATA_PATH.fullmatch(data_path(step_folder(7, "0" * 8), 123456, 2, "safetensors"))
    assert DATA_PATH.fullmatch(chunk_path(bytes(range(32))))


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "steps/00000001-00000000/data/../../../x",
        "steps/00000001-00000000/data/..",
        "steps/00000001-00000000/data/.x",
        "steps/00000001-00000000/data/",
        "steps/00000001-00000000/manifest.json",
        "steps/../data/w0",
        "chunks/00/" + "0" * 63,
        "chunks/01/" + "0" * 64,
        "chunks/00/" + "0" * 64 + "/x",
        "chunks\\00\\" + "0" * 64,
        "file:///etc/passwd",
        "steps/00000001-00000000/data/a\n",
        "steps/00000001-00000000/data/a\0",
        "steps/00000001-00000000/data/" + "a" * 200,
    ],
)
def test_other_paths_are_refused(path: str) -> None:
    assert DATA_PATH.fullmatch(path) is None
