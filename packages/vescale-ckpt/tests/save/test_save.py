"""save and async_save in one process, against the state that was saved."""

import itertools
import math

import pytest
import torch
from safetensors.torch import load_file

import vescale_ckpt as ck
from vescale_ckpt._save.base import forget
from vescale_ckpt.testing import Fail, FaultyStorage, MemoryStorage, matching

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64,
    torch.complex128, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
]  # fmt: skip


def of_bits(dtype, *shape):
    """Return a tensor with any bits, NaNs and denormals among them."""
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return raw.remainder_(2).view(torch.bool).view(shape) if dtype == torch.bool else raw.view(dtype).view(shape)


def bits(tensor):
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def back(storage, state, **options):
    ck.save(storage, state, **options)
    return ck.load_dict(storage)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"compress": None, "dedup": None}, {"layout": "plain"}, {"dedup": "content"}])
def test_every_dtype_comes_back_bit_for_bit(dtype, options):
    state = {str(shape): of_bits(dtype, *shape) for shape in [(), (0,), (3, 0, 2), (5,), (37, 91), (2, 3, 1, 5)]}
    loaded = back(MemoryStorage(), state, **options)
    assert list(loaded) == list(state)
    assert all(same(loaded[key], state[key]) for key in state)


VIEWS = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(7, -1),
    "flipped": lambda x: x.flip(0),
    "offset": lambda x: x[3:, 5:],
    "channels last": lambda x: x[:30, :40].reshape(2, 3, 5, 40).contiguous(memory_format=torch.channels_last),
    "parameter": lambda x: torch.nn.Parameter(x),
    "requires grad": lambda x: x.clone().requires_grad_() * 2,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("save", [ck.save, lambda *a, **k: ck.async_save(*a, **k).wait()], ids=["sync", "async"])
def test_views(view, save):
    storage, tensor = MemoryStorage(), VIEWS[view](torch.randn(300, 400))
    save(storage, {"w": tensor})
    assert same(ck.load_dict(storage)["w"], tensor)


def test_conjugated_and_negative_views():
    z = torch.randn(50, 60, dtype=torch.complex64)
    state = {"conj": z.conj(), "neg": z.conj().imag, "both": z.t().conj()}
    loaded = back(MemoryStorage(), state)
    assert all(same(loaded[key], state[key]) for key in state)


def test_steps_are_numbered_and_kept_apart():
    storage = MemoryStorage()
    for value in (1.0, 2.0, 3.0):
        ck.save(storage, {"w": torch.full((5000,), value)})
    assert [ck.load_dict(storage, step=step)["w"][0].item() for step in (0, 1, 2)] == [1.0, 2.0, 3.0]
    assert ck.save(storage, {"w": torch.zeros(1)}, step=100).step == 100
    assert ck.save(storage, {"w": torch.zeros(1)}).step == 101


def test_a_step_is_saved_again_only_if_asked():
    storage = MemoryStorage()
    ck.save(storage, {"w": torch.zeros(3)}, step=5)
    with pytest.raises(ck.CheckpointError, match=r"step: 5 is in .* already"):
        ck.save(storage, {"w": torch.ones(3)}, step=5)
    assert ck.load_dict(storage, step=5)["w"].tolist() == [0, 0, 0]
    ck.save(storage, {"w": torch.ones(3)}, step=5, overwrite=True)
    assert ck.load_dict(storage, step=5)["w"].tolist() == [1, 1, 1]


def test_what_did_not_change_is_not_written_again():
    storage, state = MemoryStorage(), {f"w{i}": torch.randn(512, 1024) for i in range(8)}
    first = ck.save(storage, state, compress=None)
    state["w3"][100, 7] += 1
    state["w5"] = state["w5"] * 2
    second = ck.save(storage, state, compress=None)
    assert first.bytes_reused == 0
    # w3 has two chunks of 1 MiB, of which one changed; both of w5 did.
    assert second.bytes_reused == second.bytes_total - 3 * 2**20
    assert 3 * 2**20 <= second.bytes_written < 3 * 2**20 + 20000
    loaded = ck.load_dict(storage)
    assert all(same(loaded[key], state[key]) for key in state)


def test_references_go_to_the_file_that_holds_the_bytes():
    storage, state = MemoryStorage(), {"w": torch.randn(300, 1024), "step": 0}
    for state["step"] in range(5):
        ck.save(storage, state)
    packs = [path for path in storage.files() if path.endswith(".pack")]
    assert len(packs) == 1
    assert ck.load_dict(storage)["step"] == 4
    assert same(ck.load_dict(storage)["w"], state["w"])


