"""Which parameter stands in which bucket, and what the optimizer sees of a shard."""

import itertools
import random

import pytest
import torch
from torch import nn

from vescale_comm._optimizer.partition import Entry, granularity_of, partition
from vescale_comm._optimizer.segments import cut, used_parts
from vescale_comm._plan.blocks import Rows
from vescale_comm.errors import PlanError

CPU = torch.device("cpu")


def entry(name: str, *shape: int, group: int = 0, grain: int = 0, dtype: torch.dtype = torch.float32) -> Entry:
    return Entry(name, shape, dtype, CPU, group, grain)


def test_buckets_are_runs_from_the_last_parameter_on() -> None:
    entries = [entry(name, 100) for name in "abcdef"]
    plans = partition(entries, 2, bucket_bytes=800)
    assert [[e.name for e in placed] for _, placed in plans] == [["e", "f"], ["c", "d"], ["a", "b"]]


def test_a_small_rest_joins_the_bucket_before() -> None:
    entries = [entry("tiny", 1), *(entry(name, 100) for name in "abcd")]
    plans = partition(entries, 2, bucket_bytes=800)
    assert [[e.name for e in placed] for _, placed in plans] == [["c", "d"], ["tiny", "a", "b"]]


def test_dtypes_do_not_mix() -> None:
    entries = [entry("a", 4), entry("b", 4, dtype=torch.bfloat16), entry("c", 4)]
    found = [{e.dtype for e in placed} for _, placed in partition(entries, 2, bucket_bytes=1 << 20)]
    assert sorted(map(len, found)) == [1, 1]


def test_parameters_of_a_group_stand_together() -> None:
    entries = [entry("a", 4, group=0), entry("b", 4, group=1), entry("c", 4, group=0), entry("d", 4, group=1)]
    ((plan, placed),) = partition(entries, 2, bucket_bytes=1 << 20)
    assert [e.name for e in placed] == [slot.name for slot in plan.slots] == ["a", "c", "b", "d"]


def test_whole_matrices_get_buckets_that_balance() -> None:
    entries = [entry(f"m{i}", 32, 32, grain=1024) for i in range(16)]
    plans = partition(entries, 4, bucket_bytes=4096)
    for plan, _ in plans:
        owners = [{piece.slot.name for piece in plan.pieces(rank)} for rank in range(4)]
        assert all(not a & b for a, b in itertools.combinations(owners, 2))
        assert len({len(names) for names in owners}) == 1
    assert sum(plan.numel for plan, _ in plans) == 16 * 1024


def test_granularity_follows_the_plan() -> None:
    adamw, muon = torch.optim.AdamW, torch.optim.Muon
    assert granularity_of("auto", adamw, "w", (4, 6)) == 0
    assert granularity_of("auto", muon, "w", (4, 6)) == 24
    assert granularity_of("whole", adamw, "w", (4, 6)) == 24
    assert granularity_of(Rows(2), adamw, "w", (4, 6)) == 12
    mapping = {r".*\.w": "whole", r".*\.q": 8, ".*": "flat"}
    assert [granularity_of(mapping, adamw, name, (4, 6)) for name in ("a.w", "a.q", "b")] == [24, 8, 0]


def test_a_derived_optimizer_is_not_taken_for_elementwise() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert granularity_of("auto", Mine, "w", (4, 6)) == 24
    assert granularity_of("flat", Mine, "w", (4, 6)) == 0


@pytest.mark.parametrize(
    ("plan", "cls", "text"),
    [
        ("flat", torch.optim.Muon, "Muon looks at whole matrices"),
        ("flat", torch.optim.Adafactor, "Adafactor looks"),
        ("rows", torch.optim.SGD, 'expected "auto"'),
        ({"b": "flat"}, torch.optim.SGD, "no pattern"),
        (0, torch.optim.SGD, "1 element or more"),
    ],
)
def test_plans_that_make_no_sense_are_refused(plan: object, cls: type[torch.optim.Optimizer], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        granularity_of(plan, cls, "w", (4, 6))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_segments_hold_every_element_once_and_every_number_everywhere(world: int) -> None:
    dice = random.Random(world)
    for _ in range(20):
        entries = [
            entry(f"p{i}", dice.randint(0, 5), dice.randint(1, 40), group=dice.randint(0, 2), grain=grain)
            for i in range(dice.randint(1, 12))
            for grain in [dice.choice([0, 0, 0, 8])]
        ]
        for number, (plan, placed) in enumerate(partition(entries, world, bucket_bytes=400)):
            seen = {e.name: [0] * torch.Size(e.shape).numel() for e in placed}
            for rank in range(world):
                segments = cut(number, plan, placed, rank)
                shard = torch.arange(float(plan.shard)) + rank * plan.shard
                here = set()
                for segment in segments:
                    values = segment.of(shard).flatten()
                    for member in segment.members:
                        slot = plan.slots[member.number]
                        here.add(member.name)
                        piece = values[member.offset : member.offset + member.numel]
                        expected = torch.arange(member.start, member.stop) + slot.offset
                        assert piece.tolist() == expected.tolist()
                        assert placed[member.number].group == segment.group
                        for element in range(member.start, member.stop):
                            seen[member.name][element] += 1
                assert here >= {e.name for e in placed if e.granularity == 0}
            assert all(count == 1 for counts in seen.values() for count in counts)


def test_a_whole_matrix_keeps_its_shape() -> None:
    ((plan, placed),) = partition([entry("a", 4, 8, grain=32), entry("b", 4, 8, grain=32)], 2, bucket_bytes=1 << 20)
    for rank in range(2):
        (segment,) = cut(0, plan, placed, rank)
        assert segment.shape == (4, 8)
        assert not segment.merged


def test_a_split_segment_shares_the_memory() -> None:
    ((plan, placed),) = partition([entry("a", 3), entry("b", 5), entry("c", 0)], 1, bucket_bytes=1 << 20)
    (segment,) = cut(0, plan, placed, 0)
    main = torch.arange(float(plan.shard))
    segment.attach(main)
    assert isinstance(segment.tensor, nn.Parameter)
    assert used_parts(segment, [True, False, False]) == (True, False)
    parts = segment.split()
    assert {part.members[0].name: part.tensor.tolist() for part in parts} == {
        "a": [0, 1, 2],
        "b": [3, 4, 5, 6, 7],
        "c": [],
    }
    main[4] = 9
    assert parts[1].tensor[1] == 9
