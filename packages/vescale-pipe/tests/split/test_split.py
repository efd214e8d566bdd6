"""Split models run stage by stage in one process: outputs and gradients are those of the whole model, bit for bit."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_pipe._split import Port, StageGraph, split


def leaves(out: Any) -> list[Tensor]:
    """Return the tensors of an output."""
    if isinstance(out, Tensor):
        return [out]
    if dataclasses.is_dataclass(out):
        return [leaf for field in dataclasses.fields(out) for leaf in leaves(getattr(out, field.name))]
    if isinstance(out, dict):
        return [leaf for item in out.values() for leaf in leaves(item)]
    return [leaf for item in out or () for leaf in leaves(item)] if isinstance(out, (tuple, list)) else []


def loss(out: Any) -> Tensor:
    return sum(((leaf.float() + 0.5) ** 2).sum() for leaf in leaves(out) if leaf.requires_grad)


def check(model: nn.Module, *args: Any, stages: int | None = None, **options: Any) -> StageGraph:
    """Split a model and compare it with a copy that is not split, in both modes."""
    kwargs = options.pop("kwargs", {})
    whole = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    drawn = torch.get_rng_state()
    graph = split(model, example_args=args, example_kwargs=kwargs, **options)
    assert torch.equal(drawn, torch.get_rng_state()), "splitting draws random numbers"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), f"splitting changes {name}"
    if stages is not None:
        assert graph.num_stages == stages
    keys = set().union(*(stage.module.state_dict() for stage in graph.stages))
    assert keys == set(model.state_dict())
    for mode in (True, False):
        model.train(mode)
        whole.train(mode)
        for one in (model, whole):
            one.zero_grad()
        torch.manual_seed(1)
        out = graph.run(*args, **kwargs)
        torch.manual_seed(1)
        expected = whole(*args, **kwargs)
        assert type(out) is type(expected)
        mine, theirs = leaves(out), leaves(expected)
        assert len(mine) == len(theirs) > 0
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
            assert one.requires_grad == other.requires_grad
        loss(out).backward()
        loss(expected).backward()
        for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            assert one.grad is None or torch.equal(one.grad, other.grad), name
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, whole.state_dict()[name]), name
    assert graph.matches(args, kwargs)
    return graph


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class UNet(nn.Module):
    """Values that skip stages, glue with a parameter, a buffer and a dropout that follows the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.down = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(16, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.rand(8))
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor, double: bool = True) -> Tensor:
        x = self.enter(x)
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x)) + self.shift
            kept.append(x)
        for layer in self.up:
            x = nn.functional.dropout(layer(torch.cat([x, kept.pop()], -1)) * self.scale, 0.3, self.training)
        return 2 * x if double else x


class GPT(nn.Module):
    """nanoGPT's ways: a ModuleDict, positions from the shape, a tied head, a None output."""

    def __init__(self, layers: int = 4, words: int = 32, width: int = 8, length: int = 16) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(words, width),
                "wpe": nn.Embedding(length, width),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block(width, 0.1) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, words, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(0, ids.size(1), dtype=torch.long, device=ids.device)
        x = self.transformer.drop(self.transformer.wte(ids) + self.transformer.wpe(positions))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class Layer(nn.Module):
    """A decoder's layer: takes what the encoder made, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor, *, mask: Tensor | None = None) -> Tensor:
        scores = self.q(x) @ self.k(memory).transpose(1, 2)
        if mask is not None:
            scores = scores + mask
        return x + scores.softmax(-1) @ memory


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclasses.dataclass
class Result:
    logits: Tensor
    memory: Tensor | None = None
    name: str = "result"


class EncoderDecoder(nn.Module):
    """A shared embedding that is called twice, memory that every decoder layer takes, a mask of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(16, 8)
        self.encoder = Stack(3)
        self.decoder = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(8, 16)

    def forward(self, source: Tensor, target: Tensor, keep: Tensor) -> Result:
        memory = self.encoder(self.shared(source))
        mask = torch.zeros(keep.shape[0], 1, keep.shape[1]).masked_fill_(~keep[:, None], -1e4)
        x = self.shared(target)
        for layer in self.decoder:
            x = layer(x, memory, mask=mask)
        return Result(self.head(x), memory)


def ids(rows: int = 2, length: int = 6) -> Tensor:
    return torch.randint(0, 16, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sequential(count: int) -> None:
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(8, 8), nn.Tanh())])
    graph = check(model, torch.randn(4, 8), num_stages=count, stages=count)
    assert graph.edges == tuple((stage, stage + 1) for stage in range(count - 1))