def test_a_new_process_refers_to_the_step_on_storage(tmp_path):
    state = {"w": torch.randn(300, 1024)}
    ck.save(tmp_path, state, fsync=False)
    forget()
    assert ck.save(tmp_path, state, fsync=False).bytes_reused == 300 * 1024 * 4


def test_equal_content_is_stored_once():
    storage, block = MemoryStorage(), torch.randn(256, 1024)
    state = {"a": block, "b": block.clone(), "c": torch.randn(256, 1024)}
    info = ck.save(storage, state, dedup="content")
    assert info.bytes_reused == 2**20
    assert len([path for path in storage.files() if path.startswith("chunks/")]) == 2
    assert ck.save(storage, {"z": block}, dedup="content").bytes_reused == 2**20
    assert same(ck.load_dict(storage)["z"], block)


def test_a_shared_chunk_that_no_longer_says_how_it_is_encoded_is_not_referred_to():
    storage, block = MemoryStorage(), torch.randn(256, 1024)
    ck.save(storage, {"a": block}, step=1, dedup="content")
    (path,) = [path for path in storage.files() if path.startswith("chunks/")]
    storage.flip(path, 0)
    with pytest.raises(ck.FormatError, match=rf"{path}: .* not known here"):
        ck.save(storage, {"a": block}, step=2, dedup="content")
    assert same(ck.load_dict(storage)["a"], block)
    assert ck.save(storage, {"a": block}, step=2, dedup=None).bytes_reused == 0
    assert same(ck.load_dict(storage)["a"], block)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.84), (torch.bfloat16, 0.68)])
def test_weights_are_compressed(dtype, most):
    weights = (torch.randn(1024, 1024) * 0.02).to(dtype)
    info = ck.save(MemoryStorage(), {"w": weights}, compress="auto")
    assert info.bytes_written <= most * info.bytes_total


def test_noise_is_not():
    noise = of_bits(torch.int32, 512, 512)
    info = ck.save(MemoryStorage(), {"w": noise}, compress="auto")
    assert info.bytes_total <= info.bytes_written < info.bytes_total + 4000


def test_plain_files_are_safetensors(tmp_path):
    state = {"m": {"w": torch.randn(70, 90), "b": torch.randn(300, dtype=torch.bfloat16)}, "c": torch.arange(500)}
    ck.save(tmp_path, state, layout="plain", fsync=False)
    (file,) = tmp_path.glob("steps/*/data/*.safetensors")
    loaded = load_file(file)
    assert same(loaded["m.w"], state["m"]["w"])
    assert same(loaded["m.b"], state["m"]["b"])
    assert same(loaded["c"], state["c"])


def test_tied_tensors_are_stored_once_and_come_back_tied():
    w = torch.randn(500, 1000)
    state = {"a": w, "b": {"again": w}, "view": w[:100]}
    storage = MemoryStorage()
    assert ck.save(storage, state).bytes_total == w.nbytes + w[:100].nbytes
    loaded = ck.load_dict(storage)
    assert loaded["a"] is loaded["b"]["again"]
    assert same(loaded["view"], w[:100])


def test_async_saves_what_was_there_at_the_call():
    storage, w = MemoryStorage(), torch.zeros(3000, 1000)
    handles = []
    for step in range(4):
        w.fill_(step)
        handles.append(ck.async_save(storage, {"w": w, "step": step}, step=step))
        w.fill_(-1)
    assert [handle.wait(60).step for handle in handles] == [0, 1, 2, 3]
    for step in range(4):
        assert bool((ck.load_dict(storage, step=step)["w"] == step).all())


def test_a_handle_tells_how_far_it_is():
    handle = ck.async_save(MemoryStorage(), {"w": torch.zeros(100, 100)})
    info = handle.wait(60)
    progress = handle.progress()
    assert handle.done()
    assert handle.exception() is None
    assert (progress.phase, progress.bytes_done, progress.bytes_total) == ("done", 40000, 40000)
    assert progress.fraction == 1.0
    assert {"plan", "stage", "write", "commit", "blocked"} <= info.seconds.keys()


