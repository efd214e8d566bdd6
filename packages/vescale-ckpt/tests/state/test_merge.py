"""Ranks that hold different keys: their union, and what they may not disagree about. By hand."""

import pytest

from vescale_ckpt import local
from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt._state import TensorSpec, digest, is_absent, local_names, merge, pack, renumber_local
from vescale_ckpt.errors import RanksError


def rule(ranks, *placements, shape=None):
    return Rule(Mesh(shape or (len(ranks),), ranks), placements)


def spec(name, layout, shape=(4, 2), dtype="float32"):
    return TensorSpec(name, dtype, shape, layout)


def everywhere(world):
    """The layout of a plain tensor, as each rank describes it."""
    return rule(range(world), "R")


def stage(ranks, world, *names):
    """A group of ranks with plain tensors under `model`."""
    specs = [spec(f"model.{name}", everywhere(world)) for name in sorted(names)]
    return ranks, specs, {"model": {name: {"$tensor": n} for n, name in enumerate(sorted(names))}}


def by_name(specs):
    assert [s.name for s in specs] == sorted(s.name for s in specs)
    return {s.name: s for s in specs}


def names_in(tree, specs):
    """The tree with names in place of numbers."""
    if isinstance(tree, list):
        return [names_in(node, specs) for node in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() <= {"$tensor", "$numpy"} and tree:
        return specs[next(iter(tree.values()))].name
    return {key: names_in(node, specs) for key, node in tree.items()}


def test_stages_of_a_pipeline():
    first = stage((0, 1), 4, "embed", "b")
    last = stage((2, 3), 4, "a", "head")
    specs, tree = merge([first, last])
    assert names_in(tree, specs) == {
        "model": {"b": "model.b", "embed": "model.embed", "a": "model.a", "head": "model.head"}
    }
    found = by_name(specs)
    assert list(found) == ["model.a", "model.b", "model.embed", "model.head"]
    assert found["model.b"].layout == rule((0, 1), "R")
    assert found["model.head"].layout == rule((2, 3), "R")


def test_one_group_stays_as_it_is():
    part = stage((0, 1, 2), 3, "a", "b")
    specs, tree = merge([part])
    assert specs == part[1]
    assert tree == part[2]


def test_shared_tensors_are_held_by_all_that_have_them():
    parts = [stage((0, 4), 6, "tied", "a"), stage((1, 5), 6, "b"), stage((2, 3), 6, "tied", "c")]
    specs, _ = merge(parts)
    assert by_name(specs)["model.tied"].layout == rule((0, 2, 3, 4), "R")
    assert by_name(specs)["model.b"].layout == rule((1, 5), "R")
    everyone = merge([stage((0, 2), 4, "x", "a"), stage((1, 3), 4, "x")])[0]
    assert by_name(everyone)["model.x"].layout == everywhere(4)


def test_sub_meshes_with_the_same_rule_are_replicas():
    parts = [
        ((0, 1), [spec("w", rule((0, 1), "S(0)"))], {"w": {"$tensor": 0}}),
        ((4, 5), [spec("w", rule((4, 5), "S(0)"))], {"w": {"$tensor": 0}}),
        ((2, 3), [spec("w", rule((2, 3), "S(0)"))], {"w": {"$tensor": 0}}),
    ]
    (found,), _ = merge(parts)
    assert found.layout == rule((0, 1, 2, 3, 4, 5), "R", "S(0)", shape=(3, 2))
    assert found.layout.holders((4, 2), 3) == (1, 3, 5)
    assert merge(parts[::-1])[0] == [found]
    apart = ((0, 3), [spec("w", rule((0, 3), "S(0)"))], {"w": {"$tensor": 0}})
    assert merge([apart, parts[1]])[0][0].layout.boxes((4, 2), 3) == (Box((2, 0), (2, 2)),)


def test_a_mesh_over_several_groups_is_one():
    shared = rule(range(4), "S(0)")
    parts = [
        ((0, 1), [spec("a", everywhere(4)), spec("w", shared)], {"a": {"$tensor": 0}, "w": {"$tensor": 1}}),
        ((2, 3), [spec("w", shared)], {"w": {"$tensor": 0}}),
    ]
    assert by_name(merge(parts)[0])["w"].layout == shared


def test_dtensors_without_shards_are_held_by_those_in_their_mesh():
    parts = [
        ((0, 1), [spec("w", rule((0, 1), "R"))], {"w": {"$tensor": 0}}),
        ((2, 3), [spec("w", rule((2, 3), "R"))], {"w": {"$tensor": 0}}),
    ]
    assert set(merge(parts)[0][0].layout.mesh.ranks) == {0, 1, 2, 3}
    elsewhere = [(ranks, [spec("w", rule((4, 5), "R"))], {"w": {"$tensor": 0}}) for ranks in ((0, 1), (2, 3))]
    with pytest.raises(RanksError, match="w: none of the ranks that have this key is in the mesh"):
        merge(elsewhere)


def test_all_ranks_of_a_mesh_must_have_the_key():
    parts = [
        ((0, 1), [spec("model.w", rule(range(4), "S(0)"))], {"model": {"w": {"$tensor": 0}}}),
        ((2, 3), [], {"model": {}}),
    ]
    with pytest.raises(
        RanksError, match=r"model\.w is sharded \(S\(0\) on .*0\.\.\.3\), but the state of rank 2 does not"
    ):
        merge(parts)


def test_boxes_of_groups_are_put_together():
    a, b = Explicit(((0, (Box((0, 0), (1, 2)),)),)), Explicit(((2, (Box((1, 0), (3, 2)),)),))
    (found,), _ = merge(
        [((0, 1), [spec("w", a)], {"w": {"$tensor": 0}}), ((2,), [spec("w", b)], {"w": {"$tensor": 0}})]
    )
    assert isinstance(found.layout, Explicit)
    assert found.layout.ranks() == [0, 2]


def test_a_rule_beside_boxes_is_the_boxes_that_it_implies():
    boxes = Explicit(((0, (Box((0, 0), (1, 2)),)),))
    rows = rule((1, 2, 5), "S(0)")  # of which rank 5 has no row
    for first, second in [((0, boxes), (1, rows)), ((1, rows), (0, boxes))]:
        parts = [((rank, rank + 1) if rank else (0,), [spec("w", layout)], ONE) for rank, layout in (first, second)]
        (found,), _ = merge(parts)
        assert sorted(found.layout.parts) == [
            (0, (Box((0, 0), (1, 2)),)),
            (1, (Box((0, 0), (2, 2)),)),
            (2, (Box((2, 0), (2, 2)),)),
        ]
    (found,), _ = merge([((0,), [spec("w", boxes)], ONE), ((5, 7), [spec("w", rows)], ONE)])
    assert found.layout == boxes


def test_counters_are_equal_in_any_order():
    one, other = ({"c": {"$counter": pairs}} for pairs in ([["a", 1], ["b", 2]], [["b", 2], ["a", 1]]))
    assert merge([((0,), [], {**one, "x": 1}), ((1,), [], other)])[1] == {**one, "x": 1}
    assert digest([], one, {}) == digest([], other, {})
    with pytest.raises(RanksError, match=r"c is .*counter"):
        merge([((0,), [], one), ((1,), [], {"c": {"$counter": [["a", 1], ["b", 3]]}})])


ONE = {"w": {"$tensor": 0}}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            spec("w", everywhere(4)),
            spec("w", everywhere(4), (2, 4)),
            r"float32 \[4, 2\].* rank 1, but float32 \[2, 4\]",
        ),
        (spec("w", everywhere(4)), spec("w", everywhere(4), dtype="bfloat16"), "float32 .* rank 1, but bfloat16"),
        (spec("w", everywhere(4)), spec("w", rule((2, 3), "S(0)")), r"R on .* rank 1, but .*S\(0\) on"),
        (spec("w", rule((0, 1), "S(0)")), spec("w", rule((2, 3), "S(1)")), r"S\(0\) on .* rank 1, but .*S\(1\) on"),
        (spec("w", rule((0, 1), "S(0)")), spec("w", rule((1, 2), "S(0)")), r"mesh 2 of ranks 1, 2 on rank 2"),
        (
            spec("w", rule((0, 1), "R", "S(0)", shape=(1, 2))),
            spec("w", rule((2, 3), "R", "S(0)", shape=(2, 1))),
            "mesh 1 x 2 .* mesh 2 x 1",
        ),
    ],
    ids=range(6),
)
def test_tensors_that_disagree(first, second, message):
    with pytest.raises(RanksError, match=f"state: w is .*{message}") as caught:
        merge([((1, 0), [first], ONE), ((2, 3), [second], ONE)])
    assert "rank 1" in str(caught.value)
    assert "rank 2" in str(caught.value)


