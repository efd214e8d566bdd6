"""Saved in any layout by any number of ranks, read in any other one: bit for bit the whole tensor.

Ranks are threads, their tensors slices of a whole that is the oracle; no process group is needed.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from vescale_ckpt._coordination import coordinator
from vescale_ckpt._geometry import Box, Mesh, Rule
from vescale_ckpt._load import open_checkpoint
from vescale_ckpt._load.target import Request
from vescale_ckpt._save.begin import begin
from vescale_ckpt._save.finish import Part, finish
from vescale_ckpt._save.handle import Meter
from vescale_ckpt._save.options import SaveOptions
from vescale_ckpt._save.plan import Content, assign
from vescale_ckpt._save.stage import stage
from vescale_ckpt._save.staging import StagingPool
from vescale_ckpt._state import Held, Packed, TensorSpec, dtype_name
from vescale_ckpt.errors import LayoutError
from vescale_ckpt.testing import MemoryStorage
from vescale_testing import run_threads

LAYOUTS = {
    "replicated": ("R",),
    "rows": ("S(0)",),
    "columns": ("S(1)",),
    "interleaved": ("IS(0,2)",),
    "strided": ("SS(0,3)",),
    "ragged": "ragged",
    "grid": ("S(0)", "S(1)"),
    "double": ("S(0)", "S(0)"),
    "half": ("R", "S(1)"),
    "strided twice": ("SS(0,2)", "S(0)"),
    "ragged columns": "ragged columns",
}
WORLDS = (1, 2, 3, 4, 8)
SHAPE = (36, 50)  # 36 = 1 + 2 + ... + 8 units of one row; uneven over 5, 7 and 8 ranks


def rule(name, world):
    texts = LAYOUTS[name]
    if texts == "ragged":  # uneven, some ranks without any
        units = [0, 36] if world == 2 else [36 // (world - world // 3)] * world if world < 2 else None
        units = units or [36 * (rank % 3 > 0) // 4 for rank in range(world)]
        units[-1] += 36 - sum(units)
        return Rule(Mesh((world,), range(world)), (f"RS(1,{','.join(map(str, units))})",))
    grid = (2, world // 2) if world % 2 == 0 else (1, world)
    if texts == "ragged columns":
        return Rule(Mesh(grid, range(world)), ("S(1)", f"RS(1,{','.join(['1'] * grid[1])})"))
    if len(texts) == 1:
        return Rule(Mesh((world,), range(world)), texts)
    return Rule(Mesh(grid, range(world)), texts)


def local(whole, layout, rank):
    """What a rank holds, in memory of its own."""
    box_of_all = Box.whole(tuple(whole.shape))
    return [(box, whole[box.slices(box_of_all)].clone()) for box in layout.boxes(tuple(whole.shape), rank)]


def save_sharded(storage, tensors, world, options=None):
    """Save {name: (whole, layout)} by `world` threads."""
    options, store = options or SaveOptions(chunk_bytes=4096), HashStore()
    start = begin(storage, 1, options, (tuple(range(world)),))

    def one(rank):
        specs = [
            TensorSpec(name, dtype_name(whole.dtype), tuple(whole.shape), layout)
            for name, (whole, layout) in sorted(tensors.items())
        ]
        held = {spec.name: Held(spec, local(tensors[spec.name][0], spec.layout, rank)) for spec in specs}
        tree = {spec.name: {"$tensor": number} for number, spec in enumerate(specs)}
        content = Content(Packed(tree, [(spec.name, None) for spec in specs]), held, [], {})
        names = {number: (spec.name, spec.dtype) for number, spec in enumerate(specs)}
        part = Part(storage, start, specs, tree, None, [], [], assign(specs, content, rank), names, options, None)
        part.lease = start.lease(storage, options) if rank == 0 else None
        part.staged, _ = stage(part.tasks, StagingPool(), copy=rank % 2 == 0)
        return finish(part, coordinator(store=store, rank=rank, world=world, timeout=60).session("save"), Meter())

    return run_threads(world, one)


def fits(layout, shape):
    try:
        return all(isinstance(layout.boxes(shape, rank), tuple) for rank in layout.mesh.ranks)
    except LayoutError:
        return False


def check_all_reads(checkpoint, name, whole, layouts):
    for layout in layouts:
        for rank in layout.mesh.ranks:
            parts = local(torch.zeros_like(whole), layout, rank)
            requests = [Request(checkpoint.tensor(name).number, box, out) for box, out in parts]
            checkpoint.read_many(requests)
            for (box, got), (_, want) in zip(parts, local(whole, layout, rank), strict=True):
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (layout, rank, box)


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("world", WORLDS)
def test_any_layout_into_any_other(saved, world):
    storage = MemoryStorage()
    wholes = {"f32": torch.randn(SHAPE), "bf16": torch.randn(SHAPE).bfloat16(), "i64": torch.arange(1800).view(SHAPE)}
    layout = rule(saved, world)
    if not fits(layout, SHAPE):
        pytest.skip("36 rows are not so many equal units")
    save_sharded(storage, {name: (whole, layout) for name, whole in wholes.items()}, world)
    others = [rule(name, count) for name in LAYOUTS for count in WORLDS]
    with open_checkpoint(storage) as checkpoint:
        for name, whole in wholes.items():
            assert torch.equal(checkpoint.tensor(name)[:], whole)
        check_all_reads(checkpoint, "bf16", wholes["bf16"], [other for other in others if fits(other, SHAPE)])


texts = st.sampled_from(["R", "S(0)", "S(1)", "S(2)", "SS(0,2)", "SS(1,3)"])


@st.composite
def layouts(draw):
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)]))
    return Rule(Mesh(sizes, range(math.prod(sizes))), tuple(draw(texts) for _ in sizes))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_dtype_and_options(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 17, 40]), min_size=3, max_size=3)))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.complex64]))
    options = SaveOptions(
        compress=data.draw(st.sampled_from(["auto", None])),
        dedup=data.draw(st.sampled_from(["position", "content", None])),
        chunk_bytes=4096,
    )
    if data.draw(st.booleans()):
        options = SaveOptions(compress=None, dedup=None, layout="plain", chunk_bytes=4096)
    bits = torch.randint(-128, 127, (math.prod(shape) * dtype.itemsize,), dtype=torch.int8)
    whole = bits.view(dtype).view(shape)
    layout = data.draw(layouts())
    storage = MemoryStorage(random_write=data.draw(st.booleans()))
    save_sharded(storage, {"w": (whole, layout)}, len(layout.mesh.ranks), options)
    with open_checkpoint(storage) as checkpoint:
        check_all_reads(checkpoint, "w", whole, [data.draw(layouts()), layout])
