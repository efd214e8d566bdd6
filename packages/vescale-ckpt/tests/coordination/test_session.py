"""The protocol of a session, with threads as ranks: results, failures at every point, late members, no key left."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from vescale_ckpt._coordination import Coordinator, StoreMembers, session
from vescale_ckpt._coordination.frames import PART
from vescale_ckpt.errors import RanksError, StorageError

Outcome = Any
Body = Callable[[Coordinator], Any]


def hash_store() -> dist.Store:
    return dist.HashStore()


class Shared:
    """A store whose connection all members share.

    For speed: torch asks the resolver for the name of whoever connects, and on some machines that takes seconds.
    """

    def __init__(self, store: dist.Store) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        if name == "clone":
            raise AttributeError(name)
        return getattr(self.store, name)


def tcp_store() -> Shared:
    return Shared(dist.TCPStore("localhost", 0, 1, True))


def old_tcp_store() -> Shared:
    return Shared(dist.TCPStore("localhost", 0, 1, True, use_libuv=False))


def members_of(store: Any, world: int, *, timeout: float = 30.0, first: int = 0) -> list[StoreMembers]:
    ranks = tuple(range(first, first + world))
    return [StoreMembers(store, rank=rank, ranks=ranks, timeout=timeout) for rank in range(world)]


def run(members: list[StoreMembers], body: Body, kind: str = "save") -> list[Outcome]:
    """Run a body on all members and return what each returned or raised."""
    outcomes: list[Outcome] = [None] * len(members)

    def be(number: int) -> None:
        try:
            with members[number].session(kind) as talk:
                outcomes[number] = body(talk)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=be, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


class Clock:
    """Time that passes only when somebody sleeps, and only once all that come have gone to sleep.

    So no test depends on how soon the threads of its members start: when time begins to pass, each has said all
    that it has to say.
    """

    def __init__(self, come: int = 1) -> None:
        self.now = 1000.0
        self._come = come
        self._sleepers: set[int] = set()

    def monotonic(self) -> float:
        return self.now

    def may_pass(self) -> bool:
        return len(self._sleepers) >= self._come

    def sleep(self, seconds: float) -> None:
        self._sleepers.add(threading.get_ident())
        if self.may_pass():
            self.now += seconds
        else:
            time.sleep(0.001)


def talk_about_all(talk: Coordinator) -> list[Any]:
    """Make every kind of call, as a save does."""
    own = b"%d" % talk.rank
    return [
        talk.agree("start", own, b",".join),
        talk.broadcast("folder", b"f" if talk.rank == 0 else None),
        talk.broadcast("more", b"\x00\n\xff" if talk.rank == 0 else None),
        talk.gather("written", own),
        talk.broadcast("committed", b"c" if talk.rank == 0 else None),
    ]


def check_all(outcomes: list[Outcome], world: int) -> None:
    numbers = [b"%d" % rank for rank in range(world)]
    for rank, outcome in enumerate(outcomes):
        assert outcome == [b",".join(numbers), b"f", b"\x00\n\xff", numbers if rank == 0 else None, b"c"], outcome


@pytest.mark.parametrize("world", [1, 2, 3, 16])
@pytest.mark.parametrize("make", [hash_store, tcp_store, old_tcp_store])
def test_all_calls_over_and_over_leave_no_key(make: Callable[[], Any], world: int) -> None:
    store = make()
    members = members_of(store, world)
    before = store.num_keys()
    for _ in range(5):
        check_all(run(members, talk_about_all), world)
        assert store.num_keys() == before


def test_sixty_four_members() -> None:
    store = tcp_store()
    before = store.num_keys()
    check_all(run(members_of(store, 64), talk_about_all), 64)
    assert store.num_keys() == before


def test_a_file_store(tmp_path: Any) -> None:
    files = [dist.FileStore(str(tmp_path / "store"), 3) for _ in range(3)]
    before = files[0].num_keys()
    members = [StoreMembers(files[rank], rank=rank, ranks=range(3), timeout=30.0) for rank in range(3)]
    for _ in range(3):
        check_all(run(members, talk_about_all), 3)
    assert files[0].num_keys() == before


def test_members_have_connections_of_their_own() -> None:
    """So what waits in the store for another rank keeps no save waiting that this rank waits for."""
    store = dist.TCPStore("localhost", 0, 1, True)
    members = members_of(store, 2)
    training = threading.Thread(target=store.wait, args=(["from the other rank"],))
    training.start()
    check_all(run(members, talk_about_all), 2)
    assert training.is_alive()
    members[0]._link._clone.set("from the other rank", "x")
    training.join(30)
    assert not training.is_alive()


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 9 << 20])
def test_messages_of_any_size(size: int) -> None:
    """A TCPStore closes the connection on more than 8 MiB."""
    store = tcp_store()
    before = store.num_keys()
    data = os.urandom(size)

    def talk_about_much(talk: Coordinator) -> Any:
        down = talk.broadcast("down", data if talk.rank == 0 else None)
        up = talk.gather("up", data[::-1] if talk.rank == 1 else b"")
        return down, up

    zero, one = run(members_of(store, 2), talk_about_much)
    assert zero == (data, [b"", data[::-1]])
    assert one == (data, None)
    assert store.num_keys() == before


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("point", range(6))
@pytest.mark.parametrize("make", [hash_store, tcp_store])
def test_a_failure_at_any_point_reaches_all(make: Callable[[], Any], point: int, failing: int) -> None:
    store = make()
    before = store.num_keys()

    def body(talk: Coordinator) -> None:
        own = b"x" * (PART + 5 if talk.rank == 1 else 1)  # in several values
        calls = [
            lambda: talk.agree("start", own, b"".join),
            lambda: talk.gather("one", own),
            lambda: talk.broadcast("folder", own if talk.rank == 0 else None),
            lambda: talk.gather("two", own),
            lambda: talk.broadcast("committed", own if talk.rank == 0 else None),
            lambda: None,
        ]
        for number, call in enumerate(calls):
            if (talk.rank, number) == (failing, point):
                raise StorageError(f"disk full at {number}")
            call()
        talk.gather("after all", b"")

    members = members_of(store, 3, first=10)
    outcomes = run(members, body)
    for rank, outcome in enumerate(outcomes):
        if rank == failing:
            assert type(outcome) is StorageError
        else:
            assert type(outcome) is RanksError
            assert str(outcome) == f"rank {10 + failing} failed: StorageError: disk full at {point}"
    assert store.num_keys() == before
    check_all(run(members, talk_about_all), 3)  # and the next one is fine


class Failing(Shared):
    """A store whose k-th operation fails."""

    def __init__(self, store: dist.Store, at: int) -> None:
        super().__init__(store)
        self.left = at

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)

        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left == -1:
                raise dist.DistNetworkError("connection reset by peer")
            return method(*args)

        return call


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_the_store_at_any_operation_reaches_all(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LINGER", 0.01)  # for a member whose close() failed
    at, ended = 0, False
    while not ended:
        store = dist.HashStore()
        stores = [Failing(store, at if rank == failing else 10**9) for rank in range(3)]
        members = [StoreMembers(stores[rank], rank=rank, ranks=range(3), timeout=5.0) for rank in range(3)]
        outcomes = run(members, talk_about_all)
        own = outcomes[failing]
        if isinstance(own, RanksError):
            assert "does not answer" in str(own)
            assert "connection reset by peer" in str(own)
            told = [outcome for rank, outcome in enumerate(outcomes) if rank != failing]
            last = any(isinstance(outcome, list) for outcome in told)  # they had all that they needed
            for outcome in told:
                assert last or "connection reset by peer" in str(outcome), (at, outcome)
        else:  # in the clean-up after the last call, which must not turn a success into an error
            assert isinstance(own, list)
            ended = stores[failing].left > 0
        at += 1
    assert at > 20


def test_what_decide_raises_is_raised_on_member_0_and_told_to_the_others() -> None:
    def decide(answers: list[bytes]) -> bytes:
        raise KeyError(f"no {len(answers)}")

    outcomes = run(members_of(hash_store(), 3), lambda talk: talk.agree("keys", b"", decide))
    assert type(outcomes[0]) is KeyError
    assert [str(outcome) for outcome in outcomes[1:]] == ["rank 0 failed: KeyError: 'no 3'"] * 2


def test_the_first_failure_is_told() -> None:
    members = members_of(hash_store(), 3)
    talks = [each.session("save") for each in members]
    talks[2].fail(ValueError("first"))
    talks[1].fail(OSError("second"))
    talks[0].fail(OSError("third"))
    for talk in talks:
        for call in (talk.gather, talk.broadcast):
            with pytest.raises(RanksError, match=r"^rank 2 failed: ValueError: first$"):
                call("x", b"")
    for talk in talks[1:]:
        talk.close()
    talks[0].close()


def test_fail_from_another_thread_wakes_the_one_that_waits() -> None:
    members = members_of(hash_store(), 2)
    talks = [each.session("save") for each in members]
    errors: list[RanksError] = []

    def wait_for_the_other() -> None:
        with pytest.raises(RanksError) as caught:
            talks[1].broadcast("x", None)
        errors.append(caught.value)

    waiting = threading.Thread(target=wait_for_the_other)
    waiting.start()
    talks[1].fail(KeyboardInterrupt())
    waiting.join(30)
    assert str(errors[0]).startswith("rank 1 failed: KeyboardInterrupt")


def test_a_long_error_is_cut() -> None:
    def body(talk: Coordinator) -> None:
        if talk.rank:
            raise ValueError("x" * (9 << 20))
        talk.gather("x", b"")

    assert len(str(run(members_of(tcp_store(), 2), body)[0])) < 5000


@pytest.mark.parametrize(
    ("verb", "missing"), [("broadcast", 0), *((verb, rank) for verb in ("gather", "agree") for rank in range(3))]
)
def test_a_member_that_never_comes_is_named(verb: str, missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", Clock(come=2))
    store = hash_store()
    members = members_of(store, 3, timeout=0.1, first=5)

    def body(talk: Coordinator) -> Any:
        if verb == "gather":
            return talk.gather("sizes", b"")
        if verb == "agree":
            return talk.agree("sizes", b"", b"".join)
        return talk.broadcast("sizes", b"" if talk.rank == 0 else None)

    come = [each for each in members if each.rank != missing]
    for outcome in run(come, body, "save of step 7"):
        assert type(outcome) is RanksError
        assert f"waits at {verb}('sizes') of 'save of step 7' (number 1) for rank {5 + missing} to come" in str(outcome)
        assert "after 0.1 s" in str(outcome)
    # The one that comes too late hears the same, at once, and nothing is left.
    with members[missing].session("save of step 7") as talk, pytest.raises(RanksError, match="still waits at"):
        body(talk)
    assert store.num_keys() == 0


@pytest.mark.parametrize("missing", [1, 2])
def test_a_broadcast_misses_only_member_0(missing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", Clock())
    members = members_of(hash_store(), 3, timeout=0.1)
    assert run(members[:1], lambda talk: talk.broadcast("sizes", b"12")) == [b"12"]  # it need not wait
    assert run([members[3 - missing]], lambda talk: talk.broadcast("sizes", None)) == [b"12"]


def test_member_0_that_gathered_but_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, deciding, done = Clock(), threading.Event(), threading.Event()
    clock.may_pass = deciding.is_set  # type: ignore[method-assign]
    monkeypatch.setattr(session, "time", clock)

    def decide(answers: list[bytes]) -> bytes:
        deciding.set()
        done.wait(30)
        return b""

    def body(talk: Coordinator) -> None:
        try:
            talk.agree("keys", b"", decide)
        finally:
            done.set()  # by rank 1, which gave up

    outcomes = run(members_of(hash_store(), 2, timeout=0.1), body)
    assert "for rank 0, to which all ranks came, to answer" in str(outcomes[1])
    assert outcomes[0] is None  # nobody can stop it; its next call would raise


@pytest.mark.parametrize("world", [2, 16, 1024, 10_000])
def test_a_wait_ends_in_time_and_leaves_the_store_to_others(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counts, timeout = Clock(), Counter[str](), 600.0
    monkeypatch.setattr(session, "time", clock)
    members = StoreMembers(Counting(dist.HashStore(), counts), rank=1, ranks=range(world), timeout=timeout)
    talk = members.session("save")
    with pytest.raises(RanksError, match="after 600 s rank 1 still waits"):
        talk.broadcast("x", None)
    assert clock.now - 1000.0 == pytest.approx(1.05 * timeout)
    # A TCPStore answers 100,000 to 200,000 operations per second, and training needs it too.
    assert sum(counts.values()) * world / timeout < 25_000


def test_members_that_are_sessions_apart_are_told_of_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", Clock(come=2))
    members = members_of(hash_store(), 2, timeout=0.1)
    members[1].session("save of step 1")  # rank 0 does not save this one
    for outcome, rank in zip(run(members, talk_about_all, "save of step 2"), (0, 1), strict=True):
        assert type(outcome) is RanksError
        assert f"rank {rank} still waits at agree('start') of 'save of step 2' (number {rank + 1})" in str(outcome)
        assert "all ranks have to save and load in the same order" in str(outcome)


def test_many_missing_members_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "time", Clock(come=3))
    store = hash_store()
    outcomes = run(members_of(store, 600, timeout=0.05)[:3], lambda talk: talk.gather("x", b""))
    for outcome in outcomes:
        assert "for ranks 3, 4, 5, 6, " in str(outcome)
        assert " 18 and 581 more to come" in str(outcome)


def test_members_at_different_calls_are_told_apart_at_once() -> None:
    def body(talk: Coordinator) -> Any:
        return talk.gather("x" if talk.rank else "y", b"")

    for outcome in run(members_of(hash_store(), 2), body):
        assert (
            "rank 1 is at gather('x') of 'save' (number 1), where rank 0 is at gather('y') of 'save' (number 1)"
            in str(outcome)
        )

    def other(talk: Coordinator) -> Any:
        return talk.gather("x", b"") if talk.rank else talk.broadcast("x", b"")

    assert "rank 0 is at broadcast('x')" in str(run(members_of(hash_store(), 2), other)[1])


def test_members_at_different_kinds_are_told_apart_at_once() -> None:
    members = members_of(hash_store(), 2)
    talks = [members[0].session("save"), members[1].session("load")]
    outcomes: list[Any] = []

    def come(talk: Coordinator) -> None:
        with pytest.raises(RanksError) as caught, talk:
            talk.agree("start", b"", b"".join)
        outcomes.append(str(caught.value))

    threads = [threading.Thread(target=come, args=(talk,)) for talk in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(
        "rank 1 is at agree('start') of 'load' (number 1), where rank 0 is at agree('start') of 'save'" in outcome
        for outcome in outcomes
    )


def test_a_member_that_missed_a_failed_session_finds_the_next() -> None:
    store = hash_store()
    members = members_of(store, 3, timeout=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "time", Clock(come=2))
        outcomes = run(members[:2], talk_about_all, "save of step 1")
    assert all("for rank 2 to come" in str(outcome) for outcome in outcomes)
    members = members_of(store, 3)
    check_all(run(members, talk_about_all, "save of step 2"), 3)
    assert store.num_keys() == 0


def test_sessions_at_once_do_not_mix() -> None:
    """A save in the background, beside other sessions of the same members in the other order of time."""
    store = tcp_store()
    before = store.num_keys()
    members = members_of(store, 4)
    outer = [each.session("save") for each in members]
    check_all(run(members, talk_about_all, "load"), 4)
    results: list[Any] = [None] * 4

    def go_on(number: int) -> None:
        with outer[number] as talk:
            results[number] = talk_about_all(talk)

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    check_all(run(members, talk_about_all, "load"), 4)
    for thread in threads:
        thread.join(60)
    check_all(results, 4)
    assert store.num_keys() == before


def test_groups_at_once_do_not_mix() -> None:
    store = hash_store()
    groups = [members_of(store, 3), members_of(store, 3, first=3), members_of(store, 2)]
    results: list[Any] = [None] * 3

    def be_group(number: int) -> None:
        results[number] = [run(groups[number], talk_about_all) for _ in range(5)]

    threads = [threading.Thread(target=be_group, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group, rounds in zip(groups, results, strict=True):
        for outcomes in rounds:
            check_all(outcomes, len(group))
    assert store.num_keys() == 0


def test_a_closed_session_makes_no_calls() -> None:
    talk = members_of(hash_store(), 1)[0].session("save")
    talk.close()
    talk.close()
    with pytest.raises(RanksError, match=r"gather\('x'\) of 'save' \(number 1\): this session was closed"):
        talk.gather("x", b"")
    talk.fail(ValueError("too late"))


def test_member_0_has_to_give_something() -> None:
    outcomes = run(members_of(hash_store(), 2), lambda talk: talk.broadcast("x", None))
    assert type(outcomes[0]) is ValueError
    assert "rank 0 failed: ValueError: x: member 0 has to give data" in str(outcomes[1])


def test_member_0_stays_until_the_others_have_read() -> None:
    """Its process serves the store and may end right after."""
    members = members_of(hash_store(), 2)
    zero, one = (each.session("save") for each in members)
    zero.broadcast("x", b"last words")
    closing = threading.Thread(target=zero.close)
    closing.start()
    assert one.broadcast("x", None) == b"last words"
    assert closing.is_alive()
    one.close()
    closing.join(30)
    assert not closing.is_alive()


def test_a_server_that_goes_away_is_an_error_that_says_so() -> None:
    server = dist.TCPStore("localhost", 0, 1, True)
    client = dist.TCPStore("localhost", server.port, None, False)
    talk = StoreMembers(client, rank=1, ranks=(0, 1), timeout=30.0).session("save")
    del server
    with pytest.raises(RanksError, match=r"the process that serves it .* is gone"):
        talk.broadcast("x", None)
    talk.close()


class Counting(Shared):
    """A store that counts operations by name."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        super().__init__(store)
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        method = super().__getattr__(name)

        def call(*args: Any) -> Any:
            self.counts[name] += 1
            return method(*args)

        return call


