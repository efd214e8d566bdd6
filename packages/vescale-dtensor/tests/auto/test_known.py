"""What a model asks of its data: answered by example inputs, not where parameters decide."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from vescale_dtensor._auto.rehearse import Example
from vescale_dtensor._auto.skeleton import skeleton
from vescale_dtensor._auto.trace import Trace


class Asks(nn.Module):
    """Asks whether a mask is all ones, as models do that drop it then."""

    def __init__(self, changed: str = "") -> None:
        super().__init__()
        self.inner, self.changed = nn.Linear(8, 8), changed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        first = mask[:, :1]
        if self.changed == "by data":
            mask[1:].mul_(mask[:1])
            first[0] = 0
        elif self.changed == "by parameters":
            mask.mul_((self.inner.weight[:4, 0] > 0).long()[:, None])
        seen = mask.to(device=x.device, dtype=torch.bool)
        x = x if seen.all() else x * seen[:, :1]
        return self.inner(x) if (first == 1).any() else x @ self.inner.weight


def masks(*holes: tuple[int, int]) -> Tensor:
    mask = torch.ones(4, 6, dtype=torch.long)
    for hole in holes:
        mask[hole] = 0
    return mask


@pytest.mark.parametrize(
    ("mask", "changed", "answers", "guesses"),
    [
        (masks(), "", [True, True], 0),
        (masks((2, 3)), "", [False, True], 0),
        (masks(*((i, 0) for i in range(4))), "", [False, False], 0),
        (masks(), "by data", [False, True], 0),
        (masks(), "by parameters", [False, False], 2),
        (masks().to("meta"), "", [False, False], 2),
    ],
    ids=["ones", "a hole", "a column", "changed by data", "changed by parameters", "no data"],
)
def test_answers(mask: Tensor, changed: str, answers: list[bool], guesses: int) -> None:
    before = None if mask.is_meta else mask.clone()
    example = Example((torch.ones(4, 8),), {"mask": mask})
    trace = Trace(skeleton(Asks(changed)), example)
    assert (trace.answers, trace.guesses) == (answers, guesses)
    unseen = Trace(skeleton(Asks(changed)), example, data=False)
    assert (unseen.answers, unseen.guesses) == ([False, False], 2)
    assert before is None or torch.equal(mask, before), "the caller's data stay as they are"