@pytest.mark.parametrize("at", [["3"], ["1", "2", "5"], ["5", "1"]])
def test_residual_blocks(at: list[str]) -> None:
    graph = check(nn.Sequential(*[Block(dropout=0.2) for _ in range(6)]), torch.randn(4, 8), at=at, stages=len(at) + 1)
    assert all(crossing.shape == (4, 8) and crossing.bytes == 4 * 8 * 4 for crossing in graph.crossings)


def test_skips_over_stages() -> None:
    graph = check(UNet(), torch.randn(4, 8), at=["down.1", "up.0", "up.2"], stages=4)
    assert (0, 2) in graph.edges
    assert graph.tied == (((2, "scale"), (3, "scale")),)
    assert all("shift" in graph.stages[stage].module.state_dict() for stage in (0, 1))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gpt_with_tied_head(count: int) -> None:
    graph = check(GPT(), ids(), ids(), num_stages=count, stages=count)
    assert graph.tied == (((0, "transformer.wte.weight"), (count - 1, "lm_head.weight")),)
    first, last = graph.stages[0].module.get_parameter("transformer.wte.weight"), graph.stages[-1].module.lm_head.weight
    assert first is last
    assert len(graph.crossings) == count - 1  # positions are not sent


def test_none_output() -> None:
    graph = check(GPT(), ids(), at=["transformer.h.1", "transformer.ln_f"], stages=3)
    assert graph.run(ids())[1] is None
    assert graph.stages[-1].num_outputs == 1


@pytest.mark.parametrize(
    "at", [["encoder.layers.1", "decoder.0"], ["decoder.1"], ["encoder.layers.2", "decoder.2", "head"]]
)
def test_encoder_decoder(at: list[str]) -> None:
    keep = torch.rand(2, 6, generator=torch.Generator().manual_seed(0)) > 0.3
    graph = check(EncoderDecoder(), ids(), ids(length=5), keep, at=at, stages=len(at) + 1)
    # The embedding is called before and after the encoder: each stage that calls it has it.
    owners = [stage for stage in graph.stages if "shared.weight" in stage.module.state_dict()]
    assert len(owners) == len(graph.tied[0]) if graph.tied else len(owners) == 1
    # The mask depends on the inputs only: it is made where it is needed.
    assert all("masked_fill" not in crossing.text for crossing in graph.crossings)


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(
        self, pair: dict[str, Tensor], *, weight: Tensor, scale: float = 1.0, extra: Any = None
    ) -> dict[str, Any]:
        left, right = self.first(pair["left"]), self.second(pair["right"]) * scale
        mixed = self.third(left + right) * weight
        return {"out": mixed, "parts": [left, (right, None)], "count": 3, "again": mixed, "index": weight.argmax(-1)}


def test_many_inputs_and_outputs() -> None:
    pair = {"left": torch.randn(4, 8), "right": torch.randn(4, 8)}
    graph = check(
        ManyInputs(), pair, kwargs={"weight": torch.rand(4, 8), "scale": 0.5}, at=["second", "third"], stages=3
    )
    assert graph.stages[1].inputs == (Port("batch", 0, 1), Port("stage", 0, 0))
    assert graph.run(pair, weight=torch.rand(4, 8), scale=0.5)["count"] == 3


def test_batch_norm_counts_once() -> None:
    model = nn.Sequential(
        nn.BatchNorm1d(8, affine=False), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)
    )
    graph = check(model, torch.randn(4, 8), at=["2", "4"], stages=3)
    assert int(model[2].num_batches_tracked) == 1
    assert [crossing.producer for crossing in graph.crossings] == [0, 1]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.other(torch.tanh(self.layer(x)))))


def test_module_called_on_two_stages() -> None:
    graph = check(Twice(), torch.randn(4, 8), at=["other"], stages=2)
    assert graph.tied == (
        ((0, "layer.weight"), (1, "layer.weight")),
        ((0, "layer.bias"), (1, "layer.bias")),
    )


def test_hooks_modes_and_wrappers_stay() -> None:
    model = nn.Sequential(*[Block(dropout=0.5) for _ in range(4)])
    graph = split(model, at=["2"], example_args=(torch.randn(4, 8),))
    calls: list[str] = []
    model[1].mlp.register_forward_hook(lambda module, args, out: calls.append("forward"))
    model[3].register_full_backward_hook(lambda module, before, after: calls.append("backward"))
    graph.run(torch.randn(4, 8)).sum().backward()
    assert calls == ["forward", "backward"]
    graph.stages[0].module.eval()
    assert not model[0].mlp[2].training
    assert model[2].mlp[2].training
    model[0] = nn.Identity()  # a stage holds the modules, not the lists around them
    assert graph.stages[0].module.get_submodule("0.norm") is not None