def test_member_0_makes_few_operations_at_1024_members() -> None:
    """The others post and read one after the other: no wait is needed, so one thread is all of them."""
    world, store, counts = 1024, dist.HashStore(), Counter[str]()
    ranks = range(world)
    stores = [Counting(store, counts if rank == 0 else Counter()) for rank in ranks]
    posted = [StoreMembers(stores[rank], rank=rank, ranks=ranks, timeout=30.0).session("save") for rank in ranks]
    for rank in range(1, world):
        with posted[rank]._calling("agree", "keys") as (call, number):
            posted[rank]._post(call, number, b"%d" % rank)
    assert posted[0].agree("keys", b"0", b",".join) == b",".join(b"%d" % rank for rank in ranks)
    batches = -(-(world - 1) // session.BATCH)
    assert counts["multi_get"] == batches
    assert counts["set"] == 2  # that it came, and the answer
    assert counts["check"] <= 2 * batches + 3
    assert sum(counts.values()) < 25
    for rank in range(1, world):
        with posted[rank]._calling("agree", "keys") as (call, _):
            posted[rank]._receive(call, 0)
    assert all(sum(each.counts.values()) < 12 for each in stores[1:])
    for rank in [*range(1, world), 0]:
        posted[rank].close()
    assert store.num_keys() == 0
