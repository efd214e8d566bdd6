"""`cat` of values that each rank has for itself."""

import contextlib
import io
import json

import pytest
import torch
import torch.distributed as dist

import vescale_ckpt as ck
from vescale_ckpt._cli import main


def ran(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(argv))
    return status, out.getvalue(), err.getvalue()


@pytest.mark.ranks(2)
def test_a_value_of_each_rank_needs_a_rank(rank, tmp_path):
    own = {"seed": 70 + rank, "drawn": torch.arange(3) + rank}
    state = {"w": torch.ones(3), "in": {"own": ck.local(own), "same": 5}, "number": ck.local(10 + rank)}
    ck.save(tmp_path, state, step=1)
    dist.barrier()
    run = str(tmp_path)
    for other in (0, 1):
        choice = ("--rank", str(other))
        assert ran("cat", run, "number", *choice)[:2] == (0, f"{10 + other}\n")
        assert ran("cat", run, "in.own.seed", *choice)[:2] == (0, f"{70 + other}\n")
        told = json.loads(ran("cat", run, "in.own.drawn", "--slice", "1:", "--json", *choice)[1])
        assert told["values"] == [1 + other, 2 + other]
        assert "seed" in ran("cat", run, "in.own", *choice)[1]
        assert ran("cat", run, "in.same", *choice)[:2] == (0, "5\n")
    for key in ("number", "in.own", "in.own.seed", "in.own.nothing"):
        status, out, err = ran("cat", run, key)
        assert (status, out) == (2, "")
        assert f"{key}: each rank has a value of its own: give --rank; step 1 has ranks 0 to 1." in err
    assert ran("cat", run, "in")[1] == "{'own': 'of each rank', 'same': 5}\n"
    status, out, err = ran("cat", run, "number", "--rank", "2")
    assert (status, out) == (2, "")
    assert "--rank 2: step 1 was saved by ranks 0 to 1." in err
    assert ran("cat", run, "in.own.nothing", "--rank", "0")[0] == 1


def test_of_one_rank_there_is_no_choice(tmp_path):
    ck.save(tmp_path, {"number": ck.local(10), "a.b": {"c": [1, 2]}, "a": {"x": 3}}, step=1)
    run = str(tmp_path)
    assert ran("cat", run, "number")[:2] == (0, "10\n")
    assert ran("cat", run, "a.b.c.1")[:2] == (0, "2\n")
    assert ran("cat", run, "a.x")[:2] == (0, "3\n")
    assert "--rank 1: step 1 was saved by rank 0." in ran("cat", run, "number", "--rank", "1")[2]
