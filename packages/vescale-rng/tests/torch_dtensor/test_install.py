"""install, uninstall and single_device leave torch exactly as it was, count, and check what they need."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed.tensor._api as api
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale_rng._torch_dtensor import install, installed, single_device, uninstall
from vescale_rng.errors import AgreementError, RandomError
from vescale_testing import cached_mesh, fake_ranks

DISPATCHER = DTensor._op_dispatcher
UNIFORM = torch.ops.aten.uniform_.default
NAMES = [(api, "_dtensor_init_helper")] + [
    (torch.nn.init, name) for name in ("_no_grad_trunc_normal_", "dirac_", "eye_", "orthogonal_", "sparse_")
]
NAMES += [(kind, "_fill_padding_idx_with_zero") for kind in (torch.nn.Embedding, torch.nn.EmbeddingBag)]


def _everything():
    return (
        DISPATCHER._custom_op_handlers,
        list(DISPATCHER._custom_op_handlers.items()),
        [getattr(module, name) for module, name in NAMES],
    )


def test_uninstall_puts_back_exactly_what_was_there():
    table, entries, functions = _everything()
    install()
    assert DISPATCHER._custom_op_handlers is table
    assert UNIFORM in table
    assert not any(a is b for a, b in zip(_everything()[2], functions, strict=True))
    uninstall()
    assert DISPATCHER._custom_op_handlers is table
    assert list(table.items()) == entries
    assert all(a is b for a, b in zip(_everything()[2], functions, strict=True))


def test_a_handler_that_was_there_before_comes_back(monkeypatch):
    def theirs(op, args, kwargs):
        return args[0]

    monkeypatch.setitem(DISPATCHER._custom_op_handlers, UNIFORM, theirs)
    with single_device():
        assert DISPATCHER._custom_op_handlers[UNIFORM] is not theirs
    assert DISPATCHER._custom_op_handlers[UNIFORM] is theirs


def test_a_handler_put_in_meanwhile_stays(monkeypatch):
    def theirs(op, args, kwargs):
        return args[0]

    with single_device():
        DISPATCHER._custom_op_handlers[UNIFORM] = theirs
    assert DISPATCHER._custom_op_handlers.pop(UNIFORM) is theirs


def test_levels_are_counted():
    before = _everything()
    assert not installed()
    install()
    install()
    with single_device():
        uninstall()
        assert installed()
    assert installed()
    uninstall()
    assert not installed()
    assert _everything() == before
    with pytest.raises(RandomError, match="not installed"):
        uninstall()


def test_single_device_as_a_decorator_and_after_an_error():
    @single_device()
    def step(depth):
        if depth:
            return step(depth - 1)
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        step(2)
    assert not installed()


def test_decorator_without_parentheses():
    @single_device
    def step(x, *, y=1):
        return installed(), x, y

    assert step.__name__ == "step"
    assert step(2, y=3) == (True, 2, 3)
    assert not installed()


def test_functions_that_go_on_after_their_call_are_refused():
    async def waiting():
        return installed()

    def yielding():
        yield installed()

    async def both():
        yield installed()

    for function in (waiting, yielding, both):
        for decorate in (single_device, single_device(), single_device(check=False)):
            with pytest.raises(TypeError, match=rf"{function.__name__} is a generator or an async.*with single_device"):
                decorate(function)
    with pytest.raises(TypeError, match="decorates functions, but got False"):
        single_device(False)


def test_one_object_many_times():
    before = _everything()
    block = single_device()
    with block, block:
        with block:
            assert installed()
        assert installed()
    assert not installed()
    with block:
        assert installed()
    assert _everything() == before


def test_uninstall_within_a_block_does_not_hide_the_error_of_its_body():
    before = _everything()

    @single_device
    def step():
        uninstall()
        assert not installed()
        raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        step()
    with single_device():
        uninstall()
        install()  # is not the block's to take back
    assert installed()
    uninstall()
    assert _everything() == before


def test_threads_may_install_at_once():
    before = _everything()

    def work():
        for _ in range(50):
            with single_device():
                assert installed()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _everything() == before


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (DISPATCHER, "_custom_op_handlers"),
        (type(DISPATCHER), "_dispatch_get_local_results_slow_path"),
        (api, "_dtensor_init_helper"),
        (torch.nn.init, "_no_grad_trunc_normal_"),
        (torch.nn.init, "eye_"),
        (torch.nn.Embedding, "_fill_padding_idx_with_zero"),
        (torch._C, "_dispatch_get_all_op_names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_torch_that_lacks_something_is_named(monkeypatch, owner, name):
    functions = [getattr(module, each) for module, each in NAMES if each != name]
    monkeypatch.delattr(owner, name)
    with pytest.raises(RandomError, match=rf"torch {torch.__version__.split('+')[0]}.*{name}"):
        install()
    assert not installed()
    monkeypatch.undo()
    assert [getattr(module, each) for module, each in NAMES if each != name] == functions
    assert UNIFORM not in DISPATCHER._custom_op_handlers


def test_places_live_no_longer_than_their_specs():
    from vescale_rng._torch_dtensor.places import _places

    with fake_ranks(2), single_device():
        mesh = init_device_mesh("cpu", (2,))
        for _ in range(3):
            x = distribute_tensor(torch.rand(6, 4), mesh, [Shard(0)], src_data_rank=None)
            torch.rand_like(x.uniform_()).normal_()
        assert len(_places) == 2
        del x
        assert not _places


def test_fake_groups_are_not_asked_whether_they_agree():
    with fake_ranks(8, rank=3), single_device():
        x = distribute_tensor(torch.empty(16, 4), init_device_mesh("cpu", (8,)), [Shard(0)], src_data_rank=None)
        torch.manual_seed(1)
        x.uniform_()
        torch.manual_seed(1)
        assert torch.equal(x.to_local(), torch.rand(16, 4)[6:8])


@pytest.mark.ranks(2)
def test_seeds_that_differ_are_found_at_the_first_draw(rank):
    mesh = cached_mesh(2)
    x = distribute_tensor(torch.empty(6, 4), mesh, [Shard(0)], src_data_rank=None)
    torch.manual_seed(rank)
    before = torch.get_rng_state()
    with single_device():
        for function in (lambda: x.uniform_(), lambda: torch.rand_like(x), lambda: torch.poisson(x)):
            with pytest.raises(AgreementError, match="Seeds differ"):
                function()
            assert torch.equal(torch.get_rng_state(), before)
    with single_device(check=False):
        x.uniform_()
    with single_device():
        torch.manual_seed(0)
        x.uniform_()
        torch.manual_seed(rank)
        x.uniform_()  # once per mesh
        with pytest.raises(AgreementError, match="Seeds differ"):
            x.uniform_(generator=torch.Generator().manual_seed(rank))
        with single_device():
            x.uniform_()  # still the same installation


@pytest.mark.ranks(2, pool=True)
def test_factories_imported_before(world):
    from torch.distributed.tensor import rand, randn, zeros

    mesh = cached_mesh(world)
    with single_device():
        for function, plain in ((rand, torch.rand), (randn, torch.randn)):
            for size in ((7, 5), (3,), ()):
                for placements in ([Shard(0)], None) if size else (None,):
                    torch.manual_seed(4)
                    got = function(size, device_mesh=mesh, placements=placements, dtype=torch.float64)
                    state = torch.get_rng_state()
                    torch.manual_seed(4)
                    assert torch.equal(got.full_tensor(), plain(size, dtype=torch.float64))
                    assert torch.equal(torch.get_rng_state(), state)
        leaf = rand(7, 5, device_mesh=mesh, placements=[Shard(1)], requires_grad=True)
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert zeros(4, device_mesh=mesh).full_tensor().sum() == 0
