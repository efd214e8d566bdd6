"""Arguments of a wrong type or value are refused where they are given, by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale_comm as vc


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def optimizer(model: nn.Module, cls: Any = torch.optim.SGD, **options: Any) -> Any:
    return vc.DistributedOptimizer(model, cls, **options)


WRONG: list[tuple[Any, str, Any, type[Exception]]] = [
    *((call, "bucket_mb", value, ValueError) for call in (vc.replicate, optimizer) for value in (0, -1, float("nan"))),
    *((call, "bucket_mb", "8", TypeError) for call in (vc.replicate, vc.DistributedDataParallel, optimizer)),
    *((call, "accumulate_dtype", "fp32", TypeError) for call in (vc.replicate, vc.DistributedDataParallel, optimizer)),
    *((call, "accumulate_dtype", torch.int32, ValueError) for call in (vc.replicate, optimizer)),
    (optimizer, "main_dtype", torch.int8, ValueError),
    (vc.fully_shard, "param_dtype", torch.int8, ValueError),
    (vc.fully_shard, "param_dtype", "bf16", TypeError),
    (vc.fully_shard, "reduce_dtype", torch.bool, ValueError),
    (vc.fully_shard, "prefetch", "2", TypeError),
    (vc.fully_shard, "prefetch", True, TypeError),
    (vc.fully_shard, "prefetch", -1, ValueError),
    (vc.fully_shard, "granularity", "row", TypeError),
    (vc.fully_shard, "granularity", 0, ValueError),
    (vc.fully_shard, "granularity", {"weight": 1.5}, TypeError),
]


@pytest.mark.parametrize(("call", "name", "value", "error"), WRONG)
def test_wrong_values_are_named(call: Any, name: str, value: Any, error: type[Exception]) -> None:
    shown = str(1.5) if isinstance(value, dict) else str(value)
    with pytest.raises(error, match=rf"^{name}\b.*{shown}"):
        call(nn.Linear(2, 2), **{name: value})


@pytest.mark.parametrize("call", [vc.replicate, vc.DistributedDataParallel, vc.fully_shard])
def test_what_is_no_module_is_refused(call: Any) -> None:
    with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, but got .* generator"):
        call(nn.Linear(2, 2).parameters())


def test_an_unknown_option_is_named_with_the_known_ones() -> None:
    with pytest.raises(TypeError, match=r"no option 'bucket_mbs'; the options are transport, .*bucket_mb,"):
        vc.replicate(nn.Linear(2, 2), bucket_mbs=3)


def test_a_pattern_that_fits_no_parameter_is_named() -> None:
    model = nn.ModuleDict({"experts": nn.Linear(2, 2), "dense": nn.Linear(2, 2)})
    for call in (vc.replicate, vc.DistributedDataParallel):
        with pytest.raises(ValueError, match=r"groups: the pattern 'expert\.x' fits no parameter.*as experts\."):
            call(model, groups={r"dense\..*": None, "expert.x": None})
        with pytest.raises(ValueError, match=r"groups: the pattern '\(' is no regular expression"):
            call(model, groups={"(": None})


def test_optimizers_that_cannot_be_sharded_or_copied() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"optimizer_cls: a step of LBFGS computes the loss several times"):
        optimizer(model, torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r'param_group 0: "optimizer": a step of LBFGS'):
        vc.DistributedOptimizer([{"params": model.parameters(), "optimizer": torch.optim.LBFGS}], torch.optim.SGD)
    with pytest.raises(TypeError, match=r"the class itself, but got a value of type SGD\.$"):
        optimizer(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(vc.CommError, match="cannot be copied"):
        copy.deepcopy(optimizer(model))


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_limit_that_is_none_changes_no_gradient(limit: float) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match=f"max_norm: expected a number of at least 0, but got {limit}"):
        vc.clip_grad_norm_([weight], limit)
    assert weight.grad.tolist() == [1, 1]
    with pytest.raises(TypeError, match="parameters: expected tensors, but one is of type str"):
        vc.clip_grad_norm_("model", 1.0)  # type: ignore[arg-type]
