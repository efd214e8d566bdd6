"""What ranks compare: the digest changes with everything that must be the same, and with nothing else."""

import collections
import dataclasses
import itertools
import re

import pytest
import torch

from vescale_ckpt import local
from vescale_ckpt._geometry import Box, Explicit, Mesh, Rule
from vescale_ckpt._state import Held, TensorSpec, describe, difference, digest, pack, plain, small_values
from vescale_ckpt._state.agree import layout_words


def said(state, world=2, rank=0):
    packed = pack(state)
    held = [describe(name, tensor, range(world), rank) for name, tensor in packed.tensors]
    return [one.spec for one in held], packed.tree, small_values(held)


def state():
    return {
        "w": torch.arange(6.0).reshape(2, 3),
        "big": torch.zeros(5000),
        "step": 3,
        "groups": [{"lr": 0.1, "ids": [0, 1]}],
        "table": {1: "a", 2: torch.ones(2)},
        "ordered": collections.OrderedDict(a=1, b=2),
        "names": {"x", "y"},
    }


def test_equal_states_agree():
    assert digest(*said(state())) == digest(*said(state()))
    assert len(digest(*said(state()))) == 32
    assert difference(said(state()), said(state())) == []


def test_the_order_of_dicts_does_not_count():
    other = dict(reversed(state().items()))
    other["table"] = dict(reversed(other["table"].items()))
    other["groups"] = [{"ids": [0, 1], "lr": 0.1}]
    assert digest(*said(other)) == digest(*said(state()))


def test_one_value_of_a_large_tensor_and_local_values_do_not_count():
    other = state()
    other["big"][1000] += 1  # between the stretches that are compared, as 200 of every 2500 bytes are
    assert digest(*said(other)) == digest(*said(state()))
    assert digest(*said({"a": local(1)})) == digest(*said({"a": local({"b": torch.ones(3)})}))


def test_strides_and_memory_do_not_count():
    other = state()
    other["w"] = other["w"].t().contiguous().t()
    assert not other["w"].is_contiguous()
    assert digest(*said(other)) == digest(*said(state()))