def test_an_error_in_the_background_is_raised_by_wait():
    storage = FaultyStorage(MemoryStorage(), matching(Fail(28), kind="write"))
    handle = ck.async_save(storage, {"w": torch.randn(1000, 1000)})
    with pytest.raises(ck.StorageError, match="disk is full"):
        handle.wait(60)
    assert isinstance(handle.exception(), ck.StorageError)
    assert ck.save(storage, {"w": torch.randn(10, 10)}).step == 0  # it was told; the next save goes


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call():
    storage = FaultyStorage(MemoryStorage(), matching(Fail(28), kind="write"))
    ck.async_save(storage, {"w": torch.randn(1000, 1000)})
    with pytest.raises(ck.StorageError, match="disk is full"):
        ck.async_save(storage, {"w": torch.randn(10, 10)})
    assert ck.async_save(storage, {"w": torch.randn(10, 10)}).wait(60).step == 0


def test_a_failed_save_leaves_nothing_and_earlier_steps_load():
    inner, w = MemoryStorage(), torch.randn(1000, 1000)
    ck.save(inner, {"w": w}, step=1)
    before = inner.files()
    with pytest.raises(ck.StorageError):
        ck.save(FaultyStorage(inner, matching(Fail(5), kind="write")), {"w": w + 1}, step=2)
    assert inner.files() == before
    assert same(ck.load_dict(inner)["w"], w)


@pytest.mark.parametrize("save", [ck.save, ck.async_save])
def test_a_save_that_fails_before_it_writes_leaves_nothing(save):
    class Empty(ck.StagingPool):
        def take(self, nbytes):
            raise MemoryError(f"no {nbytes} bytes")

    storage = MemoryStorage()
    with pytest.raises(MemoryError):
        save(storage, {"w": torch.zeros(1000).expand(3, 1000)}, pool=Empty())
    assert list(storage.files()) == ["vckpt.json"]


def test_no_lease_stays():
    storage = MemoryStorage()
    ck.save(storage, {"w": torch.zeros(10)})
    assert not [path for path in storage.files() if path.endswith("LEASE")]


def test_metadata_is_kept():
    storage = MemoryStorage()
    ck.save(storage, {}, metadata={"loss": 2.5, "tags": ["a", None]})
    assert ck.open(storage).metadata == {"loss": 2.5, "tags": ["a", None]}


def test_values_of_all_kinds_come_back():
    state = {
        "int": 3, "big": 2**100, "float": 0.1, "inf": float("inf"), "text": "a\n\u00e9", "none": None, "yes": True,
        "bytes": b"\x00\xff", "complex": 1 + 2j, "list": [1, [2, "x"], ()], "tuple": (1, (2,)), "set": {1, 2},
        "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "dict": {1: "a", "b": 2},
        "empty": {}, "nested": {"deep": {"er": torch.arange(3)}},
    }  # fmt: skip
    loaded = back(MemoryStorage(), state)
    assert loaded.pop("nested")["deep"]["er"].tolist() == [0, 1, 2]
    del state["nested"]
    assert loaded == state
    assert [type(value) for value in loaded.values()] == [type(value) for value in state.values()]


def test_many_scalars_are_cheap():
    # DCP keeps about 1750 bytes of each.
    storage, count = MemoryStorage(), 2000
    state = {f"opt.state.{i}.step": torch.tensor(float(i)) for i in range(count)}
    ck.save(storage, state)
    assert sum(map(len, storage.files().values())) <= 150 * count
    loaded = ck.load_dict(storage)
    assert all(same(loaded[key], state[key]) for key in state)


@pytest.mark.parametrize("random_write", [True, False])
def test_data_files_have_a_bound(random_write):
    storage, state = MemoryStorage(random_write=random_write), {str(i): torch.randn(256, 1024) for i in range(5)}
    ck.save(storage, state, compress=None, file_bytes=2 * 2**20)
    assert sorted(len(data) for path, data in storage.files().items() if ".pack" in path) == [2**20, 2**21, 2**21]
    loaded = ck.load_dict(storage)
    assert all(same(loaded[key], state[key]) for key in state)


def test_all_options_can_read_each_other():
    storage, state = MemoryStorage(), {"w": torch.randn(600, 700), "b": torch.randn(300).bfloat16()}
    for compress, dedup in itertools.product(["auto", None, "zstd", "planes"], ["position", "content", None]):
        ck.save(storage, state, compress=compress, dedup=dedup)
        loaded = ck.load_dict(storage)
        assert all(same(loaded[key], state[key]) for key in state), (compress, dedup)
    assert ck.verify(storage, "all").ok
