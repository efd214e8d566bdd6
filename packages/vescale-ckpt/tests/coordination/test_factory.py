"""Who the ranks are: of real groups, of a store, alone, or nobody with a reason."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import vescale_ckpt as ck
from vescale_ckpt._coordination import Alone, StoreMembers, coordinator
from vescale_ckpt.errors import RanksError


def test_without_torch_distributed_a_process_is_alone() -> None:
    assert isinstance(coordinator(), Alone)


@pytest.mark.parametrize("world", ["2", "128"])
def test_a_rank_of_a_launcher_that_joined_no_group_is_told(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RanksError, match=rf"WORLD_SIZE={world}, RANK=1, .*Call torch\.distributed\.init_process_group"):
        coordinator()
    # Who says who it is needs no group.
    assert coordinator(store=dist.HashStore(), rank=0, world=1).world == 1


@pytest.mark.parametrize("world", ["1", "0", "", "many"])
def test_one_rank_of_a_launcher_is_alone(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    assert isinstance(coordinator(), Alone)


def test_all_that_works_together_needs_the_group_and_reading_alone_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    state = {"w": torch.ones(2)}
    ck.save(tmp_path, state, step=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    checkpointer = ck.Checkpointer(tmp_path)
    for call in (
        lambda: ck.save(tmp_path, state, step=2),
        lambda: ck.async_save(tmp_path, state, step=2),
        lambda: ck.load(tmp_path, state),
        lambda: ck.reshard(state, {"w": torch.zeros(2)}),
        lambda: checkpointer.save(2, state),
        lambda: checkpointer.restore(state, missing_ok=True),
    ):
        with pytest.raises(RanksError, match="init_process_group"):
            call()
    assert checkpointer.steps() == [1]
    assert ck.load_dict(tmp_path)["w"].tolist() == [1, 1]
    with ck.open(tmp_path) as checkpoint:
        assert checkpoint["w"][0] == 1
    assert ck.verify(tmp_path).ok
    assert ck.gc(tmp_path).kept == [1]


def test_a_store_makes_members() -> None:
    members = coordinator(store=dist.HashStore(), rank=1, world=3, timeout=2.0)
    assert isinstance(members, StoreMembers)
    assert (members.rank, members.world, members.ranks, members.timeout) == (1, 3, (0, 1, 2), 2.0)
    assert isinstance(coordinator(store=dist.HashStore(), rank=0, world=1), Alone)


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"world": 2}, {"rank": 2, "world": 2}, {"rank": -1, "world": 2}])
def test_numbers_of_members_are_checked(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs rank and world, with rank below world"):
        coordinator(store=dist.HashStore(), **arguments)
    with pytest.raises(ValueError, match="without a store"):
        coordinator(**arguments)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_the_timeout_is_checked(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout: expected a number of seconds above 0"):
        coordinator(timeout=timeout)


def test_a_store_alone_needs_a_group_to_say_who_is_there() -> None:
    with pytest.raises(RanksError, match="distributed is not initialized"):
        coordinator(store=dist.HashStore())


@pytest.mark.fake_ranks(4, ranks=[1])
def test_a_fake_group_cannot_agree(rank: int) -> None:
    with pytest.raises(RanksError, match="its backend is 'fake', which has no store that its 4 ranks share"):
        coordinator()
    members = coordinator(store=dist.HashStore())
    assert (members.rank, members.ranks) == (1, (0, 1, 2, 3))
    with pytest.raises(RanksError, match="a FakeStore keeps nothing"):
        coordinator(store=FakeStore())
    with pytest.raises(ValueError, match="process_group: it knows rank and world"):
        coordinator(dist.group.WORLD, store=dist.HashStore(), rank=0, world=1)


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told() -> None:
    members = coordinator(store=dist.HashStore(), rank=0, world=2)
    talk = members.session("save")
    child = os.fork()
    if not child:
        told = []
        for call in (lambda: members.session("load"), lambda: talk.broadcast("x", b"")):
            try:
                call()
            except RanksError as error:
                told.append("forked from process" in str(error))
        os._exit(7 if told == [True, True] else 8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def start_a_world(rank: int, world: int, folder: str, how: str) -> None:
    """Replace the harness's group by one that is made in another way."""
    dist.destroy_process_group()
    if how == "file":
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        return
    port_file = f"{folder}/port"
    files = dist.FileStore(f"{folder}/ports", world)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
        files.set(port_file, str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get(port_file)), world, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("how", ["harness", "file", "tcp"])