CHANGES = {
    "small tensor": (lambda s: s["w"][1, 2].add_(1), r"w: float32 \[2, 3\].*hash.* \| float32 \[2, 3\].*hash"),
    "large tensor": (lambda s: s["big"].add_(1), r"big: float32 \[5000\].*hash.* \| float32 \[5000\].*hash"),
    "tensor in a table": (lambda s: s["table"][2].neg_(), r"table\.2: .*hash"),
    "dtype": (lambda s: s.update(big=s["big"].double()), r"big: float32 \[5000\] R on .* \| float64"),
    "shape": (lambda s: s.update(big=torch.zeros(5001)), r"big: .*\[5000\].* \| .*\[5001\]"),
    "value": (lambda s: s.update(step=4), r"step: 3 \| 4"),
    "int or float": (lambda s: s.update(step=3.0), r"step: 3 \| 3\.0"),
    "int or bool": (lambda s: s["groups"][0].update(ids=[0, True]), r"groups\.0\.ids: \[0, 1\] \| \[0, true\]"),
    "nested": (lambda s: s["groups"][0].update(lr=0.2), r"groups\.0\.lr: 0\.1 \| 0\.2"),
    "new key": (lambda s: s.update(new=1), r"new: \(absent\) \| 1"),
    "lost key": (lambda s: s.pop("step"), r"step: 3 \| \(absent\)"),
    "new tensor": (lambda s: s.update(new=torch.zeros(1)), r"new: \(absent\) \| float32 \[1\]"),
    "key of another class": (lambda s: s["table"].update({"1": s["table"].pop(1)}), "kinds differ"),
    "order of an OrderedDict": (lambda s: s["ordered"].move_to_end("a"), "kinds differ"),
    "class of a dict": (lambda s: s.update(ordered=dict(s["ordered"])), "kinds differ"),
    "empty containers": (lambda s: s.update(empty={}), "empty ones"),
    "tuple for list": (lambda s: s.update(groups=tuple(s["groups"])), "kinds differ"),
    "a set": (lambda s: s["names"].add("z"), r"names: .* \| .*z"),
    "array for tensor": (lambda s: s.update(big=s["big"].numpy()), "kinds differ"),
    "local": (lambda s: s.update(step=local(3)), r"step: 3 \| .*local"),
    "ties": (lambda s: s.update(z=s["big"]), "z: .absent. .*tied to big"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_that_must_agree_counts(name):
    change, words = CHANGES[name]
    other = state()
    change(other)
    assert digest(*said(other)) != digest(*said(state()))
    lines = difference(said(state()), said(other))

    assert any(re.search(words, line) for line in lines), lines
    assert len(lines) == 1


def test_all_changes_differ_from_each_other():
    found = []
    for change, _ in CHANGES.values():
        other = state()
        change(other)
        found.append(digest(*said(other)))
    assert len(set(found)) == len(found)


LAYOUTS = [
    Rule(Mesh((4,), range(4)), ("R",)),
    Rule(Mesh((4,), range(4)), ("S(0)",)),
    Rule(Mesh((4,), range(4)), ("S(1)",)),
    Rule(Mesh((4,), (0, 1, 3, 2)), ("S(0)",)),
    Rule(Mesh((4,), (3, 2, 1, 0)), ("S(0)",)),
    Rule(Mesh((2,), (0, 1)), ("S(0)",)),
    Rule(Mesh((2,), (0, 2)), ("S(0)",)),
    Rule(Mesh((2, 2), range(4)), ("S(0)", "R")),
    Rule(Mesh((2, 2), range(4)), ("R", "S(0)")),
    Rule(Mesh((1, 4), range(4)), ("R", "S(0)")),
    Rule(Mesh((2, 2), range(4)), ("SS(0,2)", "S(0)")),
    Rule(Mesh((4,), range(4)), ("RS(1,1,1,1,1)",)),
    Explicit(((0, (Box((0, 0), (4, 4)),)),)),
]


def test_layouts_count():
    spec = TensorSpec("w", "float32", (4, 4), LAYOUTS[0])
    tree = {"w": {"$tensor": 0}}
    all_of_them = [([dataclasses.replace(spec, layout=layout)], tree, {}) for layout in LAYOUTS]
    assert len({digest(*one) for one in all_of_them}) == len(LAYOUTS)
    for a, b in itertools.combinations(all_of_them, 2):
        (line,) = difference(a, b)
        assert line.startswith("w: float32 [4, 4] ")


def test_which_tensor_has_which_layout_counts():
    specs = [TensorSpec(name, "float32", (4, 4), layout) for name, layout in zip("ab", LAYOUTS, strict=False)]
    swapped = [dataclasses.replace(s, layout=o.layout) for s, o in zip(specs, reversed(specs), strict=True)]
    tree = {"a": {"$tensor": 0}, "b": {"$tensor": 1}}
    assert digest(specs, tree, {}) != digest(swapped, tree, {})


def test_equal_layouts_that_are_different_objects_agree():
    def specs(share):
        first = Rule(Mesh((2,), (0, 1)), ("S(0)",))
        second = first if share else Rule(Mesh((2,), [0, 1]), ("S(0)",))
        return [TensorSpec("a", "int8", (2,), first), TensorSpec("b", "int8", (2,), second)]

    tree = [{"$tensor": 0}, {"$tensor": 1}]
    assert digest(specs(True), tree, {}) == digest(specs(False), tree, {})


def test_boxes_of_ranks_differ_without_a_word():
    def one(rank):
        layout = Explicit(((rank, (Box((rank,), (1,)),)),))
        return [TensorSpec("w", "float32", (2,), layout)], {"w": {"$tensor": 0}}, {}

    assert digest(*one(0)) == digest(*one(1))
    assert difference(one(0), one(1)) == []


def test_difference_is_short():
    lines = difference(said({str(n): n for n in range(99)}), said({str(n): -n for n in range(99)}), limit=3)
    assert lines == ["1: 1 | -1", "2: 2 | -2", "3: 3 | -3"]
    (line,) = difference(said({"a": "x" * 9999}), said({"a": 1}))
    assert len(line) < 250


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.int64],
)
def test_small_values_of_all_dtypes(dtype):
    def values(*numbers):
        return small_values([plain("w", torch.tensor(numbers).to(dtype))])

    assert values(0, 1, 0) == values(0, 1, 0)
    assert values(0, 1, 0) != values(1, 0, 0)
    assert values(0, 1, 0).keys() == {"w"}


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_small_values_of_odd_views():
    z = torch.tensor([1 + 2j, 3 - 1j])
    dense = small_values([plain("w", z.conj().resolve_conj())])
    assert small_values([plain("w", z.conj())]) == dense
    assert small_values([plain("w", z)]) != dense
    assert small_values([plain("w", torch._neg_view(torch.ones(2)))]) == small_values([plain("w", -torch.ones(2))])
    scalar = small_values([plain("w", torch.tensor(1.5))])
    assert scalar != small_values([plain("w", torch.tensor(2.5))])
    half = torch.zeros(2, dtype=torch.complex32)
    assert small_values([plain("w", half)]).keys() == {"w"}
    assert small_values([plain("w", torch.arange(8.0)[::2])]) == small_values([plain("w", torch.arange(0.0, 8, 2))])


