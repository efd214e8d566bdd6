"""Parameter groups as users write them."""

import pytest
import torch
from torch import nn

from vescale_comm._optimizer.groups import read_group, read_groups


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def test_a_model_is_one_group_with_names() -> None:
    (group,) = read_groups(model(), None)
    assert group.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert group.options == {}


def test_shared_parameters_come_once() -> None:
    net = model()
    net.append(net[0])
    (group,) = read_groups(net, None)
    assert group.names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_names_come_from_pairs_or_from_the_model_or_from_the_place() -> None:
    net = model()
    pairs = list(net.named_parameters())
    assert read_groups(pairs, None)[0].names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert read_groups(net.parameters(), net)[0].names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    groups = read_groups([{"params": [net[0].weight]}, {"params": net[1].parameters(), "lr": 2}], None)
    assert [group.names for group in groups] == [["0.0"], ["1.0", "1.1"]]
    assert groups[1].options == {"lr": 2}


def test_a_group_may_have_an_optimizer_and_a_plan() -> None:
    net = model()
    groups = read_groups(
        [{"params": net[0].weight, "optimizer": torch.optim.SGD, "plan": "whole"}, {"params": [net[0].bias]}], net
    )
    assert (groups[0].optimizer, groups[0].plan, groups[0].options) == (torch.optim.SGD, "whole", {})
    assert (groups[1].optimizer, groups[1].plan) == (None, None)


def test_frozen_parameters_are_kept_apart() -> None:
    net = model()
    net[0].weight.requires_grad_(False)
    (group,) = read_groups(net, None)
    assert group.names == ["0.bias", "1.weight", "1.bias"]
    assert list(group.frozen) == ["0.weight"]


def test_what_is_no_parameter_list_is_refused() -> None:
    net = model()
    with pytest.raises(ValueError, match="generator used up"):
        read_groups([], None)
    with pytest.raises(TypeError, match="one tensor"):
        read_groups(net[0].weight, None)
    with pytest.raises(TypeError, match="entry 1 is a int"):
        read_groups([net[0].weight, 3], None)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="set has no order"):
        read_groups([{"params": set(net.parameters())}], None)
    with pytest.raises(ValueError, match='has no "params"'):
        read_groups([{"lr": 1}], None)
    with pytest.raises(ValueError, match=r"given twice, also as 0\.weight"):
        read_groups([{"params": net.parameters()}, {"params": [net[0].weight]}], net)
    with pytest.raises(ValueError, match="called w"):
        read_groups([("w", net[0].weight), ("w", net[0].bias)], None)
    with pytest.raises(ValueError, match="result of an operator"):
        read_groups([net[0].weight * 2], None)
    with pytest.raises(TypeError, match=r"subclass of torch\.optim\.Optimizer"):
        read_groups([{"params": net.parameters(), "optimizer": torch.nn.Linear}], None)
    with pytest.raises(ValueError, match="none of the parameters requires"):
        read_groups(net.requires_grad_(False), None)


def test_a_group_that_joins_must_be_new() -> None:
    net = model()
    groups = read_groups(net[0], None)
    assert read_group({"params": net[1].parameters()}, 1, net, groups).names == ["1.weight", "1.bias"]
    with pytest.raises(ValueError, match="given twice"):
        read_group({"params": [net[0].weight]}, 1, net, groups)
    with pytest.raises(ValueError, match="param_group 1: none"):
        read_group({"params": [torch.zeros(2)]}, 1, net, groups)
