"""What `ls` and `show` tell, beside sizes that are worked out by hand."""

from __future__ import annotations

import torch

import vescale_ckpt as ck
from vescale_ckpt._format import Lease, step_folder
from vescale_ckpt._ops import describe, steps
from vescale_ckpt.testing import MemoryStorage


def test_new_and_shared_bytes_of_steps() -> None:
    store = MemoryStorage()
    frozen = torch.randn(5000)
    for step in (1, 2):
        ck.save(store, {"f": frozen, "h": torch.randn(500), "n": step}, step=step, compress=None, metadata={"k": step})
    ck.pin(store, 1)
    view = steps(store)
    assert [(i.step, i.tensors, i.nbytes, i.new_bytes, i.shared_bytes, i.pinned, i.problem) for i in view.steps] == [
        (1, 2, 22000, 22000, 0, True, ""),
        (2, 2, 22000, 2000, 20000, False, ""),
    ]
    assert [info.metadata for info in view.steps] == [{"k": 1}, {"k": 2}]
    assert view.others == ()
    shown = describe(store, 2)
    assert (shown.dedup_ratio, shown.compression_ratio) == (11.0, 1.0)


def test_leaves_of_a_step() -> None:
    store = MemoryStorage()
    tied = torch.zeros(40, 50, dtype=torch.bfloat16)
    state = {"m": {"e": tied, "o": tied}, "lr": 0.5, "s": torch.tensor(3), "r": ck.local(7)}
    ck.save(store, state, step=1, compress=None)
    leaves = {leaf.name: leaf for leaf in describe(store).leaves}
    e, o, s = leaves["m.e"], leaves["m.o"], leaves["s"]
    assert (e.kind, e.dtype, e.shape, e.nbytes, e.new_bytes, e.layout) == (
        "tensor",
        "bfloat16",
        (40, 50),
        4000,
        4000,
        "one rank",
    )
    assert (o.alias_of, o.new_bytes) == ("m.e", 0)
    assert (s.codecs, s.new_bytes) == (("inline",), 8)
    assert (leaves["lr"].kind, leaves["lr"].value) == ("value", 0.5)
    assert leaves["r"].kind == "local"


def test_keys_are_chosen_by_pattern() -> None:
    store = MemoryStorage()
    ck.save(store, {"m": {"a": {"w": torch.ones(9)}, "b": {"w": torch.ones(9)}}, "n": 1}, step=1)
    assert [leaf.name for leaf in describe(store, keys="m.a").leaves] == ["m.a.w"]
    assert [leaf.name for leaf in describe(store, keys="*.w").leaves] == ["m.a.w", "m.b.w"]
    assert describe(store, keys="w").leaves == ()


def test_a_compressed_step_has_a_ratio() -> None:
    store = MemoryStorage()
    ck.save(store, {"z": torch.zeros(200_000)}, step=1, compress="auto")
    view = describe(store)
    assert view.compression_ratio > 2
    assert view.leaves[0].codecs != ("raw",)


def test_damage_and_others() -> None:
    store = MemoryStorage()
    ck.save(store, {"w": torch.ones(100)}, step=1)
    ck.save(store, {"w": torch.ones(100)}, step=1, overwrite=True)
    ck.save(store, {"w": torch.ones(100)}, step=2)
    running, dead = step_folder(3, "0123456789abcdef"), step_folder(4, "0123456789abcdef")
    store.put(f"{running}/LEASE", Lease("0123456789abcdef", 1e12, ()).to_bytes())
    store.put(f"{dead}/data/x", b"")
    path = next(path for path in store.files() if path.startswith("steps/00000002") and "manifest" in path)
    store.flip(path, 80)
    view = steps(store)
    assert [(info.step, bool(info.problem)) for info in view.steps] == [(1, False), (2, True)]
    texts = dict(view.others)
    assert len(texts) == 3
    assert "being saved" in texts[running]
    assert "never finished" in texts[dead]
    assert "an older save of step 1" in texts.values()
