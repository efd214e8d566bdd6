"""Ragged and interleaved tensors as parameters, states and checkpoints."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vescale_dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    implicit_communication,
    local_map,
    parallelize_module,
    to_torch,
    visualize,
)
from vescale_dtensor import arange as distributed_arange
from vescale_dtensor import eye as distributed_eye
from vescale_dtensor import randn as distributed_randn
from vescale_dtensor._layout import from_layout, layout_of
from vescale_dtensor.errors import UnsupportedOperationError
from vescale_dtensor.placements import InterleavedShard, Partial, RaggedShard, Varying, short, to_axis_types
from vescale_testing import cached_mesh
from vescale_testing.oracle import placements

RANKS = pytest.mark.ranks(4, pool=True)
CODES = ["G2/1.3 I", "N0/3 S1", "S0 G2/0.1", "G1/2.1 S1", "R G2/3.1", "N0/2 N0/2"]


def _whole(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_placements_say_what_they_are() -> None:
    assert RaggedShard([0], [1, 2]) == RaggedShard((0,), (1, 2)) != RaggedShard((0,), (2, 1))
    assert InterleavedShard(0, 3) != Shard(0)
    assert len({RaggedShard((0,), (1, 2)), RaggedShard((0,), (1, 2)), InterleavedShard(1, 2)}) == 2
    for p in (RaggedShard((0, 1), (1, 0)), InterleavedShard(1, 2)):
        assert not any([p.is_shard(), p.is_replicate(), p.is_partial()])
        assert copy.deepcopy(p) == p
    types = to_axis_types([InterleavedShard(-1, 3), RaggedShard((0,), (1, 2))], mesh_ndim=2, ndim=2)
    assert short(types) == "IS(1,3),RS(1;1,2)"
    assert all(t < 0 for t in types)
    assert copy.deepcopy(types)[0] is types[0]
    assert to_axis_types([InterleavedShard(1, 1)], mesh_ndim=1, ndim=2) == (1,)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RaggedShard((1,), (1, 2)), "flattens the leading dims"),
        (lambda: RaggedShard((), (1, 2)), "flattens the leading dims"),
        (lambda: RaggedShard((0,), (0, 0)), "not all of them zero"),
        (lambda: RaggedShard((0,), (1, -1)), "one count >= 0"),
        (lambda: InterleavedShard(0, 0), "at least 1"),
        (lambda: to_axis_types([RaggedShard((0, 1), (1,))], mesh_ndim=1, ndim=1), "no dims"),
        (lambda: to_axis_types([InterleavedShard(2, 2)], mesh_ndim=1, ndim=2), "does not exist"),
    ],
)
def test_placements_that_make_no_sense(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@RANKS
def test_layouts_that_do_not_fit() -> None:
    mesh, x = cached_mesh(2, 2), torch.zeros(6, 4)
    for code, message in {
        "G1/1.1.1 I": "local_units are 3",
        "N0/4 I": "not 4 equal blocks",
        "N0/3 S0": "interleaved cuts of a dim must be the same",
        "N0/3 G1/1.1": "a ragged shard cannot flatten it",
        "G1/1.1 G2/1.1": "both must flatten the same",
    }.items():
        with pytest.raises(ValueError, match=message):
            distribute_tensor(x, mesh, placements(code))
    with pytest.raises(UnsupportedOperationError, match="no counterpart"):
        to_torch(distribute_tensor(x, mesh, placements("I N0/3")))


@RANKS
def test_from_local_and_back() -> None:
    mesh, x = cached_mesh(4), _whole(6, 4)
    for code in ("G1/1.0.3.2", "N1/2"):
        d = distribute_tensor(x, mesh, placements(code))
        again = DTensor.from_local(d.to_local(), mesh, placements(code))
        assert again._spec is d._spec
    code = "G2/1.0.3.2"
    flat = distribute_tensor(x, mesh, placements(code)).to_local().flatten()
    d = DTensor.from_local(flat, mesh, placements(code), shape=(6, 4))
    assert d.to_local().data_ptr() == flat.data_ptr()
    assert torch.equal(d.full_tensor(), x)
    with pytest.raises(ValueError, match="pass the global `shape`"):
        DTensor.from_local(flat.view(1, -1), mesh, placements(code))
    flat.requires_grad_()
    DTensor.from_local(flat, mesh, placements(code), shape=(6, 4)).pow(2).sum().backward()
    torch.testing.assert_close(flat.grad, 2 * flat.detach())
    rows = distribute_tensor(x, mesh, placements("G1/1.0.3.2"))
    doubled = local_map(lambda t: t * 2, placements("G1/1.0.3.2"))(rows)
    assert torch.equal(doubled.full_tensor(), 2 * x)
    blocks = local_map(lambda t: t * 2, placements("N1/2"))(distribute_tensor(x, mesh, placements("N1/2")))
    assert torch.equal(blocks.full_tensor(), 2 * x)


@RANKS
def test_factories_copies_pickles_and_pictures() -> None:
    mesh = cached_mesh(2, 2)
    for code in CODES:
        placed = placements(code)
        assert torch.equal(distributed_eye(6, 6, device_mesh=mesh, placements=placed).full_tensor(), torch.eye(6))
        drawn = distributed_randn(6, 4, device_mesh=mesh, placements=placed)
        assert drawn.placements == tuple(placed)
        d = distribute_tensor(_whole(6, 4), mesh, placed).requires_grad_()
        assert copy.deepcopy(d)._spec is d._spec
        buffer = io.BytesIO()
        torch.save(d, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True).to_local(), d.to_local())
        text = visualize(d, show=False)
        assert "rank" in text
        assert repr(placed[0]) in text or "Varying" in text
    numbers = distributed_arange(10, device_mesh=cached_mesh(4), placements=placements("G1/1.2.0.2"))
    assert numbers.full_tensor().tolist() == list(range(10))


def _boxes(layout: Any) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Local elements, box by box in their order, with the place of each box."""
    flat, passed = layout.local.reshape(-1), 0
    for box in layout.boxes:
        count = math.prod(box.shape)
        window = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        yield flat[passed : passed + count].view(box.shape), window
        passed += count
    assert passed == flat.numel()


