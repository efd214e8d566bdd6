"""Operators on ragged and interleaved tensors: on the parts as they are, or moved and told, never a wrong number."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vescale_dtensor import (
    DTensor,
    ImplicitCommunicationError,
    Replicate,
    Shard,
    UnsupportedOperationError,
    distribute_tensor,
    implicit_communication,
    random_mode,
)
from vescale_dtensor.placements import InterleavedShard, RaggedShard
from vescale_testing import cached_mesh
from vescale_testing.oracle import check_op, placements

RANKS = pytest.mark.ranks(4, pool=True)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@RANKS
def test_elementwise_and_reductions_stay_where_they_are() -> None:
    """Under the policy "error" nothing may be gathered."""
    mesh = cached_mesh(2, 2)
    x, y, row = _x(6, 4, 3), _x(6, 4, 3).abs() + 0.1, _x(3)
    unary = [torch.exp, torch.neg, F.gelu, torch.clone, lambda t: t.float().double(), torch.zeros_like]
    along = [
        torch.sum,
        torch.mean,
        torch.amax,
        torch.linalg.vector_norm,
        lambda t: torch.linalg.vector_norm(t, torch.inf),
        lambda t: torch.linalg.vector_norm(t, 3),
        torch.var,
        torch.prod,
        lambda t: t.gt(0).any(),
        lambda t: t.sum(-1),
        lambda t: t.mean(-1, keepdim=True),
        lambda t: torch.linalg.vector_norm(t, 2, -1),
        lambda t: t.max(-1).values,
        lambda t: t.unsqueeze(-1).expand(6, 4, 3, 2),
        lambda t: t.reshape(24, 3) * 2,
        lambda t: t.transpose(-1, -2)[..., None] if t.ndim == 2 else t * 1,
        lambda t: torch.stack([t, t], -1).sum(),
    ]
    last = [lambda t: t.unbind(-1)[1], lambda t: t[..., 1], lambda t: t[:6, :4, None, 1:], lambda t: t.split(2, -1)[0]]
    binary = [torch.mul, torch.sub, torch.maximum, lambda a, b: torch.where(a > 0, a, b), torch.addcmul]
    with implicit_communication("error"):
        for code in ("G2/1.3 I", "G2/0.2 S2", "S2 G2/2.1", "I G2/1.0", "R G2/3.2", "G2/1.1 G2/2.1"):
            for f in (*unary, *along, *(last if "S2" not in code else [])):
                check_op(f, [x], [code], mesh)
            for g in binary[:-1]:
                check_op(g, [x, y], [code, code], mesh)
                check_op(g, [x, row], [code, "I I"], mesh)
            check_op(torch.addcmul, [x, x, y], [code] * 3, mesh)
        for code in ("N1/2 I", "N1/4 S0", "S0 N1/2", "N1/2 N1/2"):
            for f in (*unary, *(a for a in along if a is not along[14]), *last):
                check_op(f, [x], [code], mesh)
            for g in binary[:-1]:
                check_op(g, [x, y], [code, code], mesh)
                check_op(g, [x, row], [code, "I I"], mesh)


@RANKS
def test_results_keep_their_layout() -> None:
    mesh = cached_mesh(4)
    d = distribute_tensor(_x(6, 4, 3), mesh, placements("G2/1.0.2.3"))
    for result in (
        d * 2,
        d + d,
        d.sum(-1),
        torch.zeros_like(d),
        d.detach(),
        F.linear(d, distribute_tensor(_x(5, 3), mesh)),
    ):
        assert result.placements == d.placements
    assert d.reshape(24, 3).placements == (RaggedShard((0,), (1, 0, 2, 3)),)
    assert d.reshape(24, 3).view(6, 4, 3).placements == d.placements
    assert d.sum().placements == tuple(placements("P"))


@RANKS
def test_merged_projection_needs_no_communication() -> None:
    """What interleaved shards are for: one matrix for q, k and v, whose results are plain shards."""
    mesh = cached_mesh(2, 2)
    x, w, b, out = _x(5, 3, 8), _x(24, 8), _x(24), _x(8, 8)

    def chunked(x, w, b, out):  # type: ignore[no-untyped-def]
        q, k, v = F.linear(x, w, b).chunk(3, -1)
        return F.linear(F.silu(q) * k + v, out)

    def split(x, w, b, out):  # type: ignore[no-untyped-def]
        q, kv = (x @ w.t() + b).split([8, 16], -1)
        k, v = kv.split(8, dim=2)
        return (q * k - v) @ out

    def viewed(x, w, b, out):  # type: ignore[no-untyped-def]
        q, k, v = torch.addmm(b, x.reshape(15, 8), w.t()).view(5, 3, 3, 4, 2).unbind(2)
        return F.linear((q * k + v).flatten(-2), out)

    def flattened(x, w, b):  # type: ignore[no-untyped-def]
        return F.linear(x, w, b).unflatten(-1, (3, 8)).mul(2).flatten(2).chunk(3, -1)[1]

    with implicit_communication("error"):
        for codes in (
            ["S0 I", "I N0/3", "I N0/3", "I S1"],
            ["I I", "N0/3 N0/3", "N0/3 N0/3", "S1 S1"],
            ["S1 R", "R N0/3", "R N0/3", "R S1"],
        ):
            check_op(chunked, [x, w, b, out], codes, mesh)
            check_op(split, [x, w, b, out.t().contiguous()], [*codes[:3], codes[3].replace("S1", "S0")], mesh)
            check_op(flattened, [x, w, b], codes[:3], mesh)
        check_op(viewed, [x, w, b, out], ["I I", "I N0/3", "I N0/3", "I S1"], mesh)
        d = distribute_tensor(w, mesh, [Replicate(), InterleavedShard(0, 3)])
        y = F.linear(distribute_tensor(x, mesh), d)
        assert y.placements == (Replicate(), InterleavedShard(2, 3))
        assert all(part.placements == (Replicate(), Shard(2)) for part in y.chunk(3, -1))
        assert y.split([16, 8], -1)[0].placements == (Replicate(), InterleavedShard(2, 2))
        assert y.view(5, 3, 3, 8).placements == (Replicate(), Shard(3))
        assert y.view(5, 3, 3, 8).view(5, 3, 24).placements == y.placements
        contracted = y @ distribute_tensor(_x(24, 2), mesh, [Replicate(), InterleavedShard(0, 3)])
        assert contracted.placements == tuple(placements("I P"))


@RANKS
def test_views_that_interleave_reach_what_they_view() -> None:
    mesh = cached_mesh(4)
    x = distribute_tensor(torch.zeros(3, 4), mesh, [Shard(1)])
    with implicit_communication("error"):
        y = x.view(12)
        assert y.placements == (InterleavedShard(0, 3),)
        y.add_(distribute_tensor(torch.arange(12.0), mesh))
    assert torch.equal(x.full_tensor(), torch.arange(12.0).view(3, 4))


@RANKS
def test_uneven_blocks_of_a_merged_projection() -> None:
    mesh = cached_mesh(4)
    x, w = _x(3, 4), _x(15, 4)  # blocks of 5 over 4 ranks: 2, 2, 1, 0
    with implicit_communication("error"):
        check_op(lambda x, w: torch.stack([t.sum() for t in F.linear(x, w).chunk(3, -1)]), [x, w], ["I", "N0/3"], mesh)
        check_op(lambda x, w: F.linear(x, w).view(3, 3, 5).sum(1), [x, w], ["I", "N0/3"], mesh)


@RANKS
def test_flattened_batch_and_sequence() -> None:
    """A batch whose second dim is sharded is flattened for linear layers and the loss, and comes back."""
    mesh = cached_mesh(2, 2)
    x, w, target = _x(4, 6, 5), _x(7, 5), torch.arange(24).view(4, 6) % 7

    def block(x, w):  # type: ignore[no-untyped-def]
        rows = F.layer_norm(x.reshape(24, 5), (5,))
        return F.softmax(F.linear(rows, w).view(4, 6, 7), -1)

    def loss(x, w, target):  # type: ignore[no-untyped-def]
        return F.cross_entropy(F.linear(x, w).view(-1, 7), target.reshape(-1), ignore_index=3)

    with implicit_communication("error"):
        for code in ("S1 I", "S1 S1", "I S1"):
            assert check_op(block, [x, w], [code, "I I"], mesh).placements == tuple(placements(code))
            check_op(loss, [x, w, target], [code, "I I", code], mesh)
            check_op(lambda a, b: F.mse_loss(a.flatten(0, 1), b.flatten(0, 1)), [x, x * 2], [code, code], mesh)
        check_op(lambda t: F.mse_loss(t, t * 2), [x], ["G2/1.2 S2"], mesh)
        check_op(lambda t: F.cross_entropy(t, t.detach().softmax(-1)), [_x(6, 4)], ["G1/1.2 I"], mesh)
    with implicit_communication("allow"):  # neither axis leaves the other one's blocks whole
        check_op(lambda t: t.reshape(-1) * 2, [_x(2, 6)], ["N1/2 G1/1.2"], mesh)


MOVED = {
    "cumsum": lambda t: t.cumsum(0),
    "flip": lambda t: t.flip(0),
    "sort": lambda t: t.sort(0).values,
    "softmax": lambda t: t.softmax(0),
    "select": lambda t: t[2],
    "slice": lambda t: t[1:5, ::2],
    "mask": lambda t: t[t > 0].sum(),
    "index": lambda t: t[torch.tensor([3, 0])] if not isinstance(t, DTensor) else t[[3, 0]],
    "roll": lambda t: t.roll(1, 0),
    "tril": lambda t: t[..., 0].tril(),
    "trace": lambda t: t[..., 0].trace(),
    "argmax": lambda t: t.argmax(),
    "max over cut dim": lambda t: t.max(0).values,
    "sum over one flattened dim": lambda t: t.sum(1),
    "transpose": lambda t: t.transpose(0, 1) * 2,
    "view across": lambda t: t.reshape(4, 6, 3) + 1,
    "matmul of rows": lambda t: t[..., 0].t() @ t[..., 0],
    "unbind": lambda t: t.unbind(0)[3],
    "chunk across blocks": lambda t: t.chunk(3, 0)[1],
    "cat": lambda t: torch.cat([t, t]),
    "pad": lambda t: F.pad(t, (0, 0, 1, 1)),
    "svd": lambda t: torch.linalg.svdvals(t),
    "diagonal": lambda t: t.diagonal().sum(),
    "repeat": lambda t: t.repeat(2, 1, 1),
    "layer_norm": lambda t: F.layer_norm(t, (4, 3)),
    "median": lambda t: t.median(),
    "mse": lambda t: F.mse_loss(t, t * 2),
    "cross_entropy": lambda t: F.cross_entropy(t[..., 0], t[..., 1].softmax(-1)),
    "std of a flattened dim": lambda t: t.std(0),
    "norm of a flattened dim": lambda t: torch.linalg.vector_norm(t, 2, 0),
}


@RANKS
@pytest.mark.parametrize("code", ["G2/1.0.3.2", "G1/3.1.0.2", "N0/3", "N1/2"])
def test_other_functions_move_and_say_so(code: str) -> None:
    """Results are those of one device; under the policy "error" an operator that must move data refuses."""
    mesh = cached_mesh(4)
    x = _x(6, 4, 3)
    refused = 0
    for name, f in MOVED.items():
        with implicit_communication("allow"):
            check_op(f, [x], [code], mesh)
        d = distribute_tensor(x, mesh, placements(code))
        try:
            with implicit_communication("error"):
                got = f(d)
        except ImplicitCommunicationError:
            refused += 1
            continue
        torch.testing.assert_close(got.full_tensor(), f(x), msg=name)
    assert refused >= 8


@RANKS
def test_assignment_and_changes_in_place() -> None:
    mesh = cached_mesh(4)
    for code in ("G2/1.0.3.2", "N1/2"):
        x = _x(6, 4, 3)
        d = distribute_tensor(x, mesh, placements(code))
        with implicit_communication("error"):
            d.mul_(2).add_(1).clamp_(-1, 1)
            x.mul_(2).add_(1).clamp_(-1, 1)
            d.copy_(d * 3)
            x.copy_(x * 3)
            d.masked_fill_(d > 2, 0.0)
            x.masked_fill_(x > 2, 0.0)
            d += distribute_tensor(torch.ones(3, dtype=torch.float64), mesh)
            x += torch.ones(3, dtype=torch.float64)
        with implicit_communication("allow"):
            d[1:3, 0] = 7.0
            x[1:3, 0] = 7.0
            d[:, [0, 2]] = -1.0
            x[:, [0, 2]] = -1.0
            d.cumsum_(0)
            x.cumsum_(0)
        assert d.placements == tuple(placements(code))
        torch.testing.assert_close(d.full_tensor(), x)
        with pytest.raises(ImplicitCommunicationError), implicit_communication("error"):
            d[0] = 1.0
        with pytest.raises(UnsupportedOperationError, match="out-of-place form"):
            d.transpose_(0, 1)
        with pytest.raises(UnsupportedOperationError):
            d.as_strided((2,), (1,))


@RANKS
def test_host_reads_and_conversions() -> None:
    mesh = cached_mesh(4)
    x = _x(6, 4)
    for code in ("G2/1.0.3.2", "G1/0.1.0.0", "N0/2"):
        d = distribute_tensor(x, mesh, placements(code))
        assert d.tolist() == x.tolist()
        assert torch.equal(d, distribute_tensor(x, mesh, placements("S1")))
        assert not torch.equal(d, d + (d == d.max()))
        assert torch.allclose(d, d + 1e-12)
        assert bool((d == d).all())
        assert d.sum().item() == pytest.approx(x.sum().item())
        with pytest.raises(UnsupportedOperationError):
            d.numpy()
        with pytest.raises(UnsupportedOperationError, match="several blocks"):
            _ = d.local_offset
        one = distribute_tensor(x[:1, :1], mesh, placements(code.replace("N0/2", "N0/1")))
        assert one.item() == x[0, 0].item()
        assert d.stride() == x.stride()
        assert d.contiguous().placements == d.placements


@RANKS
def test_random_numbers() -> None:
    """In the mode "whole" they are those of one device; else each shard has its own, the same on replicas."""
    mesh = cached_mesh(2, 2)
    for code in ("G2/1.3 I", "S0 N1/2", "G1/0.2 S1"):
        d = distribute_tensor(torch.ones(6, 4), mesh, placements(code))
        with random_mode("whole"):
            torch.manual_seed(5)
            ours = [F.dropout(d, 0.5), torch.randn_like(d), d.clone().uniform_(), torch.bernoulli(d * 0.5)]
            torch.manual_seed(5)
            one = torch.ones(6, 4)
            theirs = [F.dropout(one, 0.5), torch.randn_like(one), one.clone().uniform_(), torch.bernoulli(one * 0.5)]
        for a, b in zip(ours, theirs, strict=True):
            assert a.placements == d.placements
            assert torch.equal(a.full_tensor(), b), code
        torch.manual_seed(7)
        whole = torch.randn_like(d).full_tensor()
        assert len(set(whole.flatten().tolist())) == 24
