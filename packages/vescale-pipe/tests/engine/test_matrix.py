"""Every schedule with a name, on 2 and 4 ranks, with every kind of model: ten steps have the bits of one process.

Micro-batches are uneven and change their size from step to step; sequences change their length. All ranks act in
this process, but for the tests at the end. One process is run once per model; graphs are shared by all schedules.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from vescale_pipe import PipeEngine, PipePlan, Schedule, StageGraph, build_schedule, microbatch_seed, split
from vescale_pipe._schedules.registry import BUILT_IN

STEPS = 10
MICROBATCHES = 4
ROWS = (9, 9, 11, 10, 8)
"""Of the steps, over and over: micro-batches of 2 and of 3."""
LENGTHS = (6, 6, 4)
"""Of sequences, over and over."""
SCHEDULES = [*sorted(BUILT_IN), "optimized"]
BLOCKS = [f"blocks.{number}" for number in range(1, 8)]
Batch = tuple[tuple[Any, ...], dict[str, Any], Any]


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.drop = nn.Dropout(dropout) if dropout else None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x))
        return x + (y if self.drop is None else self.drop(y))


class Cross(nn.Module):
    """Uses its second value twice."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(6, 6)
        self.block = Block()

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.block(x + torch.tanh(self.key(other)) * other)


class Chain(nn.Module):
    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Skips(Chain):
    """The first value goes to all blocks, the second to the last one only."""

    def __init__(self) -> None:
        super().__init__(Cross)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.blocks[0](x, x)
        second = x = self.blocks[1](x, first)
        for block in self.blocks[2:]:
            x = block(x, first)
        return x + second


class Many(Chain):
    """Several inputs, keywords of which some have no rows, and a dict as the result."""

    def __init__(self) -> None:
        super().__init__(Cross)

    def forward(self, x: Tensor, other: Tensor, scale: Tensor | None = None, offset: float = 0.0) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x, other)
        return {"out": x if scale is None else x * scale + offset, "mid": other * 2}


class Tied(Chain):
    """One weight at both ends and in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 5:
                x = x + self.embed(tokens)
        return self.head(x)


def normed() -> nn.Module:
    return Chain(lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True)))


def in_place() -> nn.Module:
    return Chain(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))


def frozen() -> nn.Module:
    model = Chain()
    for number in (0, 1, 4):
        model.blocks[number].requires_grad_(False)
    return model


def dropout() -> nn.Module:
    return Chain(lambda: Block(0.3))


def llama(kind: str = "Llama", **options: Any) -> nn.Module:
    hf = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 32}
    config = getattr(hf, f"{kind}Config")(num_hidden_layers=1, num_key_value_heads=1, **small, **options)
    return getattr(hf, f"{kind}ForCausalLM")(config)


def mixtral() -> nn.Module:
    return llama("Mixtral", num_local_experts=2)


def gpt2() -> nn.Module:
    """Has dropout of its own."""
    hf = pytest.importorskip("transformers")
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, **ends)
    return hf.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """The table of tokens is used in three places, the encoder's result twice in the decoder."""
    hf = pytest.importorskip("transformers")
    small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 32, "dropout_rate": 0}
    config = hf.T5Config(num_layers=1, num_decoder_layers=1, decoder_start_token_id=0, pad_token_id=0, **small)
    return hf.T5ForConditionalGeneration(config)


def floats(rows: int, length: int) -> Batch:
    return (torch.randn(rows, 6),), {}, torch.randn(rows, 6)


def tokens(rows: int, length: int) -> Batch:
    return (torch.randint(0, 11, (rows, length)),), {}, torch.randint(0, 11, (rows, length))


def many(rows: int, length: int) -> Batch:
    return (torch.randn(rows, 6), torch.randn(rows, 6)), {"scale": torch.randn(6), "offset": 0.5}, torch.randn(rows, 6)


def labels(rows: int, length: int) -> Batch:
    ids = torch.randint(1, 32, (rows - 4, length))  # micro-batches of 1 and of 2
    return (), {"input_ids": ids, "labels": ids, "use_cache": False}, None