@RANKS
def test_boxes_are_the_local_elements_in_order() -> None:
    mesh = cached_mesh(2, 2)
    x = torch.arange(6 * 4 * 3).view(6, 4, 3)
    for code in [*CODES, "G3/5.2 I", "N1/2 S0", "S1 N2/3", "N1/2 N2/3"]:
        d = distribute_tensor(x, mesh, placements(code))
        layout = layout_of(d)
        assert layout is not None
        assert layout.global_stride == (12, 3, 1)
        for part, window in _boxes(layout):
            assert torch.equal(part, x[window]), code
        if "G3" in code:
            assert len(layout.boxes) <= 5
        made = from_layout(d, layout.boxes)
        assert made is not None
        assert made.local_shape == d.local_shape
        assert layout.replicas[1] == 2 ** sum(c in ("I", "R") for c in code.split())


@RANKS
def test_torch_checkpoints_go_into_any_layout(tmp_path: Any) -> None:
    import torch.distributed.checkpoint as dcp

    mesh, x = cached_mesh(2, 2), _whole(6, 4)
    dcp.save({c: distribute_tensor(x, mesh, placements(c)) for c in CODES}, checkpoint_id=tmp_path)
    into = {
        c: distribute_tensor(torch.zeros_like(x), mesh, placements(t))
        for c, t in zip(CODES, [*CODES[1:], "S0 I"], strict=True)
    }
    dcp.load(into, checkpoint_id=tmp_path)
    for code, d in into.items():
        assert torch.equal(d.full_tensor(), x), code