class Routed(nn.Module):
    """An expert layer that needs values: it can't run on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if rows.numel() > 0:
                out[rows] = expert(x[rows])
                self.seen[index] += rows.numel()
        return out


def test_module_that_needs_values() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Routed(), nn.Linear(8, 8), Routed())
    check(model, torch.randn(6, 8), at=["2"], stages=2)


def test_model_on_meta_and_release() -> None:
    model = GPT()
    real = split(model, num_stages=2, example_args=(ids(), ids()))
    graph = split(copy.deepcopy(model).to("meta"), num_stages=2, example_args=(ids(), ids()))
    assert [stage.inputs for stage in graph.stages] == [stage.inputs for stage in real.stages]
    weight = model.lm_head.weight
    real.release(keep=[1])
    assert model.lm_head.weight is weight
    assert model.transformer.h[0].norm.weight.is_meta
    assert not model.transformer.h[3].norm.weight.is_meta
    assert real.for_batch((ids(3), ids(3))).stages[1].module.lm_head is model.lm_head  # still splits


def test_other_shapes_are_recorded_anew() -> None:
    model = GPT().eval()
    graph = split(model, at=["transformer.h.2"], example_args=(ids(), ids()))
    for shape in ((2, 6), (3, 6), (2, 9)):
        out, mean = graph.run(ids(*shape), ids(*shape))
        expected, other = model(ids(*shape), ids(*shape))
        assert torch.equal(out, expected)
        assert torch.equal(mean, other)
    assert graph.for_batch((ids(3), ids(3))) is graph.for_batch((ids(3), ids(3)))
    assert graph.for_batch((ids(), ids())) is graph


class Modal(nn.Module):
    """Another computation in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.training:
            x = x + torch.randn_like(x)
        return self.b(x)


def test_glue_that_depends_on_the_mode() -> None:
    model = Modal()
    graph = split(model, at=["b"], example_args=(torch.randn(4, 8),))
    assert graph.training is True
    assert graph.matches((torch.randn(4, 8),))
    model.eval()
    assert not graph.matches((torch.randn(4, 8),))
    x = torch.randn(4, 8)
    assert torch.equal(graph.run(x), model(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_compiled_modules() -> None:
    x = torch.randn(4, 8)
    model = nn.Sequential(*[Block() for _ in range(4)])
    for block in model:
        block.compile(backend="eager")
    graph = split(model, at=["2"], example_args=(x,))
    assert torch.equal(graph.run(x), model(x))


def test_hooks_of_a_module_that_is_cut() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, out: out)
    with pytest.warns(UserWarning, match="split: 'Sequential' is cut into stages, so its forward and backward hooks"):
        split(model, at=["1"], example_args=(torch.randn(2, 4),))


def test_recurrent_networks() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.LSTM(8, 8, batch_first=True) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x, (state, _) = layer(x)
                x = x + state[0][:, None]
            return x

    check(Model(), torch.randn(2, 5, 8), num_stages=3, stages=3)


def test_torch_transformer() -> None:
    model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    check(model, torch.randn(2, 5, 8), torch.randn(2, 3, 8), num_stages=3, stages=3)


def test_units_stay_whole() -> None:
    model = nn.Sequential(*[nn.Sequential(Block(), Block()) for _ in range(3)])
    graph = split(model, num_stages=2, units=[Block], example_args=(torch.randn(4, 8),))
    assert [unit.name for unit in graph.units] == [f"{outer}.{inner}" for outer in range(3) for inner in range(2)]
    assert [unit.stage for unit in graph.units] == [0, 0, 0, 1, 1, 1]
    graph = split(model, num_stages=2, units=["0"], example_args=(torch.randn(4, 8),))
    assert [unit.name for unit in graph.units] == ["0", "1", "2"]


def test_unused_modules_have_a_stage() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.spare, self.b = nn.Linear(8, 8), nn.Linear(3, 3), nn.Linear(8, 8)
            self.loose = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    graph = check(Model(), torch.randn(4, 8), at=["b"])
    assert "spare.weight" in graph.stages[0].module.state_dict()


def test_costs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    assert [unit.stage for unit in split(model, num_stages=2, example_args=(x,)).units] == [0, 0, 1, 1]
    flops = [unit.cost for unit in split(model, num_stages=2, example_args=(x,)).units]
    assert flops == [2 * 4 * 8 * 8 + 0, 2 * 4 * 8 * 64, 2 * 4 * 64 * 8, 2 * 4 * 8 * 8]
    for costs in ([9, 1, 1, 1], {"0": 9.0}):
        assert [unit.stage for unit in split(model, num_stages=2, example_args=(x,), costs=costs).units] == [0, 1, 1, 1]
    parameters = split(model, num_stages=2, example_args=(x,), costs="parameters").units
    assert [unit.cost for unit in parameters] == [72, 576, 520, 72]
    assert parameters[0].parameter_bytes == 72 * 4
