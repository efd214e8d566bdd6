"""What users of other checkpoint libraries have reported as loss, corruption or hang: one test for each symptom.

The comment over a test names the report. Tested elsewhere, since they need ranks or a file of their own:

* states that changed, other layouts, and scale: test_hazards_layouts.py
* a rank that fails or dies makes the others wait (torchtitan#3065, NeMo Automodel#3254): ranks/test_failures.py
* uneven shards on 2-D meshes, through storage (pytorch#161368): ranks/test_save_load.py, matrix/test_layouts.py
* another number of ranks (DeepSpeed#2898): ranks/test_save_load.py
* values of ranks lost or merged (pytorch#146566): ranks/test_save_load.py, load/test_ranks.py
* replicas that read the same bytes (pytorch#193909): load/test_ranks.py
* one rank that coordinates thousands (accelerate#4105): coordination/test_session.py
* checkpoints of earlier versions (pytorch#133923): format/test_golden.py
* hostile numbers and names in files: format/test_mutations.py, format/test_index.py, storage/test_contract.py
* a crash at any operation (pytorch#191391): crash/test_every_operation.py; and below
* values that have no form without pickle: state/test_values.py
"""

import ast
import errno
import pathlib
import pickle
import threading

import pytest
import torch

import vescale_ckpt as ck
from vescale_ckpt import CorruptionError, MismatchError, StateError, StorageError
from vescale_ckpt._storage import open_storage
from vescale_ckpt.testing import Fail, FaultyStorage, Kill, Killed, MemoryStorage, Slow, matching

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


# ---- loss and corruption


# pytorch#191391: the error of a writer thread is lost, and the save reports success.
@pytest.mark.parametrize("background", [False, True])
def test_a_write_that_failed_on_a_thread_fails_the_save(background):
    def save(storage, state):
        options = {"threads": 4, "dedup": None, "chunk_bytes": 4096}
        if background:
            ck.async_save(storage, state, **options).wait(60)
        else:
            ck.save(storage, state, **options)

    state = {f"w{n}": torch.randn(100, 100) for n in range(6)}
    whole = FaultyStorage(MemoryStorage())
    save(whole, state)
    writes = sum(operation.kind == "write" for operation in whole.operations)
    for failing in range(writes):
        inner, count = MemoryStorage(), iter(range(writes))

        def plan(operation, count=count, failing=failing):
            return Fail(errno.EIO) if operation.kind == "write" and next(count) == failing else None

        storage = FaultyStorage(inner, plan)
        with pytest.raises(StorageError):
            save(storage, state)
        assert steps(inner) == []


# pytorch#144657, Lightning#20953: training that goes on changes what an asynchronous save writes.
def test_training_that_goes_on_does_not_change_what_is_saved():
    inner, gate = MemoryStorage(), Gate()
    model = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train():
        model(torch.ones(2, 60)).square().sum().backward()
        optimizer.step()

    train()
    counts = {"tokens": torch.tensor([5]), "seen": [1, 2]}
    state = {"model": model, "optimizer": optimizer, "counts": counts}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    momentum = [value["momentum_buffer"].clone() for value in optimizer.state_dict()["state"].values()]
    handle = ck.async_save(FaultyStorage(inner, gate.plan()), state)
    assert gate.reached.wait(60)
    train()
    counts["tokens"] += 1
    counts["seen"].append(3)
    gate.opened.set()
    handle.wait(60)
    loaded = ck.load_dict(inner)
    assert all(same(loaded["model"][key], before[key]) for key in before)
    assert not same(model.state_dict()["0.weight"], before["0.weight"])
    for number, value in enumerate(momentum):
        assert same(loaded["optimizer"]["state"][number]["momentum_buffer"], value)
    assert loaded["counts"] == {"tokens": torch.tensor([5]), "seen": [1, 2]}


# pytorch#144657 again, with memory that torch does not own.
def test_an_array_that_changes_does_not_change_what_is_saved():
    numpy = pytest.importorskip("numpy")
    inner, gate, array = MemoryStorage(), Gate(), numpy.arange(5000.0)
    handle = ck.async_save(FaultyStorage(inner, gate.plan()), {"a": array})
    assert gate.reached.wait(60)
    array[:] = -1
    gate.opened.set()
    handle.wait(60)
    assert numpy.array_equal(ck.load_dict(inner)["a"], numpy.arange(5000.0))


# NeMo#8295, #7952, #14994: a save that was preempted looks like a checkpoint, or stands in the way for ever.
@pytest.mark.parametrize("name", ["manifest.json", "COMMIT"])
def test_a_preempted_save_is_no_checkpoint_and_in_nobodys_way(name):
    inner = MemoryStorage()
    ck.save(inner, {"w": torch.ones(1000)}, step=1)
    with pytest.raises(Killed):
        ck.save(FaultyStorage(inner, matching(Kill(), kind="put", name=name)), {"w": torch.zeros(1000)}, step=2)
    left = {path for path in inner.files() if "/00000002-" in path}
    assert left
    assert steps(inner) == [1]
    target = {"w": torch.zeros(1000)}
    assert ck.Checkpointer(inner).restore(target) == 1
    assert target["w"].sum() == 1000
    ck.save(inner, {"w": torch.full((1000,), 2.0)}, step=2)
    assert steps(inner) == [1, 2]
    ck.gc(inner, grace=0.0, break_leases=True)
    assert not left & inner.files().keys()
    assert ck.verify(inner, "all").ok


