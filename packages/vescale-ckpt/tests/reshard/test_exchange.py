"""Rounds, and what goes through buffers, on threads."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_ckpt._geometry import Mesh, Rule
from vescale_ckpt._reshard.exchange import Exchange, Move, rounds
from vescale_ckpt._state import Held, TensorSpec
from vescale_testing import run_threads

WHOLE = torch.arange(97 * 31, dtype=torch.float32).view(97, 31)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 500), max_size=30), st.integers(1, 100))
def test_rounds_hold_every_share_once_and_no_more_than_the_limit(loads, limit):
    found = rounds(loads, limit)
    shares = [part for parts in found for part in parts]
    assert shares == sorted(shares)
    for number, load in enumerate(loads):
        mine = [part for part in shares if part.move == number]
        assert len(mine) == math.ceil(load / limit)
        assert all((p.share, p.shares) == (n, len(mine)) for n, p in enumerate(mine))
    for parts in found:
        assert 0 < sum(math.ceil(loads[part.move] / part.shares) for part in parts) <= limit


def held(name, layout, rank, whole, fill):
    parts = [
        (box, whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))].clone())
        for box in layout.boxes(tuple(whole.shape), rank)
    ]
    for _, view in parts:
        if not fill:
            view.fill_(-1)
    spec = TensorSpec(name, str(whole.dtype).removeprefix("torch."), tuple(whole.shape), layout)
    return Held(spec, parts)


def rule(placement, members=(0, 1, 2)):
    return Rule(Mesh((len(members),), members), (placement,))


@pytest.mark.parametrize("limit", [1000, 4096, 1 << 20])
def test_blocks_arrive_in_rounds_whose_buffers_stay_within_the_limit(limit):
    cases = [
        ("a", rule("R", (0,)), rule("R")),
        ("b", rule("S(0)"), rule("S(1)")),
        ("c", rule("SS(0,4)"), rule("R", (2, 0))),
        ("d", rule("S(1)"), rule("S(1)")),
        ("e", rule("RS(2,1,0,2)", (0, 1, 2)), rule("IS(0,1)")),
    ]
    whole = WHOLE[:96]
    moves = [
        [Move(held(name, old, rank, whole, True), held(name, new, rank, whole, False)) for name, old, new in cases]
        for rank in range(3)
    ]
    exchanges = [Exchange(moves[rank], rank, 3) for rank in range(3)]
    loads = list(map(max, *(exchange.loads() for exchange in exchanges)))
    assert loads[0] == 2 * whole.nbytes
    assert loads[3] == 0

    def run(rank):
        exchanges[rank].prepare(loads, torch.device("cpu"), limit)
        exchanges[rank].run(None)
        return exchanges[rank]._rounds

    for sides in (sides for ran in run_threads(3, run) for sides in ran):
        for entries in ([entry for peer in side for entry in peer] for side in sides):
            # A share is exact to an element per block.
            assert sum(entry.nbytes for entry in entries) <= limit + 4 * len(entries)
    for move in (move for mine in moves for move in mine):
        for box, view in move.new.parts:
            want = whole[tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))]
            assert torch.equal(view, want), move.new.spec.name


def test_nothing_is_communicated_where_every_rank_has_what_it_needs(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a collective was called")

    monkeypatch.setattr(dist, "all_to_all_single", refuse)
    old, new = held("w", rule("R"), 1, WHOLE, True), held("w", rule("S(0)"), 1, WHOLE, False)
    exchange = Exchange([Move(old, new)], 1, 3)
    assert exchange.loads() == [0]
    exchange.prepare([0], torch.device("cpu"))
    exchange.run(None)
    assert torch.equal(new.parts[0][1], WHOLE.chunk(3)[1])


def test_conjugate_and_strided_memory_is_read_and_written():
    whole = torch.complex(WHOLE, WHOLE + 0.5)
    old = Held(TensorSpec("w", "complex64", (97, 31), rule("R", (0,))), [])
    new = Held(TensorSpec("w", "complex64", (97, 31), rule("R", (0,))), [])
    (box,) = old.spec.layout.boxes((97, 31), 0)
    into = torch.zeros(31, 97, dtype=torch.complex64).t()
    old.parts.append((box, whole.conj()))
    new.parts.append((box, into))
    exchange = Exchange([Move(old, new)], 0, 1)
    exchange.prepare(exchange.loads(), torch.device("cpu"))
    exchange.run(None)
    assert torch.equal(into, whole.conj().resolve_conj())
