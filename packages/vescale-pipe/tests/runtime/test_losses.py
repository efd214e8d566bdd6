"""Weights and seeds of losses."""

from collections import namedtuple

import pytest
import torch

from vescale_pipe._runtime.batch import Batch
from vescale_pipe._runtime.losses import LossRule, own_loss
from vescale_pipe.errors import PipeError


def batch(rows: int, count: int) -> Batch:
    return Batch((torch.zeros(rows, 2),), {}, torch.arange(rows), count)


def test_weights() -> None:
    one = batch(10, 4)
    assert LossRule(None, "mean").weights(one, []) == [0.3, 0.3, 0.2, 0.2]
    assert LossRule(None, "sum").weights(one, []) == [1.0] * 4
    assert LossRule(None, lambda y: y.sum()).weights(one, one.targets()) == [3 / 45, 12 / 45, 13 / 45, 17 / 45]
    assert LossRule(None, "mean").weights(Batch((1,), {}, None, 4), []) == [0.25] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_seeds_are_what_backward_would_start_with(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rule = LossRule(None)
    for weight in (0.3, 1 / 3, 1.0, 1e-5):
        for scale in (1.0, 1024.0, 3.7):
            loss = torch.ones(shape, dtype=dtype, requires_grad=True)
            ((loss * weight) * scale if scale != 1.0 else loss * weight).backward()
            assert torch.equal(rule.seed(loss, weight, scale), loss.grad)
            assert rule.seed(loss, weight, scale) is rule.seed(loss, weight, scale)


def test_seeds_do_not_pile_up() -> None:
    rule = LossRule(None)
    loss = torch.ones(())
    for number in range(1000):
        rule.seed(loss, float(number), 1.0)
    assert len(rule._seeds) <= 257


def test_a_loss_is_found_where_models_put_it() -> None:
    x = torch.ones(())
    assert own_loss(x) is x
    assert own_loss({"loss": x, "logits": 1}) is x
    assert own_loss(namedtuple("Out", "loss")(x)) is x
    assert own_loss({"logits": x}) is None
    assert own_loss(3) is None


def test_weights_of_zero_are_told() -> None:
    with pytest.raises(PipeError, match="their sum must not be 0"):
        LossRule(None, lambda y: 0).weights(batch(4, 2), [None, None])
    with pytest.raises(PipeError, match="the model's own loss is NoneType"):
        LossRule(None).value({"logits": 1}, None)