def test_only_tensors_that_are_replicated_everywhere_are_compared():
    assert small_values([plain("w", torch.zeros(0))]) == {}
    for size in (2, 4096, 4097, 100_000):
        view = torch.zeros(size)
        for layout, expected in ((LAYOUTS[0], {"w"}), (LAYOUTS[1], set()), (LAYOUTS[7], set()), (LAYOUTS[12], set())):
            held = Held(TensorSpec("w", "float32", (size,), layout), [(Box((0,), (size,)), view)])
            assert small_values([held]).keys() == expected
        grid = Rule(Mesh((2, 2), range(4)), ("R", "R"))
        held = Held(TensorSpec("w", "float32", (size,), grid), [(Box((0,), (size,)), view)])
        assert small_values([held]).keys() == {"w"}


def changed_bytes_that_count(size):
    """Return of which bytes a change is seen, by changing each."""
    data = torch.zeros(size, dtype=torch.uint8)
    before, seen = small_values([plain("w", data)]), []
    for at in range(size):
        data[at] = 1
        if small_values([plain("w", data)]) != before:
            seen.append(at)
        data[at] = 0
    return seen


def test_up_to_16_kib_every_byte_is_compared_and_above_it_a_sample():
    assert changed_bytes_that_count(16 << 10) == list(range(16 << 10))
    size = (16 << 10) + 77
    seen = changed_bytes_that_count(size)
    assert seen[:512] == list(range(512))
    assert seen[-512:] == list(range(size - 512, size))
    assert 8 * 512 <= len(seen) <= 9 * 512
    jumps = [b - a for a, b in itertools.pairwise(seen) if b - a > 1]
    assert len(jumps) == 8
    assert max(jumps) < size // 8, "they are evenly spread"


DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool, torch.uint8,
    torch.int64, torch.uint16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.complex32, torch.float4_e2m1fn_x2,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sample_does_not_depend_on_strides(dtype):
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 2, (211, 101 * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)
    apart = torch.zeros(211, 2, 101 * dtype.itemsize, dtype=torch.uint8)
    apart[:, 0] = data.view(torch.uint8)
    other = apart.view(dtype)[:, 0]
    assert not other.is_contiguous()
    assert small_values([plain("w", other)]) == small_values([plain("w", data)])
    apart[-1, 0, -1] += 1
    assert small_values([plain("w", other)]) != small_values([plain("w", data)])


def test_a_sample_of_conjugates_negatives_and_expanded_tensors():
    z = torch.randn(60, 70, dtype=torch.complex64, generator=torch.Generator().manual_seed(2))
    dense = small_values([plain("w", z.conj().resolve_conj())])
    assert small_values([plain("w", z.conj())]) == dense
    assert small_values([plain("w", z.t().contiguous().conj().t())]) == dense
    assert small_values([plain("w", z)]) != dense
    x = z.real.contiguous().repeat(2, 1)
    assert small_values([plain("w", torch._neg_view(x))]) == small_values([plain("w", -x)])
    assert small_values([plain("w", x)]) != small_values([plain("w", -x)])
    assert small_values([plain("w", torch.ones(1).expand(9999))]) == small_values([plain("w", torch.ones(9999))])


def test_layouts_in_words():
    assert layout_words(LAYOUTS[12]) == "in boxes"
    assert layout_words(LAYOUTS[7]) == "S(0), R on a mesh 2 x 2 of ranks 0...3"
    assert layout_words(LAYOUTS[6]) == "S(0) on a mesh 2 of ranks 0, 2"
