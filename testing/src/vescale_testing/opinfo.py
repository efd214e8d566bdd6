"""Run torch's own operator samples (OpInfo) on DTensors with random placements, against one device.

`run_opinfo` covers a list of operators on a group of ranks and returns one `OpRow` per operator.
Samples are drawn with fixed seeds and placements with a seed per sample, so a row can be rerun
alone. An operator that hangs or kills its rank is found by running its batch one by one.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from vescale_testing.meshes import cached_mesh
from vescale_testing.oracle import compare, compare_gradients
from vescale_testing.ranks import RankFailure, run_ranks

RANDOM = frozenset(
    """bernoulli normal multinomial rand_like randn_like randint_like randint randn rand uniform cauchy
    exponential geometric log_normal svd_lowrank pca_lowrank empty empty_like new_empty empty_strided
    new_empty_strided empty_permuted nn.functional.dropout nn.functional.dropout2d
    nn.functional.dropout3d nn.functional.alpha_dropout nn.functional.feature_alpha_dropout
    nn.functional.rrelu nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d
    nn.functional.multi_head_attention_forward""".split()
)
"""Operators whose results are random or unspecified: compared in tests of their own."""

FORMS = ("function", "method", "inplace")

MEMORY = frozenset({"as_strided.partial_views"})
"""Operators on memory around their argument, which `distribute_tensor` does not copy."""


@dataclass(slots=True)
class OpRow:
    """What was seen of one operator."""

    name: str
    """Name in op_db, with its variant."""
    passed: int = 0
    """Samples whose results (and gradients) equal one device's."""
    distributed: int = 0
    """Of these, samples that ran without gathering sharded data."""
    refused: int = 0
    """Samples that raised one of this project's errors, which say what to do."""
    failed: int = 0
    """Samples that raised some other error though one device did not."""
    wrong: int = 0
    """Samples with a wrong value, shape, dtype or gradient."""
    skipped: int = 0
    """Samples that cannot be compared (one device raises, no tensors)."""
    messages: list[str] = field(default_factory=list)
    """First lines of errors and differences."""

    @property
    def status(self) -> str:
        """One word for the table."""
        if self.wrong:
            return "wrong"
        if self.failed:
            return "failed"
        if self.refused:
            return "refused"
        return "passed" if self.passed else "skipped"


def op_names() -> list[str]:
    """Full names of all strided operators of op_db that are not random."""
    return [name for name, op in _database() if not _excluded(op.name) and name not in MEMORY]


def _excluded(name: str) -> bool:
    return name in RANDOM or name.startswith(("signal.", "sparse", "torch.ops")) or "sparse" in name


def _database() -> Iterable[tuple[str, Any]]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [(op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""), op) for op in op_db]


def run_opinfo(
    names: Sequence[str],
    *,
    world: int = 4,
    mesh: Sequence[int] = (2, 2),
    samples: int = 4,
    form: str = "function",
    batch: int = 24,
) -> list[OpRow]:
    """Run operators on `world` ranks and return their rows in order.

    Args:
        names: names as `op_names` gives them.
        world: number of gloo ranks.
        mesh: shape of the mesh.
        samples: samples per operator, spread over all that op_db has.
        form: ``function``, ``method`` or ``inplace``.
        batch: operators per group of processes.
    """
    rows: list[OpRow] = []
    for start in range(0, len(names), batch):
        rows += _run_batch(list(names[start : start + batch]), world, tuple(mesh), samples, form)
    return rows


def _run_batch(names: list[str], world: int, mesh: tuple[int, ...], samples: int, form: str) -> list[OpRow]:
    arguments = {"names": names, "mesh": mesh, "samples": samples, "form": form}
    try:
        result = run_ranks(_on_rank, world, timeout=40.0 + 6.0 * len(names), kwargs=arguments)
    except RankFailure as failure:
        if len(names) > 1:
            middle = len(names) // 2
            return [
                r for half in (names[:middle], names[middle:]) for r in _run_batch(half, world, mesh, samples, form)
            ]
        return [
            OpRow(
                names[0],
                failed=1,
                messages=["the ranks died or hung: " + str(failure).strip().splitlines()[0]],
            )
        ]
    return [OpRow(**row) for row in result[0]]