OPTIMIZERS = {
    "loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


def _steps(parameters: list[nn.Parameter], name: str) -> list[float]:
    optimizer = OPTIMIZERS[name](parameters)
    norms = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = sum((p * (1 + 0.3 * i)).sin().pow(2).sum() for i, p in enumerate(parameters))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.5)))
        nn.utils.clip_grad_value_(parameters, 0.4)
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return norms


@RANKS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_clipping(name: str) -> None:
    mesh = cached_mesh(2, 2)
    values = [_whole(6, 4), _whole(6, 8), _whole(12, 2)]
    for first in range(0, len(CODES), 3):
        ours = [
            nn.Parameter(distribute_tensor(v, mesh, placements(c)))
            for v, c in zip(values, CODES[first : first + 3], strict=True)
        ]
        plain = [nn.Parameter(v.clone()) for v in values]
        with implicit_communication("allow" if name in ("adafactor", "lbfgs") else "error"):
            norms = _steps(ours, name)
        assert norms == pytest.approx(_steps(plain, name), rel=1e-6)
        for o, p in zip(ours, plain, strict=True):
            tol = 1e-6 if name == "lbfgs" else 1e-9  # its quotients of small differences magnify rounding
            torch.testing.assert_close(o.detach().full_tensor(), p.detach(), rtol=tol, atol=tol)
            assert o.grad.shape == p.shape
            torch.testing.assert_close(o.grad.full_tensor(), p.grad, rtol=tol, atol=tol)


class Merged(nn.Module):
    """Attention without the softmax, with one projection for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.gate_up = nn.Linear(8, 20)
        self.down = nn.Linear(10, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (t.view(b, s, 4, 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, 8))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


@RANKS
def test_unmodified_module_with_merged_weights() -> None:
    """A plan places the merged weights; nothing is communicated but what Megatron's layout needs."""
    mesh = cached_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Merged().double()
    ours = copy.deepcopy(plain)
    tp: dict[str, Any] = {
        r"qkv\.(weight|bias)": {"tp": InterleavedShard(0, 3)},
        r"gate_up\.(weight|bias)": {"tp": InterleavedShard(0, 2)},
        r"(out|down)\.weight": {"tp": Shard(1)},
    }
    ours = parallelize_module(ours, mesh, {"parameter": tp, "forward": {"input": {"dp": Shard(0)}}})
    x = _whole(5, 3, 8)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    with implicit_communication("error"):
        for _ in range(3):
            for module, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                module(x).pow(2).mean().backward()
                optimizer.step()
    for (name, p), o in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(o.detach().full_tensor(), p.detach(), rtol=1e-9, atol=1e-10, msg=name)


@RANKS
def test_ragged_parameters_are_gathered_for_use_and_their_gradients_scattered() -> None:
    """What fully sharded training does by hand: uneven pieces of two weights, one rank without any."""
    mesh = cached_mesh(4)
    weights = [_whole(6, 8), _whole(4, 6)]
    units = [(1, 2, 0, 1), (0, 1, 1, 0)]
    plain = [nn.Parameter(w.clone()) for w in weights]
    ours = [
        nn.Parameter(distribute_tensor(w, mesh, [RaggedShard((0, 1), u)])) for w, u in zip(weights, units, strict=True)
    ]
    x = _whole(8, 8)
    for _ in range(2):
        F.linear(F.linear(x, plain[0]).tanh(), plain[1]).pow(2).mean().backward()
        data = distribute_tensor(x, mesh, [Shard(0)])
        with implicit_communication("error"):
            whole = [p.redistribute([Varying()]) for p in ours]
            F.linear(F.linear(data, whole[0]).tanh(), whole[1]).pow(2).mean().backward()
    for o, p in zip(ours, plain, strict=True):
        assert o.grad.placements == o.placements
        torch.testing.assert_close(o.grad.full_tensor(), p.grad)
    assert whole[0].grad_placements == (Partial(),)
    assert whole[0].redistribute([Replicate()]).placements == (Replicate(),)