def test_groups_of_real_ranks(rank: int, world: int, how: str, tmp_path: Any) -> None:
    if how != "harness":
        start_a_world(rank, world, str(tmp_path), how)
    everyone = coordinator(timeout=20.0)
    assert (everyone.rank, everyone.ranks) == (rank, (0, 1, 2, 3))
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    pair = coordinator(mine, timeout=20.0)
    assert (pair.rank, pair.ranks) == (rank // 2, (rank % 2, rank % 2 + 2))
    with pytest.raises(RanksError, match="not in the group"):
        coordinator(other)

    # One save in the background over all ranks, while pairs load and training communicates.
    results: list[Any] = []

    def save(talk: Any) -> None:
        with talk:
            results.append(talk.agree("start", b"%d" % rank, b"".join))
            results.append(talk.gather("written", b"%d" % rank))

    thread = threading.Thread(target=save, args=(everyone.session("save"),))
    thread.start()
    for number in range(3):
        with pair.session("load") as talk:
            assert talk.agree("keys", b"%d" % rank, b"+".join) == (b"1+3" if rank % 2 else b"0+2")
        total = torch.tensor(float(number))
        dist.all_reduce(total)
        assert total.item() == 4 * number
    thread.join(30)
    assert results == [b"0123", [b"0", b"1", b"2", b"3"] if rank == 0 else None]

    dist.destroy_process_group()
    with pytest.raises(RanksError, match="was destroyed"):
        everyone.session("save")
    with pytest.raises(RanksError, match="not initialized, or was destroyed"):
        coordinator(mine)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("killed", [0, 2])
def test_a_killed_rank_is_named_by_the_others(rank: int, world: int, killed: int, tmp_path: Any) -> None:
    """Rank `killed` forks a member that dies in the middle of a save; the rank itself only looks on."""
    everyone = coordinator(timeout=20.0)
    if rank == killed:
        child = os.fork()
        if not child:
            # A process of its own, with a connection of its own: what the dead rank would have been.
            store = dist.FileStore(str(tmp_path / "store"), world)
            with coordinator(store=store, rank=rank, world=world, timeout=20.0).session("save") as talk:
                talk.agree("start", b"", b"".join)
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        store = dist.FileStore(str(tmp_path / "store"), world)
        with coordinator(store=store, rank=rank, world=world, timeout=20.0).session("save") as talk:
            talk.agree("start", b"", b"".join)
            talk._timeout = 0.5  # from here on: a fork may be slow to come
            with pytest.raises(RanksError, match=rf"for rank {killed} to come to it\. It died"):
                talk.gather("written", b"")
    with everyone.session("load") as talk:  # nothing else is harmed
        assert talk.agree("x", b"y", b"".join) == b"yyyy"


@pytest.mark.ranks(3)
@pytest.mark.parametrize("killed", [0, 2])
def test_over_a_tcp_store_a_killed_rank_is_named(rank: int, world: int, killed: int, tmp_path: Any) -> None:
    """As above, with sockets: rank 1 serves the store and lives on."""
    everyone = coordinator(timeout=20.0)
    files = dist.FileStore(str(tmp_path / "port"), world)
    if rank == 1:
        store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
        files.set("port", str(store.port))
    if rank == killed:
        child = os.fork()
        if not child:
            store = dist.TCPStore("127.0.0.1", int(files.get("port")), world, False)
            with coordinator(store=store, rank=rank, world=world, timeout=20.0).session("save") as talk:
                talk.agree("start", b"", b"".join)
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        if rank != 1:
            store = dist.TCPStore("127.0.0.1", int(files.get("port")), world, False)
        with coordinator(store=store, rank=rank, world=world, timeout=20.0).session("save") as talk:
            talk.agree("start", b"", b"".join)
            talk._timeout = 0.5
            with pytest.raises(RanksError, match=rf"for rank {killed} to come to it\. It died"):
                talk.agree("more", b"", b"".join)
    with everyone.session("load") as talk:  # and keeps the store until all are done
        talk.agree("done", b"", b"".join)


@pytest.mark.ranks(2)
def test_the_death_of_the_rank_that_serves_the_store_is_told(rank: int, world: int, tmp_path: Any) -> None:
    """Rank 0 forks a process that serves a TCPStore and is member 0, and dies without a word."""
    files = dist.FileStore(str(tmp_path / "port"), world)
    if rank == 0:
        child = os.fork()
        if not child:
            store = dist.TCPStore("127.0.0.1", 0, world, True, wait_for_workers=False)
            files.set("port", str(store.port))
            with coordinator(store=store, rank=0, world=2, timeout=20.0).session("save") as talk:
                talk.agree("start", b"", b"".join)
                os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    else:
        store = dist.TCPStore("127.0.0.1", int(files.get("port")), world, False)
        members = coordinator(store=store, rank=1, world=2, timeout=20.0)
        reason = "does not answer, so the process that serves it"
        with members.session("save") as talk, pytest.raises(RanksError, match=reason):
            talk_twice(talk)


def talk_twice(talk: Any) -> None:
    talk.agree("start", b"", b"".join)
    talk.agree("more", b"", b"".join)
