"""While the timeline records, the engine's computations and messages are in it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_pipe import PipeEngine, PipePlan, manual, timeline


def blocks(count):
    torch.manual_seed(0)
    return [nn.Linear(4, 4) for _ in range(count)]


def test_every_action_of_a_step_is_recorded(tmp_path):
    engine = PipeEngine(manual(blocks(2)), None, PipePlan(num_microbatches=3), nn.functional.mse_loss, act_out=2)
    x = torch.ones(6, 4)
    engine(x, target=x)  # nothing is recorded yet
    with timeline.record() as recording:
        engine(x, target=x)
        engine(x, target=x)
    recording.save(tmp_path / "one.jsonl")
    merged = timeline.merge([tmp_path / "one.jsonl"])
    actions = [span for one in merged.ranks for span in one.spans if span.is_action]
    assert len(actions) == 2 * 2 * 2 * 3  # steps x stages x (F, B) x micro-batches
    assert len({span.step for span in actions}) == 2


@pytest.mark.ranks(2)
def test_messages_find_their_ends(rank, world, tmp_path):
    group = dist.group.WORLD
    engine = PipeEngine(manual(blocks(2)), group, PipePlan(num_microbatches=3), nn.functional.mse_loss)
    x = torch.ones(6, 4)
    path = tmp_path / f"{rank}.jsonl"
    with timeline.record(group=group) as recording:
        loss, _ = engine(x, target=x)
    recording.save(path)
    dist.barrier()
    if rank == 0:
        merged = timeline.merge([tmp_path / f"{one}.jsonl" for one in range(2)])
        assert sum(span.is_action for one in merged.ranks for span in one.spans) == 2 * 2 * 3
        assert {(message.src, message.dst) for message in merged.messages} == {(0, 1), (1, 0)}
        assert len(merged.messages) >= 2 * 3
        assert all(message.send.start <= message.recv.end for message in merged.messages)
    reference = nn.functional.mse_loss(nn.Sequential(*blocks(2))(x), x)
    assert torch.allclose(loss, reference)