def cross_entropy(out: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(out.flatten(0, -2), target.flatten())


def dict_loss(out: dict[str, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(out["out"], target) + out["mid"].mean()


@dataclass(frozen=True)
class Case:
    """A kind of model."""

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch] = floats
    loss_fn: Callable[..., Tensor] | None = functional.mse_loss
    cuts: list[str] | None = None
    """Where eight stages begin, but for the first."""
    seed: int | None = None
    """Of what forwards draw."""


LLAMA = "layers.0 layers.0.self_attn layers.0.self_attn.o_proj layers.0.post_attention_layernorm layers.0.mlp norm"
GPT2 = "h.0 h.0.attn h.0.ln_2 h.0.mlp h.0.mlp.c_proj ln_f"
T5 = "block.0 block.0.layer.1 final_layer_norm", "block.0.layer.1 block.0.layer.2 final_layer_norm"
CASES = {
    "sequential": Case(lambda: nn.Sequential(*(Block() for _ in range(8))), cuts=[str(n) for n in range(1, 8)]),
    "skips": Case(Skips),
    "many": Case(Many, many, dict_loss),
    "tied": Case(Tied, tokens, cross_entropy),
    "normed": Case(normed),
    "in place": Case(in_place),
    "frozen": Case(frozen),
    "dropout": Case(dropout, seed=5),
    "llama": Case(llama, labels, None, [*(f"model.{name}" for name in LLAMA.split()), "lm_head"]),
    "mixtral": Case(mixtral, labels, None, [*(f"model.{name}" for name in LLAMA.split()), "lm_head"]),
    "gpt2": Case(gpt2, labels, None, [*(f"transformer.{name}" for name in GPT2.split()), "lm_head"], 7),
    "t5": Case(
        t5,
        labels,
        None,
        [
            *(f"encoder.{name}" for name in T5[0].split()),
            "decoder",
            *(f"decoder.{name}" for name in T5[1].split()),
        ],
    ),
}


@dataclass(frozen=True)
class Step:
    """What one process does in a step."""

    batch: Batch
    loss: Tensor
    shown: Tensor
    grads: dict[str, Tensor | None]


Recorded = tuple[dict[str, Tensor], list[Step], dict[str, Tensor]]
"""State before, steps, state after."""


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return CASES[name].make().train()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pieces(value: Any, rows: int) -> list[Any]:
    """A value per micro-batch."""
    if isinstance(value, Tensor) and value.dim() and len(value) == rows:
        return list(value.tensor_split(MICROBATCHES))
    return [value] * MICROBATCHES


def main(out: Any) -> Tensor:
    """Return the tensor that counts in the result of a model."""
    if isinstance(out, Tensor):
        return out
    return out["out"] if "out" in out else out["logits"]


@functools.cache
def one_process(name: str) -> Recorded:
    """Run the loop that a pipeline stands for: one micro-batch after the other, each forward and backward."""
    model, case = made(name), CASES[name]
    before = copy.deepcopy(model.state_dict())
    steps = []
    trains = optimizer(model.parameters())
    for number in range(STEPS):
        torch.manual_seed(100 + number)
        batch = case.batch(ROWS[number % len(ROWS)], LENGTHS[number % len(LENGTHS)])
        args, kwargs, target = batch
        rows = len(next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)))
        cut = [pieces(one, rows) for one in args]
        named = {key: pieces(one, rows) for key, one in kwargs.items()}
        total, shown = torch.zeros(()), []
        for m, size in enumerate(len(one) for one in torch.zeros(rows).tensor_split(MICROBATCHES)):
            if case.seed is not None:
                torch.manual_seed(microbatch_seed(case.seed, number, m))
            out = model(*(one[m] for one in cut), **{key: one[m] for key, one in named.items()})
            loss = out.loss if case.loss_fn is None else case.loss_fn(out, target.tensor_split(MICROBATCHES)[m])
            part = loss * (size / rows)
            part.backward()
            total = total + part.detach()
            shown.append(main(out).detach())
        found = dict(model.named_parameters(remove_duplicate=False))
        grads = {key: None if one.grad is None else one.grad.clone() for key, one in found.items()}
        steps.append(Step(batch, total, torch.cat(shown), grads))
        trains.step()
        trains.zero_grad()
    return before, steps, copy.deepcopy(model.state_dict())