# NeMo Automodel#3254: the folder that a dead save has left makes the next one fail.
def test_a_folder_with_leftovers_of_the_step_is_not_touched_or_mixed_with_the_new_one(tmp_path):
    left = tmp_path / "steps" / "00000005-0123abcd"
    for file in ("data/w00000-0.pack", "index/w00000.json", "manifest.json"):
        (left / file).parent.mkdir(parents=True, exist_ok=True)
        (left / file).write_bytes(b"junk")
    info = ck.save(tmp_path, {"w": torch.ones(1000)}, step=5)
    assert left.name not in info.folder
    assert (left / "manifest.json").read_bytes() == b"junk"
    assert ck.load_dict(tmp_path, step=5)["w"].sum() == 1000


# torchtitan#4011, safetensors#220, vllm#53537: bits that flip on the way are loaded.
@pytest.mark.parametrize(("layout", "compress"), [("packed", None), ("packed", "auto"), ("plain", None)])
def test_flipped_bits_are_not_loaded(layout, compress):
    storage, state = MemoryStorage(), {"first": torch.randn(3000), "second": torch.randn(3000)}
    ck.save(storage, state, layout=layout, compress=compress)
    (data,) = [path for path in storage.files() if "/data/" in path]
    good, named = storage.files()[data], set()
    last = 8 * len(good) - 1
    for bit in range(last, last - 8 * 20000, -8 * 1999):  # from the end, as a safetensors file begins with a header
        storage.flip(data, bit)
        with pytest.raises(CorruptionError) as caught:
            ck.load_dict(storage)
        named |= set(caught.value.tensors)
        storage.flip(data, bit)
    assert named == {"first", "second"}
    assert storage.files()[data] == good


# pytorch#187138: another dtype is converted without a word; 70000 becomes infinity.
def test_another_dtype_is_no_silent_conversion():
    storage, target = MemoryStorage(), {"w": torch.zeros(2, dtype=torch.float16)}
    ck.save(storage, {"w": torch.tensor([1.0, 70000.0])})
    with pytest.raises(MismatchError, match=r"w: float16, in the checkpoint float32.*cast=True"):
        ck.load(storage, target)
    assert target["w"].tolist() == [0, 0]
    assert ck.load(storage, target, cast=True).cast == ("w",)
    assert target["w"].tolist() == [1, float("inf")]


# Megatron-LM#2288: buffers are used again before they are written.
def test_host_buffers_are_not_used_again_before_they_are_written():
    pool, gate, slow, fast = ck.StagingPool(), Gate(), MemoryStorage("testing://slow"), MemoryStorage("testing://fast")
    first, second = torch.full((100000,), 1.0), torch.full((100000,), 2.0)
    handle = ck.async_save(FaultyStorage(slow, gate.plan()), {"w": first}, pool=pool)
    assert gate.reached.wait(60)
    ck.async_save(fast, {"w": second}, pool=pool).wait(60)
    gate.opened.set()
    handle.wait(60)
    assert bool((ck.load_dict(slow)["w"] == 1).all())
    assert bool((ck.load_dict(fast)["w"] == 2).all())


# Megatron-LM#2288, where the save fails: what it held comes back to the pool, once.
def test_a_failed_save_gives_its_buffers_back():
    pool = ck.StagingPool()
    for _ in range(3):
        storage = FaultyStorage(MemoryStorage(), matching(Fail(errno.EIO), kind="write"))
        with pytest.raises(StorageError):
            ck.async_save(storage, {"w": torch.ones(100000)}, pool=pool).wait(60)
    assert pool.stats().used == 0
    assert pool.stats().fresh == 1