def test_values_that_differ_may_be_taken_from_the_first_group():
    trees = [
        {"step": 1, "loss": {"$float": "nan"}, "x": [{}, {"k": [1, {}]}], "same": 5},
        {"step": 2, "loss": 0.5, "x": [{}, {"k": [2, {}]}], "same": 5, "more": 3},
    ]
    _, tree = merge([((1, 2), [], trees[0]), ((3,), [], trees[1])], first=True)
    assert tree == trees[0] | {"more": 3}
    with pytest.raises(RanksError, match=r'step is 1 on rank 1, .*differing="first" to keep that of rank 1 only'):
        merge([((1, 2), [], trees[0]), ((3,), [], trees[1])])
    with pytest.raises(RanksError, match="x is null on rank 1, but a dict of 1 on rank 3"):  # no value, but a structure
        merge([((1,), [], {"x": None}), ((3,), [], {"x": {"a": 1}})], first=True)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"step": 1}, {"step": 2}, "step is 1 on rank 1, but 2 on rank 3. Wrap it in `vescale_ckpt.local"),
        ({"step": 1}, {"step": 1.0}, r"step is 1 on rank 1, but 1\.0 on rank 3"),
        ({"step": 1}, {"step": True}, "step is 1 on rank 1, but true on rank 3"),
        ({"x": 0.0}, {"x": -0.0}, r"x is 0\.0 on rank 1, but -0\.0 on rank 3"),
        ({"x": "a" * 500}, {"x": "b"}, r'x is "aaa.*\.\.\.aaa.*" on rank 1, but "b"'),
        ({"x": None}, {"x": {"a": 1}}, "x is null on rank 1, but a dict of 1 on rank 3. Use different keys"),
        ({"x": [1, 2]}, {"x": [1, 3]}, r"x is \[1, 2\] on rank 1, but \[1, 3\] on rank 3"),
        ({"x": [1, {"a": 1}]}, {"x": [1]}, r"x is a list of 2 on rank 1, but \[1\] on rank 3"),
        ({"x": [{}, {}]}, {"x": [{}]}, "x is a list of 2 on rank 1, but a list of 1 on rank 3"),
        ({"x": [{}, {"k": [1, {}]}]}, {"x": [{}, {"k": [2, {}]}]}, r"x\.1\.k\.0 is 1 on rank 1, but 2 on rank 3"),
        ({"x": {"$tuple": [{}]}}, {"x": [{}]}, "x is a tuple of 1 on rank 1, but a list of 1"),
        ({"x": {"$dict": [[1, 2]]}}, {"x": {"$dict": [[1, 3]]}}, r"x\.1 is 2 on rank 1, but 3 on rank 3"),
        ({"x": {"$ordered": [["a", 2]]}}, {"x": {"a": 2}}, "x is an OrderedDict of 1 on rank 1, but a dict of 1"),
        ({"x": {"$float": "nan"}}, {"x": {"$float": "inf"}}, "x is .*nan.* on rank 1, but .*inf.* on rank 3"),
        ({"x": {"$set": [1]}}, {"x": {"$set": [2]}}, "x is .* on rank 1, but"),
        ({"x": {"$local": 0}}, {"x": 5}, "x is a value of each rank's own on rank 1, but 5 on rank 3"),
        (5, 6, "the state itself is 5 on rank 1, but 6"),
    ],
    ids=range(17),
)
def test_values_that_disagree(first, second, message):
    with pytest.raises(RanksError, match=f"state: {message}"):
        merge([((1, 0), [], first), ((3, 2), [], second)])


