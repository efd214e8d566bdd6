"""Small changes to schedules."""

from vescale_pipe._schedule import Schedule, parse_action
from vescale_pipe._schedules import build_schedule
from vescale_pipe._schedules._refine import merged, neighbours, paired


def read(*rows):
    actions = [[parse_action(word) for word in row.split()] for row in rows]
    count = 1 + max(action.microbatch for row in actions for action in row)
    return Schedule.of("mine", range(len(rows)), count, actions)


def text(schedule, rank=0):
    return " ".join(map(str, schedule.actions(rank)))


def test_neighbouring_halves_become_a_whole_backward():
    schedule = merged(read("0F0 0F1 0I0 0W0 0I1 0W1"))
    assert text(schedule) == "0F0 0F1 0B0 0B1"
    assert schedule.name == "mine, merged"
    assert text(merged(read("0F0 0I0 0F1 0W0 0I1 0W1"))) == "0F0 0I0 0F1 0W0 0B1"


def test_forwards_are_joined_with_backwards_of_other_micro_batches():
    schedule = paired(read("0F0 0F1 0B0 0F2 0B1 0B2"), True)
    assert text(schedule) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert schedule.joined(0) == (1, 3)
    assert paired(read("0F0 0F1 0B0 0F2 0B1 0B2"), False).joined(0) == (2,)
    assert paired(read("0F0 0B0"), True).joined(0) == ()
    assert paired(read("0F0 0F1 0W0"), True).joined(0) == ()


def test_one_place_is_changed_and_the_order_of_gradients_is_kept(checked):
    assert [text(one) for one in neighbours(read("0F0 0I0 0W0 0F1 0B1"))] == [
        "0F0 0B0 0F1 0B1",
        "0F0 0I0 0F1 0W0 0B1",
        "0F0 0I0 0W0 0F1 0I1 0W1",
    ]
    assert [text(one) for one in neighbours(read("0F0 0F1 0I0 0I1 0W0 0W1"))] == [
        "0F0 0I0 0F1 0I1 0W0 0W1",
        "0F0 0F1 0I0 0W0 0I1 0W1",
    ]
    for name in ("zb_h1", "1f1b", "gpipe"):
        for one in neighbours(build_schedule(name, 1, 3)):
            checked(one)


def test_actions_of_different_stages_change_places():
    schedule = build_schedule("looped_bfs", 1, 1, chunks=2)
    assert [text(one) for one in neighbours(schedule)] == [
        "1F0 0F0 1B0 0B0",
        "0F0 1F0 1I0 1W0 0B0",
        "0F0 1F0 0B0 1B0",
        "0F0 1F0 1B0 0I0 0W0",
    ]


def test_joined_pairs_are_left_alone():
    assert list(neighbours(build_schedule("dualpipe_v", 2, 4))) == []
