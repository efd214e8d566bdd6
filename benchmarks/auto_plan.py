"""Plans that are found beside plans by hand: bytes per step, predicted and sent, and how long planning takes.

    python benchmarks/auto_plan.py --json rows.json Llama GPT-2

For every model of `vescale_testing.models` and that of examples/nanogpt, on a mesh of 2 x 2: `bytes` is what a rank
sends in a step by the plan found, over what it sends by the plan of the zoo, both by ring algorithms. The plan found
may take no more memory, or, with --free-memory, as much as it likes; the same ratios of work and memory are told
beside it, and CPU seconds of planning.
`predicted` is the difference between the bytes that the plan predicts and those that `explain()` sees in a step, over
the latter. The cost model is told that latency is nothing, so that bytes are what it minimizes. `70B` plans Llama 3
70B on the meta device for 8 x 8 ranks, in CPU seconds of one core. All run in one process with a fake group, whose
collectives do nothing.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Report, parser, row
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale_dtensor import PlanError, explain, implicit_communication, parallelize_module
from vescale_dtensor._auto import Link, Machine, auto_plan, predict
from vescale_dtensor._auto.rehearse import loss_of
from vescale_testing.models import HEADS, Example, Size, examples

SIZE = Size(width=64, layers=2, vocabulary=128, rows=8, length=32)
BY_BYTES = Machine(Link(latency=0.0, bandwidth=1e9))
LARGE = "70B"
LLAMA_3_70B = {
    "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 8192,
}  # fmt: skip


@contextmanager
def fake_mesh(*shape: int) -> Iterator[DeviceMesh]:
    """A mesh whose other ranks do not exist."""
    size = 1
    for n in shape:
        size *= n
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    finally:
        dist.destroy_process_group()


def compare(report: Report, example: Example, *, free_memory: bool) -> None:
    """Plan one model, and run a step by the plan.

    Args:
        report: takes the rows.
        example: the model.
        free_memory: whether the plan may take more memory than that by hand.
    """
    inputs, _ = example.batch(SIZE)
    with fake_mesh(2, 2) as mesh:
        by_hand = predict(example.built(SIZE), mesh, example.plan, inputs)
        begin = time.process_time()
        try:
            memory = None if free_memory else by_hand.memory
            plan = auto_plan(example.built(SIZE), mesh, inputs, machine=BY_BYTES, memory=memory)
        except PlanError as error:
            report.add(row(f"{example.name}: bytes, found / by hand", None, 1.0, str(error).splitlines()[0][:160]))
            return
        seconds = time.process_time() - begin
        found = plan.predicted
        work = found.flops / by_hand.flops if by_hand.flops else 1.0
        note = (
            f"{found.sent:.0f} / {by_hand.sent:.0f} bytes, {found.implicit} implicit, work x {work:.2f}, "
            f"memory x {found.memory / by_hand.memory:.2f}, {seconds:.1f} s"
        )
        ratio = found.sent / by_hand.sent if by_hand.sent else 1.0 + found.sent
        report.add(row(f"{example.name}: bytes, found / by hand", ratio, 1.0, note))
        predicted = sum(n for _, n in plan.predicted.totals.values())
        try:
            sent = measured(example, mesh, plan, inputs)
        except RuntimeError as error:  # the fake group refuses messages from ranks that have nothing to send
            report.add(row(f"{example.name}: predicted, difference", None, 0.05, str(error).splitlines()[0][:160]))
            return
        note = f"{predicted} / {sent} bytes of input"
        report.add(row(f"{example.name}: predicted, difference", abs(predicted - sent) / max(sent, 1), 0.05, note))


class Answers(TorchFunctionMode):
    """Notes whether what a model asks of its data holds, or says so again, in the order of the questions."""

    def __init__(self, again: Sequence[bool] = ()) -> None:
        super().__init__()
        self.said: list[bool] = []
        self._again = iter(again)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__bool__:
            return func(*args, **(kwargs or {}))
        answer = next(self._again, None)
        self.said.append(func(*args) if answer is None else answer)
        return self.said[-1]


def measured(example: Example, mesh: DeviceMesh, plan: Any, inputs: dict[str, Any]) -> int:
    """Bytes that a step really gives to collectives.

    Those of the fake group do nothing, so what the model asks of its data is answered as on one device.
    """
    with Answers() as answers, torch.no_grad():
        example.built(SIZE)(**inputs)
    model = parallelize_module(example.built(SIZE), mesh, plan)
    with explain() as seen, implicit_communication("allow"), Answers(answers.said):
        loss = loss_of(model(**inputs))
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    return sum(size for _, size in seen.totals().values())


def nanogpt() -> Example:
    """The GPT of examples/nanogpt, without dropout."""
    path = Path(__file__).parents[1] / "examples" / "nanogpt" / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(size: Size) -> nn.Module:
        gpt: nn.Module = module.GPT(
            module.GPTConfig(size.vocabulary, size.length, size.layers, HEADS, size.width, dropout=0.0)
        )
        return gpt

    def tokens(size: Size) -> torch.Tensor:
        return torch.randint(size.vocabulary, (size.rows, size.length))

    def inputs(size: Size) -> dict[str, Any]:
        return {"idx": tokens(size), "targets": tokens(size)}

    return Example("nanoGPT", "nanogpt", make, inputs, tokens, lambda result, _: result[1])


def large(report: Report) -> None:
    """Plan a model that no machine at hand could hold."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_3_70B)).bfloat16()
        ids = torch.zeros(16, 4096, dtype=torch.long)
    with fake_mesh(8, 8) as mesh:
        begin = time.process_time()
        plan = auto_plan(model, mesh, {"input_ids": ids, "labels": ids})
        seconds = time.process_time() - begin
        by_hand = predict(model, mesh, "llama", {"input_ids": ids, "labels": ids})
    report.add(row("Llama 3 70B on 8 x 8: CPU seconds to plan", seconds, 60.0))
    note = f"{plan.predicted.sent / 1e9:.1f} / {by_hand.sent / 1e9:.1f} GB"
    report.add(row("Llama 3 70B on 8 x 8: bytes, found / by hand", plan.predicted.sent / by_hand.sent, 1.0, note))
    print(f"\n{plan}\n")


def main() -> None:
    """Run the parts that the command line names."""
    known = {**examples(), "nanoGPT": nanogpt()}
    options = parser(__doc__.splitlines()[0])
    options.add_argument("models", nargs="*", metavar="MODEL", help=f"some of: {', '.join((*known, LARGE))}")
    options.add_argument("--free-memory", action="store_true", help="plans may take more memory than those by hand")
    arguments = options.parse_args()
    chosen = arguments.models or [*known, LARGE]
    warnings.simplefilter("ignore")
    report = Report("plans that are found, beside plans by hand")
    has_transformers = importlib.util.find_spec("transformers") is not None
    for name in chosen:
        if (name == LARGE or known[name].needs) and not has_transformers:
            report.add(row(name, None, None, "needs transformers"))
        elif name == LARGE:
            large(report)
        else:
            compare(report, known[name], free_memory=arguments.free_memory)
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