def test_a_tensor_is_no_value():
    part = ((0,), [spec("w", everywhere(2))], ONE)
    with pytest.raises(RanksError, match="w is the tensor w on rank 0, but 5 on rank 1"):
        merge([part, ((1,), [], {"w": 5})])
    with pytest.raises(RanksError, match="w is the tensor w on rank 0, but the tensor w on rank 1"):
        merge([part, ((1,), [spec("w", everywhere(2))], {"w": {"$numpy": 0}})])


def test_ties_on_some_ranks_only():
    tied = ((0,), [spec("a", everywhere(2))], {"a": {"$tensor": 0}, "b": {"$tensor": 0}})
    apart = (
        (1,),
        [spec("a", everywhere(2)), spec("b", everywhere(2))],
        {"a": {"$tensor": 0}, "b": {"$tensor": 1}},
    )
    with pytest.raises(
        RanksError, match=r"b is the tensor a on rank 0, but the tensor b on rank 1. It is tied to other"
    ):
        merge([tied, apart])


def test_equal_values_and_containers_of_all_kinds():
    common = {
        "n": 1,
        "f": {"$float": "nan"},
        "t": {"$tuple": [1, {"$tensor": 0}]},
        "d": {"$dict": [[1, {"a": 1}], [{"$tuple": [1, 2]}, []]]},
        "o": {"$ordered": [["x", [1, 2]]]},
        "e": [{}, []],
    }
    specs = [spec("t.1", everywhere(2))]
    assert merge([((0,), specs, common), ((1,), specs, common)]) == (specs, common)


