import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

import vescale_ckpt as ck
from vescale_ckpt import MissingStepError, RanksError
from vescale_ckpt._coordination import coordinator
from vescale_ckpt._load.together import Findings, agree, open_together
from vescale_ckpt.testing import MemoryStorage


def members(world, work):
    """Run work(session) on `world` threads; return results or the errors that they raised."""
    store = HashStore()

    def one(rank):
        try:
            with coordinator(store=store, rank=rank, world=world, timeout=30).session("load") as session:
                return work(session)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(one, range(world)))


def test_one_rank_looks_for_the_step_and_reads_the_manifest():
    storage = MemoryStorage()
    ck.save(storage, {"w": torch.arange(300)}, step=7)
    seen, lock, get = [], threading.Lock(), storage.get

    def counted(path, limit):
        with lock:
            seen.append(path)
        return get(path, limit)

    storage.get = counted
    opened = members(4, lambda session: open_together(storage, "latest", session))
    assert [checkpoint.step for checkpoint in opened] == [7] * 4
    assert len([path for path in seen if path.endswith("manifest.json")]) == 1
    assert all(torch.equal(checkpoint.tensor("w")[5:9], torch.arange(5, 9)) for checkpoint in opened)


def test_a_step_that_is_not_there_reaches_all():
    storage = MemoryStorage()
    ck.save(storage, {"w": 1}, step=7)
    first, *others = members(3, lambda session: open_together(storage, 8, session))
    assert isinstance(first, MissingStepError)
    assert all(isinstance(error, MissingStepError) and "step 8" in str(error) for error in others)


def test_ranks_must_ask_for_the_same_step():
    storage = MemoryStorage()
    ck.save(storage, {"w": 1}, step=7)

    def work(session):
        checkpoint = open_together(storage, 7 if session.rank else "latest", session)
        session.agree("opened", b"", lambda _: b"")
        return checkpoint

    found = members(2, work)
    assert isinstance(found[1], RanksError)
    assert "'latest' on rank 0" in str(found[1])
    assert isinstance(found[0], RanksError)


NAMES = [f"layer{n}.w" for n in range(100)]


def test_only_what_no_rank_has_is_unexpected():
    """Stages of a pipeline hold different keys; layer 50 is on none."""

    def work(session):
        mine = {n for n in range(100) if n % 4 == session.rank and n != 50}
        return agree(session, Findings(unexpected=[NAMES[n] for n in range(100) if n not in mine]), NAMES)

    assert [verdict.unexpected for verdict in members(4, work)] == [["layer50.w"]] * 4


def test_problems_of_all_ranks_reach_all_ranks():
    def work(session):
        return agree(session, Findings(["same", f"only {session.rank}"] if session.rank != 1 else ["same"]), NAMES)

    for verdict in members(3, work):
        assert verdict.problems == ["same", "only 0 (rank 0)", "only 2 (rank 2)"]


def test_replicas_are_shared_only_if_all_holders_have_the_same():
    def work(session):
        groups = {
            "all": ("same", 3),
            "differs": (f"digest {session.rank}", 3),
            **({"pair": ("same", 2)} if session.rank < 2 else {}),
            **({"lone": ("same", 2)} if session.rank == 2 else {}),
        }
        return agree(session, Findings(groups=groups), NAMES)

    assert [(verdict.groups, verdict.torn) for verdict in members(3, work)] == [(frozenset({"all", "pair"}), 2)] * 3


def test_options_must_be_the_same():
    found = members(2, lambda session: agree(session, Findings(options=f"cast={session.rank}"), NAMES))
    assert all(isinstance(error, RanksError) and "cast=0" in str(error) for error in found)


def test_nothing_is_chosen_only_if_that_is_so_on_all_ranks():
    for idle in ([True, True, True], [True, False, True]):
        found = members(3, lambda session, idle=idle: agree(session, Findings(idle=idle[session.rank]), NAMES))
        assert [verdict.idle for verdict in found] == [all(idle)] * 3


def test_alone():
    session = coordinator().session("load")
    verdict = agree(session, Findings(["a"], ["layer1.w"]), NAMES)
    assert (verdict.problems, verdict.unexpected, verdict.idle) == (["a"], ["layer1.w"], False)
    assert agree(session, Findings(idle=True), NAMES).idle
