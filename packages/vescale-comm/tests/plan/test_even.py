"""The layouts that plans are compared with, against torch's own sharding."""

import pytest
import torch

from vescale_comm._plan import TensorSpec, even_shard, row_wise_numel


@pytest.mark.parametrize("world", [1, 2, 3, 7, 16])
@pytest.mark.parametrize("shape", [(10, 3), (16,), (5, 2, 4), (1, 6), (0, 4), ()])
def test_rows_are_those_of_torch_chunks_padded_to_the_first(shape: tuple[int, ...], world: int) -> None:
    whole = torch.empty(shape if shape else (1,), device="meta")
    assert row_wise_numel([shape], world) == torch.chunk(whole, world)[0].numel() * world


def test_rows_that_stay_together_are_rounded_up_per_rank() -> None:
    # facts of Llama-3-8B's w1 at 96 ranks: 14336 / 96 = 149.3 rows, five blocks of 32
    assert row_wise_numel([(14336, 4096)], 96, rows=32) == 160 * 96 * 4096
    assert row_wise_numel([(128, 768, 2048)], 96, rows=32) == 2 * 96 * 768 * 2048
    assert row_wise_numel([(20,)], 4, rows=32) == 80


def test_even_shards_count_blocks_of_each_tensor() -> None:
    specs = [TensorSpec("w", (14336, 4096), 32 * 4096), TensorSpec("b", (20,), 32), TensorSpec("none", (0,))]
    assert even_shard(specs, 96) == 5 * 32 * 4096 + 20