def test_dicts_and_lists_are_united_key_by_key():
    a = {"g": [{"x": 1}, {"$dict": [[1, "one"], [2, "two"]]}], "o": {"$ordered": [["k", 1]]}}
    b = {"g": [{"y": 2}, {"$dict": [[3, "three"], [2, "two"]]}], "o": {"$ordered": [["l", 2], ["k", 1]]}, "z": []}
    assert merge([((0,), [], a), ((1,), [], b)]) == (
        [],
        {
            "g": [{"x": 1, "y": 2}, {"$dict": [[1, "one"], [2, "two"], [3, "three"]]}],
            "o": {"$ordered": [["k", 1], ["l", 2]]},
            "z": [],
        },
    )


@pytest.mark.parametrize("leaf", [{"$tensor": 0}, 1, {"$local": 0}], ids=str)
def test_keys_that_are_spelled_alike_are_refused(leaf):
    specs = [spec("a.b", everywhere(2))] if leaf == {"$tensor": 0} else []
    parts = [((0,), specs, {"a": {"b": leaf}}), ((1,), specs, {"a.b": leaf})]
    for given in (parts, parts[::-1]):
        with pytest.raises(RanksError, match=r"two different keys have the name a\.b: .*Rename one") as caught:
            merge(given)
        assert "('a', 'b')" in str(caught.value)
        assert "('a.b',)" in str(caught.value)


def test_keys_that_are_spelled_alike_on_one_rank_are_told_apart():
    specs = [spec("a.b", everywhere(2)), spec(r"a\.b", everywhere(2))]
    part = {"a": {"b": {"$tensor": 0}}, "a.b": {"$tensor": 1}}
    assert merge([((0,), specs, {**part, "x": 1}), ((1,), specs, part)]) == (specs, {**part, "x": 1})
    with pytest.raises(RanksError, match="two different keys have the name"):
        merge([((0,), specs, part), ((1,), specs[:1], {"a.b": {"$tensor": 0}})])


def test_local_values_of_some_ranks_only():
    states = [
        {"loader": local({"at": 5}), "shared": local(0)},
        {"shared": local(1)},
        {"rng": local((1, 2)), "shared": local(2), "deep": {"x": local("y")}},
    ]
    packed = [pack(state) for state in states]
    _, tree = merge([((rank,), [], one.tree) for rank, one in enumerate(packed)])
    assert local_names(tree) == ["deep.x", "loader", "rng", "shared"]
    assert tree["shared"] == {"$local": 3}
    found = [renumber_local(one, tree) for one in packed]
    assert [[is_absent(node) for node in nodes] for nodes in found] == [
        [True, False, True, False],
        [True, True, True, False],
        [False, True, False, False],
    ]
    assert [nodes[3] for nodes in found] == [0, 1, 2]
    assert found[0][1] == {"at": 5}
    assert found[2][:3:2] == ["y", {"$tuple": [1, 2]}]


def test_local_values_never_get_lost():
    with pytest.raises(RanksError, match="a is a value of this rank's own, but has another name"):
        renumber_local(pack({"a": local(1)}), {"b": {"$local": 0}})