def _on_rank(rank: int, names: list[str], mesh: tuple[int, ...], samples: int, form: str) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    known = dict(_database())
    device_mesh = cached_mesh(*mesh)
    return [asdict(_run_operator(name, known[name], device_mesh, samples, form)) for name in names]


def _run_operator(name: str, op: Any, mesh: Any, samples: int, form: str) -> OpRow:
    row = OpRow(name)
    call = {"function": op, "method": op.method_variant, "inplace": op.inplace_variant}[form]
    dtype = next((d for d in (torch.float64, torch.int64, torch.float32, torch.bool) if d in op.dtypes), None)
    if call is None or dtype is None:
        return row
    if form == "inplace":
        in_place = call

        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return in_place(x.clone(), *args, **kwargs)

    gradients = op.supports_autograd and dtype == torch.float64
    torch.manual_seed(0)
    try:
        inputs = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    except Exception as error:  # noqa: BLE001  op_db's own generators raise anything
        row.messages.append(f"no samples: {error}"[:120])
        return row
    inputs = inputs[:: max(1, len(inputs) // samples)][:samples]
    for index, sample in enumerate(inputs):
        status, message = _run_sample(call, sample, mesh, f"{name}/{index}", gradients)
        agreed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(agreed, (status, message))
        order = ["wrong", "failed", "refused", "skipped", "passed", "distributed"]
        status, message = min(agreed, key=lambda a: order.index(a[0]))
        if status == "distributed":
            row.passed += 1
            row.distributed += 1
        else:
            setattr(row, status, getattr(row, status) + 1)
        if message and len(row.messages) < 3:
            row.messages.append(f"sample {index}: {message}")
    return row


def _run_sample(call: Any, sample: Any, mesh: Any, seed: str, gradients: bool) -> tuple[str, str]:
    from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, random_mode
    from vescale_dtensor.errors import DTensorError, ImplicitCommunicationError

    rng = random.Random(seed)
    plain = (sample.input, sample.args, sample.kwargs)
    try:
        torch.manual_seed(0)
        expected = call(plain[0], *plain[1], **plain[2])
    except Exception as error:  # noqa: BLE001
        return "skipped", f"one device raises {type(error).__name__}"

    def distribute(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.layout != torch.strided or t.is_quantized:
            return t
        return distribute_tensor(t.detach(), mesh, _placements(t, mesh.ndim, rng)).requires_grad_(t.requires_grad)

    ours = tree_map(distribute, plain)
    if not any(isinstance(t, DTensor) for t in tree_flatten(ours)[0]):
        return "skipped", ""
    status = "distributed"
    try:
        try:
            torch.manual_seed(0)
            with implicit_communication("error"), random_mode("whole"):
                actual = call(ours[0], *ours[1], **ours[2])
        except ImplicitCommunicationError:
            status = "passed"
            torch.manual_seed(0)
            with implicit_communication("allow"), random_mode("whole"):
                actual = call(ours[0], *ours[1], **ours[2])
        with implicit_communication("allow"):
            compare(actual, expected, rtol=1e-6, atol=1e-7, requires_grad=False)
            if gradients:
                leaves = tree_flatten(plain)[0], tree_flatten(ours)[0]
                compare_gradients(*leaves, expected, actual, rtol=1e-6, atol=1e-7)
    except DTensorError as error:
        return "refused", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    except Exception as error:  # noqa: BLE001
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return status, ""


def _placements(t: Tensor, mesh_ndim: int, rng: random.Random) -> list[Any]:
    from vescale_dtensor import Partial, Replicate, Shard, Varying

    choices: list[Any] = [Replicate(), Replicate()]
    if t.is_floating_point():
        choices += [Varying(), Partial()]
    choices += [Shard(d) for d in range(t.ndim) if t.shape[d] > 1] * 2
    return [rng.choice(choices) for _ in range(mesh_ndim)]


__all__ = ["FORMS", "RANDOM", "OpRow", "op_names", "run_opinfo"]
