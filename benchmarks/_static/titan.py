"""Rows on real gloo ranks: torchtitan's Llama as torchtitan trains it, and the same model class by a plan of ours.

Torchtitan's side is its own: model, `parallelize_llama` (torch's `parallelize_module` along tp with sequence and loss
parallelism, `fully_shard` along dp), loss, and optimizer step with clipping. What its modules import and a training
step does not use is stood in for, where it is not installed: see `_Absent`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from _timing import Report, Times, microseconds, row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from vescale_dtensor import DTensor, Replicate, Shard, Varying, implicit_communication, parallelize_module, static

from .contenders import DYNAMIC, INEXACT, STATIC, collectives
from .ranks import Spent, cpu_ratio, in_turns, on_ranks

MESHES = ((1, 2), (2, 1), (2, 2))
"""Ranks along dp and tp."""
NARROW, DEBUG, WIDE = "6 layers, d=64", "its debug model", "6 layers, d=512"
SIZES: dict[str, dict[str, int]] = {
    NARROW: {"dim": 64, "n_layers": 6, "n_heads": 4},
    DEBUG: {"dim": 256, "n_layers": 6, "n_heads": 16},
    WIDE: {"dim": 512, "n_layers": 6, "n_heads": 16},
}
"""Arguments of its model; the rest is as in its debug model."""
VOCABULARY, LENGTH, BATCH = 2048, 128, 2
"""Tokens; positions; sequences of each rank along dp."""
CHECKED, TOLERANCE = 5, 2e-4
"""Steps whose losses are compared, and by how much they may differ, relatively."""
TITAN, TITAN_KEEPS = "torchtitan", "torchtitan, never resharding"
PLAN: dict[str, Any] = {
    "parameter": {
        r"(tok_embeddings|output|layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13]))\.weight": {"tp": Shard(0)},
        r"layers\.\d+\.(attention\.wo|feed_forward\.w2)\.weight": {"tp": Shard(1)},
    },
    "forward": {
        "input": {"dp": Shard(0)},
        r"(tok_embeddings|layers\.\d+\.(attention\.wo|feed_forward\.w2)).output": {"tp": Shard(1)},
        r"layers\.\d+\.attention.input.x": {"tp": Varying()},
        r"layers\.\d+\.feed_forward.input": {"tp": Varying()},
        "norm.output": {"tp": Varying()},
    },
}
"""What torchtitan does along tp: heads, hidden features and the vocabulary are cut, between blocks the sequence."""


def torchtitan(folder: Path | None, report: Report, seconds: float, quick: bool) -> None:
    """Report times of training steps over torchtitan's, and how far losses are apart.

    Args:
        folder: where torchtitan 0.2 was installed with `pip install --no-deps --target`; None: among other packages.
        report: takes the rows.
        seconds: about how long each model is measured on each mesh.
        quick: only the narrow model on two ranks.
    """
    for shape in MESHES[:1] if quick else MESHES:
        title = f"torchtitan, dp {shape[0]} x tp {shape[1]}"
        report.heading(f"{title}: training step with clipping and AdamW, over torchtitan's (its faster variant)")
        chosen = {NARROW: SIZES[NARROW]} if quick else SIZES
        found = on_ranks(_measure, shape, (folder, chosen, seconds))
        if isinstance(found, str):
            report.add(row(title, None, None, found))
            return
        for name, (spent, sent, apart) in found.items():
            _report(report, f"{title}, {name}", spent, sent, apart)


def _report(report: Report, label: str, spent: Spent, sent: dict[str, int], apart: float) -> None:
    times = Times({n: [wall for wall, _ in rounds] for n, rounds in spent.items()})
    best = TITAN_KEEPS if TITAN_KEEPS in spent and times.ratio(TITAN_KEEPS, TITAN) < 1 else TITAN
    speed = f"{times.ratio(best, STATIC):.2f} times the steps/s of {best}"
    note = f"{best} / static / dynamic {microseconds(*map(times.median, (best, STATIC, DYNAMIC)))}"
    note += f"; CPU {cpu_ratio(spent, STATIC, best):.2f}"
    note += f"; collectives {' / '.join(str(sent[n]) for n in (best, STATIC, DYNAMIC))}"
    report.add(row(f"{label}: static", times.ratio(STATIC, best), None, f"{speed}; {note}"))
    if INEXACT in spent:
        note = f"{times.ratio(best, INEXACT):.2f} times the steps/s; collectives {sent[INEXACT]}"
        report.add(row(f"{label}: {INEXACT}", times.ratio(INEXACT, best), None, note))
    report.add(row(f"{label}: dynamic", times.ratio(DYNAMIC, best)))
    report.add(row(f"{label}: losses apart", apart, TOLERANCE, f"relatively, of {CHECKED} steps: {apart:.1e}"))


@dataclass
class _Trainer:
    """A model with its optimizer; a call is a training step, as in torchtitan's trainer."""

    loss: Callable[[Tensor, Tensor], Tensor]
    """Of a batch."""
    parameters: list[nn.Parameter]
    """What to train."""
    batch: tuple[Tensor, Tensor]
    """Tokens, and the token after each."""
    clip: Callable[[list[nn.Parameter], float], object]
    """Bounds the norm of the gradients."""
    context: Callable[[], Any]
    """Is entered around forward and backward."""

    def __post_init__(self) -> None:
        options = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.parameters, fused=True, **options)  # type: ignore[arg-type]

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        with self.context():
            loss = self.loss(*self.batch)
            loss.backward()
        self.clip(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()


def _measure(mesh: DeviceMesh, folder: Path | None, chosen: dict[str, dict[str, int]], seconds: float) -> Any:
    """Return by model: times of steps, collectives in one, by how much losses are apart; or why there is nothing."""
    try:
        titan = _Titan(folder)
    except ImportError as error:
        return f"there is no torchtitan 0.2 here: {error}"
    dp, rank = mesh.size(0), mesh.get_local_rank("dp")
    tokens = torch.randint(0, VOCABULARY, (dp * BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(dp)[rank]
    batch = (mine[:, :-1].contiguous(), mine[:, 1:].contiguous())
    measured = {}
    for name, sizes in chosen.items():
        steps = _steps(titan, mesh, sizes, batch)
        with implicit_communication("error"):
            losses = {n: [_value(step(), mesh) for _ in range(CHECKED)] for n, step in steps.items()}
            sent = {n: collectives(step).total() for n, step in steps.items()}
            spent = in_turns(steps, seconds)
        apart = max(abs(a - b) / b for n in losses for a, b in zip(losses[n], losses[TITAN], strict=True))
        measured[name] = spent, sent, apart
    return measured


def _steps(titan: _Titan, mesh: DeviceMesh, sizes: dict[str, int], batch: tuple[Tensor, Tensor]) -> dict[str, _Trainer]:
    """Make all trainers; each has its own copy of the same model."""
    dp, tp = mesh.size(0), mesh.size(1)
    count = dp * BATCH * LENGTH
    x, y = (DTensor.from_local(t, mesh, [Shard(0), Replicate()], run_check=False) for t in batch)

    def ours(record: Callable[..., Any] | None) -> _Trainer:
        model = parallelize_module(titan.model(sizes), mesh, PLAN)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            return titan.loss(model(tokens), targets) / count

        function = loss if record is None else record(loss, modules=[model])
        return _Trainer(function, list(model.parameters()), (x, y), nn.utils.clip_grad_norm_, nullcontext)

    steps = {TITAN: titan.trainer(mesh, sizes, batch, count, "default")}
    if dp > 1:
        steps[TITAN_KEEPS] = titan.trainer(mesh, sizes, batch, count, "never")
    steps[STATIC] = ours(static)
    if dp > 1 and tp > 1:
        steps[INEXACT] = ours(partial(static, exact=False))
    steps[DYNAMIC] = ours(None)
    return steps


def _value(loss: Tensor, mesh: DeviceMesh) -> float:
    """The loss of the whole batch; torchtitan has this rank's part of a sum over dp."""
    if isinstance(loss, DTensor):
        return loss.full_tensor().item()
    loss = loss.full_tensor() if isinstance(loss, torch_tensor.DTensor) else loss.clone()
    dist.all_reduce(loss, group=mesh.get_group("dp"))
    return loss.item()


# ------------------------------------------------------------------ torchtitan


class _Titan:
    """Torchtitan's own parts.

    Args:
        folder: where it was installed; None: among other packages.

    Raises:
        ImportError: it is not there, or is not of the series 0.2, the last one that uses `parallelize_module`.
    """

    def __init__(self, folder: Path | None) -> None:
        if folder is not None:
            sys.path.insert(0, str(folder))
        # Torch's compiler, which torchtitan's modules name on import, must not find the stand-in of triton.
        importlib.import_module("torch._inductor.compile_fx")
        sys.meta_path.append(_Absent())
        try:
            importlib.import_module("torch.utils.tensorboard")
        except ImportError:
            sys.modules["torch.utils.tensorboard"] = _Anything("torch.utils.tensorboard")
        # The package's __init__ would import data loaders, checkpoints and metrics; only two of its modules are needed.
        models = importlib.import_module("torchtitan.models")
        package = types.ModuleType("torchtitan.models.llama3")
        package.__path__ = [str(Path(next(iter(models.__path__))) / "llama3")]
        sys.modules[package.__name__] = package
        made = importlib.import_module("torchtitan.models.llama3.model.model")
        self._transformer = made.Transformer
        self._arguments = importlib.import_module("torchtitan.models.llama3.model.args").TransformerModelArgs
        self._parallelize = importlib.import_module("torchtitan.models.llama3.infra.parallelize").parallelize_llama
        self._config = importlib.import_module("torchtitan.config").JobConfig
        self._dims = importlib.import_module("torchtitan.distributed").ParallelDims
        self._utils = importlib.import_module("torchtitan.distributed.utils")
        self.loss = importlib.import_module("torchtitan.components.loss").cross_entropy_loss
        for name, module in sys.modules.items():  # it takes "cuda" where there is no accelerator
            if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
                module.device_type = "cpu"  # type: ignore[attr-defined]

    def model(self, sizes: dict[str, int]) -> nn.Module:
        """Make its model, the same every time."""
        torch.manual_seed(0)
        fixed = {"vocab_size": VOCABULARY, "rope_theta": 500000, "max_seq_len": LENGTH}
        model: nn.Module = self._transformer(self._arguments(**fixed, **sizes))
        with torch.no_grad():
            model.init_weights()  # type: ignore[operator]
        return model

    def trainer(
        self, mesh: DeviceMesh, sizes: dict[str, int], batch: tuple[Tensor, Tensor], count: int, reshard: str
    ) -> _Trainer:
        """Parallelize the model as its trainer does.

        Args:
            mesh: with axes dp and tp.
            sizes: of the model.
            batch: of this rank.
            count: targets of all ranks.
            reshard: "default" or "never": whether blocks give up gathered parameters after forward.
        """
        dp, tp = mesh.size(0), mesh.size(1)
        config = self._config()
        config.training.seq_len = LENGTH
        config.training.mixed_precision_param = "float32"
        config.activation_checkpoint.mode = "none"
        config.parallelism.fsdp_reshard_after_forward = reshard
        dims = self._dims(dp_replicate=1, dp_shard=dp, cp=1, tp=tp, pp=1, ep=1, etp=1, world_size=dp * tp)
        dims.build_mesh()
        model = self._parallelize(self.model(sizes), dims, config)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo cannot scale while it sums, not even by 1
                module.set_force_sum_reduction_for_comms(True)
        context = self._utils.get_train_context(tp > 1)

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            result: Tensor = self.loss(model(tokens), targets) / count
            return result

        return _Trainer(loss, list(model.parameters()), batch, self._utils.clip_grad_norm_, context)


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages that torchtitan imports and a training step on CPU does not use."""

    NAMES = ("triton", "torchdata", "datasets", "tokenizers", "tyro", "einops", "PIL", "wandb", "docstring_parser")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find what no other finder found."""
        if any(name == one or name.startswith(f"{one}.") for one in self.NAMES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make a module all of whose names are there."""
        return _Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


class _Anything(types.ModuleType):
    """A module whose capitalized names are classes, and others modules; as a function it returns what it decorates."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function
