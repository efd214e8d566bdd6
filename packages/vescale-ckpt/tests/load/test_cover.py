import random

import torch

from vescale_ckpt._geometry import Box, Piece
from vescale_ckpt._load.cover import disjoint


def painted_once(shape, runs, blocks):
    count = torch.zeros(shape, dtype=torch.int64)
    for low, high in runs:
        count.view(-1)[low:high] += 1
    for block in blocks:
        count[block.slices(Box.whole(shape))] += 1
    return int(count.max()) <= 1


def test_against_painting():
    rng, answers = random.Random(3), set()
    for _ in range(400):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        size = Box.whole(shape).numel
        runs = []
        for _ in range(rng.randrange(3)):
            low = rng.randrange(size)
            runs.append((low, rng.randrange(low, size) + 1))
        blocks = []
        for _ in range(rng.randrange(4)):
            offset = tuple(rng.randrange(n) for n in shape)
            blocks.append(Box(offset, tuple(rng.randrange(1, n - o + 1) for o, n in zip(offset, shape, strict=True))))
        expected = painted_once(shape, runs, blocks)
        assert disjoint(Box.whole(shape), runs, blocks) == expected, (shape, runs, blocks)
        answers.add((expected, bool(runs), bool(blocks)))
    assert {(True, True, True), (False, True, True)} <= answers


def test_a_target_away_from_the_origin():
    target = Box((10, 20), (4, 4))
    assert disjoint(target, [(0, 8)], [Box((12, 20), (2, 4))])
    assert not disjoint(target, [(0, 9)], [Box((12, 20), (2, 4))])
    assert disjoint(target, [], Piece(target, 3, 13).boxes())
