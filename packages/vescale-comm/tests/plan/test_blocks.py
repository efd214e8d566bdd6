"""What stays together under a rule, checked element by element against index arithmetic of torch."""

import pytest
import torch

from vescale_comm._plan import Block, Rows, Rule, Storage, Whole, granularity
from vescale_comm._plan.blocks import rules_for
from vescale_comm.errors import PlanError


def block_numbers(shape: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    """Number each element by the tile in which it is."""
    matrix = torch.arange(shape[-2])[:, None] // rows * 1000 + torch.arange(shape[-1])[None] // columns
    stack = torch.arange(max(1, torch.Size(shape[:-2]).numel())) * 10**6
    return (stack[:, None, None] + matrix).reshape(shape)


def is_torn(numbers: torch.Tensor, grain: int) -> bool:
    """Whether a block is in two grains of the storage order."""
    flat = numbers.reshape(-1)
    grains = torch.arange(flat.numel()) // grain
    return any(grains[flat == number].unique().numel() > 1 for number in flat.unique())


@pytest.mark.parametrize("shape", [(8, 6), (12, 10), (3, 4, 6), (2, 6, 5), (3, 5, 8)])
@pytest.mark.parametrize("tile", [(2, 2), (4, 3), (3, 5), (8, 8)])
def test_no_tile_is_torn_in_any_storage(shape: tuple[int, ...], tile: tuple[int, int]) -> None:
    rule = Block(*tile)
    numbers = block_numbers(shape, *tile)
    kinds = rule.storages(shape)
    assert not is_torn(numbers, granularity(rule, shape))
    assert not is_torn(numbers.mT.contiguous(), granularity(rule, shape, Storage.TRANSPOSED))
    divides = shape[-2] % tile[0] == 0 and shape[-1] % tile[1] == 0
    assert (Storage.TILES in kinds) == divides
    if divides:
        assert granularity(rule, shape, Storage.TILES) == tile[0] * tile[1]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 4, 6), (3, 5, 8)])
@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_no_rows_that_belong_together_are_torn(shape: tuple[int, ...], rows: int) -> None:
    grain = granularity(Rows(rows), shape)
    assert not is_torn(block_numbers(shape, rows, shape[-1]), grain)
    assert grain <= torch.Size(shape).numel()


def test_granularities_on_paper() -> None:
    assert granularity(Rows(32), (4096, 14336)) == 32 * 14336
    assert granularity(Rows(32), (128, 768, 2048)) == 32 * 2048
    assert granularity(Rows(512), (128, 768, 2048)) == 768 * 2048  # 512 rows do not divide a matrix
    assert granularity(Rows(32), (20,)) == 20
    assert granularity(Rows(32), ()) == 1
    assert granularity(Block(128, 64), (4096,)) == 64
    assert granularity(Whole(), (128, 768, 2048)) == 768 * 2048
    assert granularity(Whole(), (4, 3, 2, 2)) == 48
    assert granularity(5, (100, 100)) == 5


@pytest.mark.parametrize(
    ("rule", "shape", "storage"),
    [
        (Rows(2), (4, 4), Storage.TRANSPOSED),
        (Whole(), (4, 4), Storage.TILES),
        (Block(3, 3), (4, 4), Storage.TILES),
        (Block(3, 3), (4,), Storage.TRANSPOSED),
    ],
)
def test_storage_that_would_scatter_a_block_is_refused(rule: Rule, shape: tuple[int, ...], storage: Storage) -> None:
    with pytest.raises(PlanError, match=f"is not contiguous when stored {storage.value}: choose from as given"):
        granularity(rule, shape, storage)


def test_sizes_below_one_are_refused() -> None:
    for make in (lambda: Rows(0), lambda: Block(4, 0), lambda: granularity(0, (3,))):
        with pytest.raises(PlanError, match="is no block"):
            make()


def test_the_first_pattern_counts_and_each_must_match() -> None:
    names = ["layers.0.w1", "layers.0.norm", "head"]
    assert rules_for(names, Rows(3)) == [Rows(3)] * 3
    assert rules_for(names, {r"layers\..*\.w1": Whole(), r"layers\..*": Rows(2)}) == [Whole(), Rows(2), 1]
    with pytest.raises(PlanError, match=r"'w1' matches no parameter: .* such as 'layers.0.w1'"):
        rules_for(names, {"w1": Whole()})
    with pytest.raises(PlanError, match="there are none"):
        rules_for([], {"w1": Whole()})
