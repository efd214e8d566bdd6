"""Run torch's own operator samples (OpInfo) on DTensors with random placements, against one device.

`run_opinfo` covers a list of operators on a group of ranks and returns one `OpRow` per operator.
Samples are drawn with fixed seeds and placements with a seed per sample, so a row can be rerun
alone. An operator that hangs or kills its rank is found by running its batch one by one.
"""

from __future__ import annotations

import fnmatch
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

FORMS = ("function", "method", "inplace", "out")

MEMORY = frozenset({"as_strided.partial_views"})
"""Operators on memory around their argument, which `distribute_tensor` does not copy."""


FAMILIES: dict[str, str] = {
    "attention": "*attention*",
    "losses": "nn.functional.*loss* nn.functional.*entropy* nn.functional.kl_div",
    "embedding": "nn.functional.embedding* nn.functional.one_hot",
    "fft": "fft.* stft istft",
    "normalization": "native_*norm* _*batch_norm* nn.functional.*_norm* nn.functional.normalize renorm",
    "convolution, pooling, resampling": """*conv* *pool* *interpolate* *upsample* *grid_sampl* nn.functional.*fold
    nn.functional.pixel* nn.functional.channel_shuffle""",
    "softmax, scans, sorting": """*softm* cum* masked.cum* logcumsumexp *sort topk kthvalue mode *median *quantile
    unique* searchsorted bucketize hist* bincount isin trapz trapezoid""",
    "matmul-like": """add*mm* addmv* addr* baddbmm *mm mm.* bmm.* *mv *matmul* *_scaled_mm* dot vdot outer inner
    tensordot kron einsum cross linalg.cross linalg.vecdot linalg.multi_dot nn.functional.*linear cdist""",
    "linear algebra": """linalg.* cholesky* geqrf lu lu_* *logdet matrix_exp ormqr qr svd pinverse triangular_solve
    corrcoef cov""",
    "indexing": """gather *scatter* index_* *take* put masked_* *masked_index* *nonzero* argwhere where __getitem__
    *select* repeat_interleave _segment_reduce* diagonal_scatter""",
    "creation": """*_like new_* zeros ones full eye arange linspace* logspace* scalar_tensor tri?_indices zero_
    broadcast_shapes""",
    "reductions": """max.reduction* min.reduction* *_mean* std_mean* aminmax norm* dist logsumexp trace allclose equal
    item masked.* nn.functional.*distance nn.functional.cosine_similarity nn.functional.pdist""",
    "pointwise": """addcmul addcdiv clamp clone contiguous lerp nn.functional.hardswish nn.functional.leaky_relu
    nn.functional.*lu logaddexp2 resolve_* to jiterator* native_dropout_backward""",
}
"""Patterns of names by family; a name belongs to the first that fits."""

_BY_KIND = {
    "UnaryUfuncInfo": "pointwise", "BinaryUfuncInfo": "pointwise", "ReductionOpInfo": "reductions",
}  # fmt: skip


def families() -> dict[str, str]:
    """Family of every operator of op_db, by its full name."""
    return {name: _family(name, type(op).__name__) for name, op in _database()}


def _family(name: str, kind: str) -> str:
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    for found, patterns in FAMILIES.items():
        if any(fnmatch.fnmatchcase(name, p) for p in patterns.split()):
            return found
    return "views, joins, padding"


@dataclass(slots=True)
class OpRow:
    """What was seen of one operator."""

    name: str
    """Name in op_db, with its variant."""
    passed: int = 0
    """Samples whose results (and gradients) equal one device's."""
    distributed: int = 0
    """Of these, samples that run without gathering when data are sharded along one dim, their batch dim perhaps."""
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
    coverage: bool = True,
) -> list[OpRow]:
    """Run operators on `world` ranks and return their rows in order.

    Args:
        names: names as `op_names` gives them.
        world: number of gloo ranks.
        mesh: shape of the mesh.
        samples: samples per operator, spread over all that op_db has.
        form: ``function``, ``method``, ``inplace`` or ``out``.
        batch: operators per group of processes.
        coverage: find out which samples run without gathering; as long as the rest.
    """
    rows: list[OpRow] = []
    for start in range(0, len(names), batch):
        rows += _run_batch(list(names[start : start + batch]), world, tuple(mesh), samples, form, coverage)
    return rows