@functools.cache
def built(schedule: str, ranks: int) -> Schedule:
    return build_schedule(schedule, ranks, MICROBATCHES)


@functools.cache
def staged(name: str, stages: int) -> StageGraph:
    """Return a model in stages; it keeps what was recorded of other shapes."""
    case = CASES[name]
    cuts = case.cuts or BLOCKS
    every = 8 // stages
    args, kwargs, _ = case.batch(6, LENGTHS[0])
    return split(made(name), at=cuts[every - 1 :: every], example_args=args, example_kwargs=kwargs)


def check(name: str, schedule: Schedule, recorded: Recorded, mesh: Any = None) -> None:
    """Run the steps of one process in a pipeline."""
    before, steps, after = recorded
    graph = staged(name, schedule.num_stages)
    assert graph.model is not None
    graph.model.load_state_dict(before)
    graph.model.zero_grad()
    plan = PipePlan(schedule=schedule, num_microbatches=MICROBATCHES, seed=CASES[name].seed, timeout=30)
    act_out = schedule.num_ranks if mesh is None else None
    engine = PipeEngine(graph, mesh, plan, CASES[name].loss_fn, act_out=act_out)
    mine = dict(engine.named_parameters())
    assert mine
    trains = optimizer(mine.values())
    for number, step in enumerate(steps):
        args, kwargs, target = step.batch
        loss, out = engine(*args, target=target, **kwargs)
        assert torch.equal(loss, step.loss), f"loss of step {number}"
        assert out is None or torch.equal(main(out), step.shown), f"outputs of step {number}"
        different = [key for key, one in mine.items() if not same(one.grad, step.grads[key])]
        assert not different, f"gradients of step {number}"
        trains.step()
        trains.zero_grad()
    for key, value in engine.state_dict().items():
        assert torch.equal(value, after[key]), key
    engine.close()


SOME = ("in place", "frozen")
"""Models for which a few schedules will do."""


def same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in SOME])
def test_all_schedules_and_models(name: str, schedule: str, ranks: int) -> None:
    check(name, built(schedule, ranks), one_process(name))


@pytest.mark.parametrize("schedule", ["1f1b", "looped_bfs", "zb_v", "dualpipe_v"])
@pytest.mark.parametrize("name", SOME)
def test_some_schedules_and_other_models(name: str, schedule: str) -> None:
    check(name, built(schedule, 4), one_process(name))


@pytest.fixture
def recorded(request: pytest.FixtureRequest) -> Recorded:
    """What one process does, worked out in the test process for all ranks."""
    return one_process(request.node.callspec.params["name"])


NAMES = list(CASES)
SOME_ON_2 = [(NAMES[number % len(NAMES)], schedule) for number, schedule in enumerate(SCHEDULES)]
SOME_ON_4 = [(NAMES[(number + 5) % len(NAMES)], schedule) for number, schedule in enumerate(SCHEDULES)]


@pytest.mark.ranks(2, pool=True, timeout=120)
@pytest.mark.parametrize(("name", "schedule"), SOME_ON_2)
def test_each_schedule_on_two_processes(name: str, schedule: str, recorded: Recorded) -> None:
    check(name, built(schedule, 2), recorded, dist.group.WORLD)


@pytest.mark.ranks(4, pool=True, timeout=120)
@pytest.mark.parametrize(("name", "schedule"), SOME_ON_4)
def test_each_schedule_on_four_processes(name: str, schedule: str, recorded: Recorded) -> None:
    check(name, built(schedule, 4), recorded, dist.group.WORLD)