class Wrapped(torch.Tensor):
    """A tensor whose elements are not those of its memory, as float8 wrappers are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


# TransformerEngine#2721: the inner bytes of wrappers are saved as if they were the elements.
def test_wrappers_that_nobody_knows_are_refused():
    storage = MemoryStorage()
    with pytest.raises(StateError, match=r"model\.w.*Wrapped"):
        ck.save(storage, {"model": {"w": Wrapped(torch.ones(3, dtype=torch.int8))}})
    assert steps(storage) == []


# nvidia-resiliency-ext#365: what makes a checkpoint valid is written in place, and not last.
@pytest.mark.parametrize("random_write", [True, False], ids=["files", "objects"])
def test_the_commit_is_written_last_and_never_in_place_of_another(random_write):
    exclusive = []

    class Watched(MemoryStorage):
        def put(self, path, data, **options):
            exclusive.extend([path] if options.get("exclusive") else [])
            super().put(path, data, **options)

    storage = FaultyStorage(Watched(random_write=random_write))
    for _ in range(2):
        begin = storage.count
        folder = ck.save(storage, {"w": torch.randn(5000)}, step=3, overwrite=True).folder
        done = [(o.kind, o.path) for o in storage.operations[begin:] if o.kind in ("create", "write", "close", "put")]
        assert done[-1] == ("put", f"{folder}/COMMIT")
        assert f"{folder}/COMMIT" in exclusive
        written = [path for kind, path in done if kind in ("create", "put") and not path.endswith("LEASE")]
        assert len(written) == len(set(written))
    assert len(list(storage.inner.list("steps"))) == 2


# awsome-distributed-ai#1225, torchforge#568: a full disk is told as "unexpected pos 704 vs 598".
def test_a_full_disk_is_told_as_such_and_partial_files_go(tmp_path):
    ck.save(tmp_path, {"w": torch.ones(1000)}, step=1)
    before = sorted(tmp_path.rglob("*"))
    storage = FaultyStorage(open_storage(tmp_path), matching(Fail(errno.ENOSPC, part=0.5), kind="write"))
    with pytest.raises(StorageError, match=r"00000002-.*\.pack.*the disk is full") as caught:
        ck.save(storage, {"w": torch.zeros(300000)}, step=2)
    assert caught.value.errno == errno.ENOSPC
    assert "600000 more bytes" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert ck.load_dict(tmp_path)["w"].sum() == 1000


# ---- retention


# accelerate total_limit: old checkpoints go before the new one is there.
def test_old_steps_stay_until_a_newer_one_is_committed():
    inner = MemoryStorage()
    with ck.Checkpointer(inner, keep=1) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1000)})
    storage = FaultyStorage(inner, matching(Fail(errno.EIO), kind="write"))
    with pytest.raises(StorageError), ck.Checkpointer(storage, keep=1) as checkpointer:
        checkpointer.save(2, {"w": torch.zeros(1000)})
    assert steps(inner) == [1]
    assert ck.load_dict(inner)["w"].sum() == 1000
    storage = FaultyStorage(inner)
    with ck.Checkpointer(storage, keep=1) as checkpointer:
        checkpointer.save(3, {"w": torch.zeros(1000)})
    done = [(o.kind, o.path.rpartition("/")[2], o.path[6:14]) for o in storage.operations]
    assert done.index(("put", "COMMIT", "00000003")) < done.index(("remove", "COMMIT", "00000001"))
    assert steps(inner) == [3]


# torchtitan#4420: some checkpoints must not go.
def test_a_pinned_step_stays():
    storage = MemoryStorage()
    with ck.Checkpointer(storage, keep=1, async_=False) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(1000)})
        ck.pin(storage, 1)
        for step in (2, 3, 4):
            checkpointer.save(step, {"w": torch.zeros(1000)})
            checkpointer.wait()
    assert ck.load_dict(storage, step=1)["w"].sum() == 1000
    assert 2 not in steps(storage)


# ---- code


# DCP, DeepSpeed, accelerate: a checkpoint can run code.
def test_nothing_unpickles(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("something was unpickled")

    storage = MemoryStorage()
    state = {"w": torch.randn(300), "o": [1, (2,), {3}], "own": ck.local(torch.get_rng_state()), "d": torch.bfloat16}
    for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    ck.save(storage, state)
    assert ck.load_dict(storage)["d"] is torch.bfloat16
    assert ck.verify(storage).ok
    ck.load(storage, {**state, "w": torch.zeros(300)})


def test_the_source_has_no_way_to_run_what_a_file_says():
    root = pathlib.Path(ck.__file__).parent
    files = sorted(root.rglob("*.py"))
    assert len(files) > 50
    for file in files:
        forbidden = {"marshal", "shelve", "cloudpickle", "dill", "pickle", "_pickle", "copyreg"}
        if "_interop" in file.relative_to(root).parts:  # other formats are pickles; to write one runs nothing
            forbidden.remove("pickle")
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [(node.module or "").partition(".")[0]]
                assert names != ["pickle"], (file, node.lineno)  # so that the calls below can be told
            assert not forbidden & set(names), (file, names)
            if isinstance(node, ast.Call):
                text = ast.unparse(node.func)
                assert text not in ("eval", "exec", "compile", "__import__"), (file, node.lineno)
                assert text not in ("pickle.load", "pickle.loads", "pickle.Unpickler"), (file, node.lineno)
                if text == "torch.load":
                    arguments = {word.arg: ast.unparse(word.value) for word in node.keywords}
                    assert arguments.get("weights_only") == "True", (file, node.lineno)
            if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
                assert "find_class" in [getattr(item, "name", "") for item in node.body], (file, node.lineno)
