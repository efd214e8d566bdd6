"""Plans refuse what makes no sense."""

from typing import Any

import pytest

from vescale_pipe._plan import PipePlan
from vescale_pipe._schedules import build_schedule
from vescale_pipe.errors import PipeError


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0: it must be a whole number from 1"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0"),
        ({"num_microbatches": True}, "num_microbatches=True"),
        ({"num_microbatches": 2, "tied": "some"}, "tied='some': it must be 'exact' or 'fast'"),
        ({"num_microbatches": 2, "receive_ahead": 0}, "receive_ahead=0"),
        ({"num_microbatches": 2, "timeout": 0}, "timeout=0"),
        (
            {"num_microbatches": 2, "schedule": build_schedule("1f1b", 2, 3)},
            "num_microbatches=2, but schedule '1f1b' is for 3",
        ),
    ],
)
def test_wrong_values_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PipeError, match=text):
        PipePlan(**options)
