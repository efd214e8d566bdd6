"""What users of other checkpoint libraries have reported of states that changed, of other layouts, and of large states.

The comment over a test names the report; test_hazards.py lists what is tested where.
"""

import sys
import threading

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CheckpointError, MismatchError
from vescale_ckpt._codec import codec, crc32, fingerprint
from vescale_ckpt._geometry import Assignment, Geometry, Mesh, Rule
from vescale_ckpt.testing import FaultyStorage, MemoryStorage, Slow, matching
from vescale_testing import run_ranks

MIB = 1 << 20


class Gate:
    """Makes the first write of a FaultyStorage wait until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def plan(self):
        return matching(Slow(self._wait), kind="write")

    def _wait(self):
        self.reached.set()
        assert self.opened.wait(60)


def same(a, b):
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def steps(storage):
    return ck.Checkpointer(storage).steps()


# ---- other layouts, and optimizers


# pytorch#161368, #103306, #144109: wrong offsets of uneven shards on a mesh of two dims.
def test_uneven_shards_on_a_mesh_of_two_dims_lie_where_chunk_puts_them():
    rows = Rule(Mesh((2, 2), range(4)), ("S(0)", "S(0)"))
    table = {  # worked out by hand: chunk in two, then each part in two
        5: [(0, 2), (2, 3), (3, 4), (4, 5)],
        3: [(0, 1), (1, 2), (2, 3), None],
        1: [(0, 1), None, None, None],
    }
    for size, expected in table.items():
        for rank, run in enumerate(expected):
            boxes = [box for box in rows.boxes((size, 4), rank) if box.numel]
            assert [(box.offset, box.stop) for box in boxes] == ([] if run is None else [((run[0], 0), (run[1], 4))])
    grid = Rule(Mesh((2, 3), range(6)), ("S(1)", "S(0)"))
    painted = torch.zeros(5, 7)
    for rank in range(6):
        for box in grid.boxes((5, 7), rank):
            painted[tuple(slice(a, b) for a, b in zip(box.offset, box.stop, strict=True))] += 1
    assert bool((painted == 1).all())


def with_frozen_layer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters())


def train(model, optimizer):
    model(torch.ones(3, 20)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# NeMo Automodel#2779, prime-rl#2800: parameters without gradients have no state, and the resume crashes.
def test_parameters_that_never_had_a_gradient_do_not_stop_a_resume():
    storage = MemoryStorage()
    model, optimizer = with_frozen_layer()
    train(model, optimizer)
    assert len(optimizer.state) == 2
    ck.save(storage, {"m": model, "o": optimizer})
    train(model, optimizer)

    fresh, its_optimizer = with_frozen_layer()
    ck.load(storage, {"m": fresh, "o": its_optimizer})
    assert len(its_optimizer.state) == 2
    train(fresh, its_optimizer)
    assert all(same(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))

    # The other way round: what was frozen has a state here, and none in the checkpoint.
    thawed, its_optimizer = with_frozen_layer()
    thawed.requires_grad_(True)
    train(thawed, its_optimizer)
    assert len(its_optimizer.state) == 4
    ck.load(storage, {"m": thawed, "o": its_optimizer})
    train(thawed, its_optimizer)

    # State dicts are what the caller says they are; what is missing is told, or kept and reported.
    states = {"o": its_optimizer.state_dict()}
    with pytest.raises(MismatchError, match=r"o\.state\.0\.exp_avg: not in the checkpoint"):
        ck.load(storage, states, keys="o.*")
    report = ck.load(storage, states, keys="o.*", missing="keep")
    assert "o.state.0.exp_avg" in report.missing


# pytorch#137327, #126881: what a list or dict got since it was built is an error, or is not loaded.
def test_lists_and_dicts_that_grew_come_back():
    storage = MemoryStorage()
    ck.save(storage, {"history": [1.5, 2.5, {"x": torch.arange(300)}], "cache": {"lazy": torch.ones(300)}})
    for target in ({"history": [], "cache": {}}, {"history": None, "cache": None}):
        ck.load(storage, target)
        assert target["history"][:2] == [1.5, 2.5]
        assert torch.equal(target["history"][2]["x"], torch.arange(300))
        assert target["cache"]["lazy"].sum() == 300
    with pytest.raises(MismatchError, match=r"history"):  # half of a list is no list
        ck.load(storage, {"history": [0.0], "cache": {}})


# DCP: keys of the checkpoint that the state lacks are passed over in silence.
def test_keys_that_only_the_checkpoint_has_are_told():
    storage, target = MemoryStorage(), {"w": torch.zeros(5)}
    ck.save(storage, {"w": torch.ones(5), "head": torch.ones(500)})
    with pytest.raises(MismatchError, match=r"head: in the checkpoint, but not in the state"):
        ck.load(storage, target)
    assert target["w"].sum() == 0
    assert ck.load(storage, target, strict=False).unexpected == ("head",)


# DCP: a plan that was cached for float32 is used for float64.
def test_another_dtype_under_the_same_name_is_another_tensor():
    storage, w = MemoryStorage(), torch.randn(5000, dtype=torch.float64)
    for dtype in (torch.float32, torch.float64, torch.float32, torch.int32):
        state = {"w": w.to(dtype)}
        ck.save(storage, state)
        loaded = ck.load_dict(storage)["w"]
        assert loaded.dtype == dtype
        assert same(loaded, state["w"])


# DCP: nobody checks that all that was planned was written.
def test_a_tensor_that_nobody_wrote_is_not_committed(monkeypatch):
    module = sys.modules["vescale_ckpt._save.save"]
    assign = module.assign
    monkeypatch.setattr(module, "assign", lambda *arguments: assign(*arguments)[:-1])
    storage = MemoryStorage()
    with pytest.raises(CheckpointError, match=r"wrote 4000 bytes.*has 8000"):
        ck.save(storage, {"a": torch.ones(1000), "b": torch.ones(1000)})
    assert steps(storage) == []


def save_sharded(rank, world, path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    w = distribute_tensor(torch.arange(6000.0).view(60, 100), mesh, [Shard(0)])
    ck.save(path, {"w": w, "own": ck.local(rank)}, step=1, metadata={"loss": 0.5})


# orbax#648: a checkpoint cannot even be looked at on a machine with fewer devices.
def test_one_process_looks_into_what_many_ranks_saved(tmp_path):
    run_ranks(save_sharded, 3, kwargs={"path": str(tmp_path)})
    assert not torch.distributed.is_initialized()
    with ck.open(tmp_path) as checkpoint:
        assert checkpoint.manifest.world == 3
        assert checkpoint.metadata == {"loss": 0.5}
        assert tuple(checkpoint["w"].shape) == (60, 100)
        assert checkpoint["w"][19:21, 7].tolist() == [1907.0, 2007.0]
    assert torch.equal(ck.load_dict(tmp_path, keys="w")["w"], torch.arange(6000.0).view(60, 100))
    assert ck.verify(tmp_path).ok


class Compiled(torch.nn.Module):
    """Names its parameters as torch.compile does."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


