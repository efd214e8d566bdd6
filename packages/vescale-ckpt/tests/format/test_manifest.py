"""The manifest: comes back equal, stays small for many ranks, and refuses what the format does not allow."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_ckpt._format import FORMAT, ITEMSIZE, Manifest, TensorRecord, WriterRecord
from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt.errors import FormatError

SHA = hashlib.sha256(b"").hexdigest()


def example() -> Manifest:
    whole = Rule(Mesh((4,), range(4)), ("R",))
    rows = Rule(Mesh((2, 2), range(4)), ("R", "S(0)"))
    halves = Explicit(((0, (Box((0, 0), (2, 3)),)), (1, (Box((2, 0), (2, 3)),))))
    return Manifest(
        save_id="3f2a9c1b" * 4,
        step=1000,
        created=1.5e9,
        world=4,
        layouts=(whole, rows, halves),
        tensors=(
            TensorRecord("w", "bfloat16", (6, 4), 1),
            TensorRecord("step", "int64", (), 0),
            TensorRecord("e", "float32", (4, 3), 2),
            TensorRecord("none", "float32", (0, 7), 0),
            TensorRecord("\u00e9", "int64", (), 0),
        ),
        tree={"w": {"$tensor": 0}, "steps": [{"$tensor": 1}, {"$tensor": 4}], "x": {"$float": "nan"}, "n": 10**30},
        metadata={"loss": 0.25, "tag": "\u2603"},
        writers=tuple(WriterRecord(hashlib.sha256(b"%d" % n).hexdigest(), 100 + n, 10**n, n) for n in range(4)),
        options={"compress": "auto"},
    )


def test_a_manifest_comes_back_equal() -> None:
    manifest = example()
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


NODES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("ab\u00e9"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab"), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.lists(
        st.tuples(st.text("abc.\u00e9", max_size=8), st.sampled_from(sorted(ITEMSIZE)), st.lists(st.integers(0, 9))),
        unique_by=lambda row: row[0],
        max_size=8,
    ),
    NODES,
    NODES,
    st.integers(0, 10**15),
)
def test_manifests_round_trip(rows: list[tuple[str, str, list[int]]], tree: Any, metadata: Any, step: int) -> None:
    tensors = tuple(TensorRecord(name, dtype, tuple(shape), 0) for name, dtype, shape in rows)
    layout = Rule(Mesh((1,), range(1)), ("R",))
    writers = (WriterRecord(SHA, 1, 0, 0),)
    manifest = Manifest("0" * 8, step, 0.0, 1, (layout,), tensors, tree, metadata, writers)
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_what_stands_in_the_file() -> None:
    value = json.loads(example().to_bytes())
    assert value["format"] == FORMAT
    assert value["meshes"] == [
        {"shape": [4], "start": 0, "strides": [1]},
        {"shape": [2, 2], "start": 0, "strides": [2, 1]},
    ]
    assert value["layouts"][1] == {"mesh": 1, "placements": ["R", "S(0)"]}
    assert value["layouts"][2] == {
        "ndim": 2,
        "ranks": [0, 1],
        "counts": [1, 1],
        "boxes": [0, 0, 2, 3, 2, 0, 2, 3],
    }
    assert value["kinds"][0] == ["bfloat16", [6, 4], 1]
    assert value["tensors"] == {"name": ["w", "step", "e", "none", "\u00e9"], "kind": [0, 1, 2, 3, 1]}
    digests = base64.b64decode(value["writers"]["index_sha256"])
    assert digests[32:64] == hashlib.sha256(b"1").digest()
    assert value["writers"]["data_bytes"] == [1, 10, 100, 1000]


def llama(world: int) -> Manifest:
    """Return the manifest of an 8B model with two moments per weight, all dims 0 cut over all ranks."""
    tensors, tree = [], {}
    shapes = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    names = [(f"model.layers.{n}.{name}.weight", shape) for n in range(32) for name, shape in shapes.items()]
    names += [("model.embed_tokens.weight", (128256, 4096)), ("model.norm.weight", (4096,))]
    names += [("lm_head.weight", (128256, 4096))]
    for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        for name, shape in names:
            tree.setdefault(kind, {})[name] = {"$tensor": len(tensors)}
            tensors.append(TensorRecord(f"{kind}.{name}", "float32", shape, 0))
    writers = tuple(
        WriterRecord(hashlib.sha256(b"%d" % n).hexdigest(), 100_000 + n, 10**8 + n, 1000 + n) for n in range(world)
    )
    layouts = (Rule(Mesh((world // 8, 8), range(world)), ("S(0)", "S(0)")),)
    return Manifest("0" * 32, 1000, 1.5e9, world, layouts, tuple(tensors), tree, None, writers)


@pytest.mark.parametrize(("world", "limit"), [(1024, 0.3 * 2**20), (10240, 10**6)])
def test_size_for_many_ranks(world: int, limit: float) -> None:
    manifest = llama(world)
    assert len(manifest.tensors) == 873
    data = manifest.to_bytes()
    assert len(data) < limit
    assert Manifest.from_bytes(data) == manifest


def test_size_of_scalars() -> None:
    def size(count: int) -> int:
        names = [f"layers.{n:05d}.step_count" for n in range(count)]
        tensors = tuple(TensorRecord(name, "float32", (), 0) for name in names)
        tree = {name: {"$tensor": n} for n, name in enumerate(names)}
        layout = Rule(Mesh((1,), range(1)), ("R",))
        return len(Manifest("0" * 8, 1, 0, 1, (layout,), tensors, tree, None, (WriterRecord(SHA, 1, 0, 0),)).to_bytes())

    assert (size(2000) - size(1000)) / 1000 <= 80


Edit = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Edit:
    """Return an edit that sets what lies at a path to its last entry."""

    def edit(value: dict[str, Any]) -> None:
        *way, key, new = path
        inner: Any = value
        for step in way:
            inner = inner[step]
        inner[key] = new

    return edit


def drop(key: str) -> Edit:
    return lambda value: value.pop(key)


REFUSED: dict[str, tuple[Edit, str]] = {
    "no format": (drop("format"), "format: must be a number from 1 to 1, but is None"),
    "format 0": (put("format", 0), "format: must be a number from 1"),
    "format true": (put("format", True), "format: must be a number from 1"),
    "no tree": (drop("tree"), "the key 'tree' is missing"),
    "unknown key": (put("exec", "import os"), "unknown key 'exec'"),
    "by is a list": (put("by", []), "by: must be"),
    "save id is a path": (put("save_id", "../../../etc"), "save_id: must be 8 to 64 lower-case hex digits"),
    "save id is a number": (put("save_id", 12345678), "save_id: must be 8 to 64"),
    "step below 0": (put("step", -1), "step: must be an integer from 0 to 1000000000000000, but is -1"),
    "step too large": (put("step", 10**15 + 1), "step: must be"),
    "step is a float": (put("step", 1.0), "step: must be an integer"),
    "step is a bool": (put("step", True), "step: must be an integer"),
    "created is a string": (put("created", "now"), "created: must be a number"),
    "created below 0": (put("created", -1), "created: must be a number"),
    "world 0": (put("world", 0), "world: must be an integer from 1"),
    "world without writers": (put("world", 5), "world: must be the number of writers, 4, but is 5"),
    "world is huge": (put("world", 2**62), "world: must be the number of writers"),
    "options is a list": (put("options", []), "options: must be an object"),
    "meshes is an object": (put("meshes", {}), "meshes: must be a list"),
    "rank beyond world": (put("meshes", 0, "start", 1), r"meshes\[0\]: strides: must lead to ranks from 0 to 3"),
    "no layouts": (put("layouts", []), r"kinds\[0\]: layout: must be the number of one of 0 layouts"),
    "layout number": (put("kinds", 0, 2, 3), r"kinds\[0\]: layout: must be the number of one of 3 layouts, but is 3"),
    "layout below 0": (put("kinds", 0, 2, -1), r"kinds\[0\]: layout: must be"),
    "layout is a bool": (put("kinds", 0, 2, True), r"kinds\[0\]: layout: must be"),
    "kind is short": (put("kinds", 0, ["float32", []]), r"kinds\[0\]: must be \[dtype, shape, layout\]"),
    "unknown dtype": (put("kinds", 0, 0, "object"), r"kinds\[0\]: dtype: must be one of bool"),
    "dtype with torch": (put("kinds", 0, 0, "torch.float32"), "dtype: must be one of"),
    "dtype is a list": (put("kinds", 0, 0, []), "dtype: must be one of"),
    "shape is a string": (put("kinds", 0, 1, "6,4"), r"kinds\[0\]: shape: must be a list of integers"),
    "dim below 0": (put("kinds", 0, 1, [-6, 4]), r"shape\[0\]: must be an integer from 0"),
    "dim is a float": (put("kinds", 0, 1, [6.0, 4]), r"shape\[0\]: must be an integer"),
    "dim is huge": (put("kinds", 0, 1, [2**64, 4]), r"shape\[0\]: must be an integer"),
    "elements overflow": (put("kinds", 0, 1, [2**31, 2**31, 4]), "shape: must have at most"),
    "bytes overflow": (put("kinds", 0, 1, [2**62, 1]), "shape: must have at most"),
    "many dims": (put("kinds", 0, 1, [1] * 65), "shape: must have at most 64 dims"),
    "cut of a dim that is not there": (put("kinds", 0, 1, []), r"kinds\[0\]: layout 1 does not fit: .* no dim 0"),
    "listed box outside": (put("layouts", 2, "boxes", 7, 4), r"kinds\[2\]: layout 2 does not fit"),
    "listed box of other dims": (put("kinds", 2, 1, [12]), "layout 2 does not fit"),
    "absurd blocks": (
        put("layouts", 1, "placements", ["R", "SS(0,999999999999)"]),
        "into too many boxes, up to 1000000000000",
    ),
    "blocks of many dims": (
        put("layouts", 1, "placements", ["IS(0,2000)", "IS(1,2000)"]),
        "into too many boxes",
    ),
    "blocks that do not divide": (put("layouts", 1, "placements", ["R", "IS(0,4)"]), "does not fit: .* equal blocks"),
    "units of other ranks": (put("layouts", 1, "placements", ["R", "RS(1,1,1,1)"]), "does not fit: .* 3 units"),
    "units that do not divide": (put("layouts", 1, "placements", ["R", "RS(1,3,4)"]), "does not fit"),
    "names and kinds differ": (put("tensors", "kind", [0]), "tensors: kind: must be a list of 5"),
    "kind number": (put("tensors", "kind", 0, 4), r"tensors: kind\[0\]: must be an integer from 0 to 3, but is 4"),
    "name twice": (put("tensors", "name", 1, "w"), "tensors: name: 'w' stands twice"),
    "name is a number": (put("tensors", "name", 1, 7), r"tensors: name\[1\]: must be a string"),
    "name is long": (put("tensors", "name", 1, "a" * 20000), "must be a string of at most 16384 characters"),
    "tensor of the tree": (
        put("tree", {"$tensor": 5}),
        r"tree: \$tensor: must be the number of one of 5 tensors, but is 5",
    ),
    "tensor below 0": (put("tree", [[{"$tensor": -1}]]), r"tree: \$tensor: must be"),
    "tensor is a name": (put("tree", [{"$tensor": "w"}]), r"tree: \$tensor: must be"),
    "array of the tree": (put("tree", [{"$numpy": 1.0}]), r"tree: \$numpy: must be"),
    "writers is a list": (put("writers", []), "writers: must be an object"),
    "digests are no base64": (put("writers", "index_sha256", "!" * 172), "index_sha256: must be a string in base64"),
    "digests are short": (put("writers", "index_sha256", "AAAA"), "index_sha256: must have 128 bytes, but is 3"),
    "index of 0 bytes": (put("writers", "index_bytes", 0, 0), r"index_bytes\[0\]: must be an integer from 1"),
    "index is huge": (
        put("writers", "index_bytes", 0, 2**40),
        r"index_bytes\[0\]: must be an integer from 1 to 1073741824",
    ),
    "data below 0": (put("writers", "data_bytes", 2, -5), r"data_bytes\[2\]: must be an integer from 0"),
    "data is a string": (put("writers", "data_bytes", 2, "5"), r"data_bytes\[2\]: must be an integer"),
    "one count less": (put("writers", "chunks", [0, 0, 0]), "chunks: must be a list of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_manifests_are_refused(name: str) -> None:
    edit, message = REFUSED[name]
    value = copy.deepcopy(json.loads(example().to_bytes()))
    edit(value)
    with pytest.raises(FormatError, match=f"^the file: .*{message}|^the file: {message}"):
        Manifest.from_bytes(json.dumps(value).encode(), "the file")


def test_a_newer_format_says_what_to_install() -> None:
    value = json.loads(example().to_bytes()) | {"format": 2, "by": "vescale-ckpt 3.1.4", "new": 1}
    with pytest.raises(FormatError, match=r"format 2 is newer .*pip install --upgrade 'vescale-ckpt>=3.1.4'"):
        Manifest.from_bytes(json.dumps(value).encode())
    value["by"] = "vescale-ckpt 1'; rm -rf /"
    with pytest.raises(FormatError, match=r"pip install --upgrade 'vescale-ckpt'\.$"):
        Manifest.from_bytes(json.dumps(value).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"1", b'"x"', b"{}", b"[" * 10**6])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^manifest\.json: "):
        Manifest.from_bytes(data)


def test_what_no_reader_accepts_is_not_written() -> None:
    manifest = example()
    tensors = (*manifest.tensors, TensorRecord("w", "float32", (), 0))
    fields = {name: getattr(manifest, name) for name in Manifest.__slots__}
    with pytest.raises(FormatError, match="'w' stands twice"):
        Manifest(**{**fields, "tensors": tensors}).to_bytes()
    with pytest.raises(FormatError, match="index_sha256 is not hex"):
        Manifest(**{**fields, "writers": (WriterRecord("xyz", 1, 1, 1),)}).to_bytes()