def _run_batch(
    names: list[str], world: int, mesh: tuple[int, ...], samples: int, form: str, coverage: bool
) -> list[OpRow]:
    arguments = {"names": names, "mesh": mesh, "samples": samples, "form": form, "coverage": coverage}
    try:
        result = run_ranks(_on_rank, world, timeout=40.0 + 6.0 * len(names), kwargs=arguments)
    except RankFailure as failure:
        if len(names) > 1:
            middle = len(names) // 2
            return [
                row
                for half in (names[:middle], names[middle:])
                for row in _run_batch(half, world, mesh, samples, form, coverage)
            ]
        return [
            OpRow(
                names[0],
                failed=1,
                messages=["the ranks died or hung: " + str(failure).strip().splitlines()[0]],
            )
        ]
    return [OpRow(**row) for row in result[0]]


def _on_rank(
    rank: int, names: list[str], mesh: tuple[int, ...], samples: int, form: str, coverage: bool
) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore")
    known = dict(_database())
    device_mesh = cached_mesh(*mesh)
    return [asdict(_run_operator(name, known[name], device_mesh, samples, form, coverage)) for name in names]


def _run_operator(name: str, op: Any, mesh: Any, samples: int, form: str, coverage: bool = True) -> OpRow:
    row = OpRow(name)
    functions = {"function": op, "method": op.method_variant, "inplace": op.inplace_variant}
    call = functions[form] if form != "out" else _into_out(op) if op.supports_out else None
    dtype = next((d for d in (torch.float64, torch.int64, torch.float32, torch.bool) if d in op.dtypes), None)
    if call is None or dtype is None:
        return row
    if form == "inplace":
        in_place = call

        def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            return in_place(x.clone(), *args, **kwargs)

    gradients = op.supports_autograd and dtype == torch.float64 and form != "out"
    torch.manual_seed(0)
    try:
        inputs = list(op.sample_inputs("cpu", dtype, requires_grad=gradients))
    except Exception as error:  # noqa: BLE001  op_db's own generators raise anything
        row.messages.append(f"no samples: {error}"[:120])
        return row
    inputs = inputs[:: max(1, -(-len(inputs) // samples))]  # op_db tends to put batches last
    for index, sample in enumerate(inputs):
        status, message = _run_sample(call, sample, mesh, f"{name}/{index}", gradients, coverage)
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


def _into_out(op: Any) -> Any:
    """Call `op` with `out=`: tensors of the shapes of its results, replicated where those are distributed."""

    def target(result: Any) -> Any:
        from vescale_dtensor import DTensor, Replicate

        out = torch.zeros_like(result)
        return out.redistribute([Replicate()] * out.device_mesh.ndim) if isinstance(out, DTensor) else out

    def call(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        out = target(result) if isinstance(result, Tensor) else tuple(map(target, result))
        op(*args, out=out, **kwargs)
        if type(out) is Tensor:
            torch.testing.assert_close(out, result, equal_nan=True)  # else torch itself is wrong: fft.ihfftn in 2.13
        return out

    return call


def _run_sample(call: Any, sample: Any, mesh: Any, seed: str, gradients: bool, coverage: bool) -> tuple[str, str]:
    from vescale_dtensor import DTensor, distribute_tensor, implicit_communication, random_mode
    from vescale_dtensor.errors import DTensorError

    rng = random.Random(seed)
    plain = (sample.input, sample.args, sample.kwargs)
    try:
        torch.manual_seed(0)
        expected = call(plain[0], *plain[1], **plain[2])
    except Exception as error:  # noqa: BLE001
        return "skipped", f"one device raises {type(error).__name__}"

    def distribute(t: Any) -> Any:
        if not _distributable(t):
            return t
        return distribute_tensor(t.detach(), mesh, _placements(t, mesh.ndim, rng)).requires_grad_(t.requires_grad)

    ours = tree_map(distribute, plain)
    if not any(isinstance(t, DTensor) for t in tree_flatten(ours)[0]):
        return "skipped", ""
    try:
        with implicit_communication("allow"), random_mode("whole"):
            torch.manual_seed(0)
            actual = call(ours[0], *ours[1], **ours[2])
            _compare(actual, expected, plain, ours, gradients)
        distributed = coverage and _runs_distributed(call, plain, expected, mesh, gradients)
        return "distributed" if distributed else "passed", ""
    except DTensorError as error:
        return "refused", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    except AssertionError as error:
        return "wrong", " ".join(str(error).split())[:300]
    except Exception as error:  # noqa: BLE001
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _compare(actual: Any, expected: Any, plain: Any, ours: Any, gradients: bool) -> None:
    compare(actual, expected, rtol=1e-6, atol=1e-7, requires_grad=False)
    if gradients:
        leaves = tree_flatten(plain)[0], tree_flatten(ours)[0]
        compare_gradients(*leaves, expected, actual, rtol=1e-6, atol=1e-7)


def _runs_distributed(call: Any, plain: Any, expected: Any, mesh: Any, gradients: bool) -> bool:
    """Whether sharding one dim of the data, along the first mesh axis, needs no gathering, and gives the result."""
    from vescale_dtensor import Replicate, Shard, distribute_tensor, implicit_communication, random_mode
    from vescale_dtensor.errors import DTensorError

    leaves, tree = tree_flatten(plain)
    positions = [i for i, t in enumerate(leaves) if _distributable(t)]
    for dims in _shardings([tuple(leaves[i].shape) for i in positions]):
        ours = list(leaves)
        for i, dim in zip(positions, dims, strict=True):
            placements: list[Any] = [Replicate()] * mesh.ndim
            placements[0] = Replicate() if dim is None else Shard(dim)
            t = leaves[i]
            ours[i] = distribute_tensor(t.detach(), mesh, placements).requires_grad_(t.requires_grad)
        arguments = torch.utils._pytree.tree_unflatten(ours, tree)
        try:
            torch.manual_seed(0)
            with implicit_communication("error"), random_mode("whole"):
                actual = call(arguments[0], *arguments[1], **arguments[2])
        except DTensorError:
            continue
        with implicit_communication("allow"):
            _compare(actual, expected, plain, arguments, gradients)
        return True
    return False


def _shardings(shapes: list[tuple[int, ...]]) -> list[tuple[int | None, ...]]:
    """Ways to shard: the batch dim of all that have it, one dim of all that have it in the same place, one of one."""
    found: list[tuple[int | None, ...]] = []
    batch = next((s[0] for s in shapes if s and s[0] > 1), None)
    if batch is not None:
        found.append(tuple(0 if s and s[0] == batch else None for s in shapes))
    for i, shape in enumerate(shapes[:3]):
        for d, length in enumerate(shape[:4]):
            if length < 2:
                continue
            behind = len(shape) - d
            found.append(tuple(len(s) - behind if len(s) >= behind and s[-behind] == length else None for s in shapes))
            found.append(tuple(d if i == j else None for j in range(len(shapes))))
    return list(dict.fromkeys(found))[:12]


def _distributable(t: Any) -> bool:
    return isinstance(t, Tensor) and t.layout == torch.strided and not t.is_quantized


def _placements(t: Tensor, mesh_ndim: int, rng: random.Random) -> list[Any]:
    from vescale_dtensor import Partial, Replicate, Shard, Varying

    choices: list[Any] = [Replicate(), Replicate()]
    if t.is_floating_point():
        choices += [Varying(), Partial()]
    choices += [Shard(d) for d in range(t.ndim) if t.shape[d] > 1] * 2
    return [rng.choice(choices) for _ in range(mesh_ndim)]


__all__ = ["FAMILIES", "FORMS", "RANDOM", "OpRow", "families", "op_names", "run_opinfo"]