# torchtitan#961: the names that torch.compile gives do not match.
@pytest.mark.parametrize("compiled", ["saved", "loaded"])
def test_names_of_compiled_modules_are_told_and_can_be_changed(compiled):
    storage, plain, wrapped = MemoryStorage(), torch.nn.Linear(30, 30), Compiled(torch.nn.Linear(30, 30))
    source, target = (wrapped, plain) if compiled == "saved" else (plain, wrapped)
    ck.save(storage, {"model": source})
    with pytest.raises(MismatchError, match=r"hint: .*_orig_mod"):
        ck.load(storage, {"model": target})
    rename = [(r"^model\.", "model._orig_mod.")] if compiled == "saved" else [(r"_orig_mod\.", "")]
    ck.load(storage, {"model": target}, rename=rename)
    assert all(same(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


# ---- scale


# pytorch#163548, #147758, tnt#1064: planning looks at all ranks times all tensors.
def test_planning_looks_at_a_tensor_a_few_times_whatever_the_number_of_ranks(monkeypatch):
    looked = []
    boxes = Rule.boxes
    monkeypatch.setattr(Rule, "boxes", lambda self, shape, rank: looked.append(rank) or boxes(self, shape, rank))
    count, counts = 40, []
    for side in (4, 64):
        rule = Rule(Mesh((side, side), range(side * side)), ("R", "S(0)"))
        looked.clear()
        assignment = Assignment([Geometry((4096, 64 + number), 4, rule) for number in range(count)])
        assert assignment.pieces(side + 1)
        counts.append(len(looked))
    assert counts[1] <= counts[0] + count


# pytorch#76331: a whole shard is read for a few rows of it.
def test_a_few_rows_are_read_without_the_rest():
    storage = FaultyStorage(MemoryStorage())
    w = torch.randn(4096, 1024)
    ck.save(storage, {"w": w, "other": torch.randn(1024, 1024)})
    checkpoint = ck.open(storage)
    begin = storage.count
    assert same(checkpoint["w"][1000:1010], w[1000:1010])
    read = sum(o.nbytes for o in storage.operations[begin:] if o.kind == "read" and "/data/" in o.path)
    assert 0 < read <= 2 * MIB  # a chunk has 256 rows


# pytorch#147039: bulk work in the background holds the interpreter lock that the trainer needs.
@pytest.mark.parametrize("work", ["crc32", "fingerprint", "zstd", "planes"])
def test_bulk_work_lets_other_threads_run(work):
    data = torch.randn(2 * MIB).mul_(0.02).view(torch.uint8)
    call = {
        "crc32": lambda: crc32(data),
        "fingerprint": lambda: fingerprint(data),
        "zstd": lambda: codec("zstd").encode(data, 4),
        "planes": lambda: codec("planes").encode(data, 4),
    }[work]
    call()  # first uses take memory and import
    turns, over, before = 0, threading.Event(), sys.getswitchinterval()

    def worker():
        for _ in range(1000):
            seen = turns
            call()
            if turns > seen:
                break
        else:
            over.failed = True
        over.set()

    over.failed = False
    sys.setswitchinterval(1000.0)  # a thread now only ever yields by giving the lock back itself
    try:
        thread = threading.Thread(target=worker)
        thread.start()
        while not over.wait(1e-5):
            turns += 1
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not over.failed


# torchtitan#930: a load right after an asynchronous save does not see it.
@pytest.mark.parametrize("how", ["load", "load_dict", "restore"])
def test_a_load_sees_the_save_that_still_runs(how):
    inner, gate, target = MemoryStorage(), Gate(), {"w": torch.zeros(1000)}
    ck.save(inner, {"w": torch.ones(1000)}, step=1)
    handle = ck.async_save(FaultyStorage(inner, gate.plan()), {"w": torch.full((1000,), 2.0)}, step=2)
    assert gate.reached.wait(60)

    class Over(threading.Event):
        def wait(self, timeout=None):  # the save goes on only once somebody waits for it
            gate.opened.set()
            return super().wait(timeout)

    handle._over = Over()
    try:
        if how == "load_dict":
            target = ck.load_dict(inner)
        elif how == "load":
            ck.load(inner, target)
        else:
            ck.Checkpointer(inner).restore(target)
    finally:
        gate.opened.set()
        handle.wait(60)
    assert target["w"].tolist() == [2.0] * 1000
