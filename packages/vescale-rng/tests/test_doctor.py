"""The doctor: all is well on this machine, and each way in which torch or a law could differ is found and named."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_rng import _doctor
from vescale_rng._doctor import Report, calls, cases, doctor, fills, laws, stream
from vescale_rng._draw import cpu, cpu_sources
from vescale_rng._draw.fill import scope
from vescale_rng._draw.forms import CLOSED_FORM
from vescale_rng._draw.mode import use_sampler
from vescale_rng._draw.whole import WHOLE
from vescale_rng._streams.advance import advance_words
from vescale_rng.errors import RandomError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def report() -> Report:
    torch.manual_seed(31)
    torch.randn(3)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.is_grad_enabled()
    found = doctor()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == before[1:]
    return found


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, _doctor.Finding]]:
    """Try some operators of closed form; the findings by name."""

    def run(*names: str) -> dict[str, _doctor.Finding]:
        chosen = tuple(case for case in cases.FILLS if case.name in names)
        assert len(chosen) == len(names)
        monkeypatch.setattr(fills, "FILLS", chosen)
        return {finding.name: finding for finding in fills.check_fills(CPU)}

    return run


def test_what_fails_must_fail_twice() -> None:
    answers = iter(["once", "", "", "first", "second"])
    assert [stream.guarded(lambda: next(answers)) for _ in range(3)] == ["", "", "second"]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_default_device_does_not_matter(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fills, "FILLS", cases.FILLS[:2])
    with torch.device(device):
        assert [f for f in doctor().findings if not f.ok] == []


@pytest.mark.slow
def test_all_is_well_here(report: Report) -> None:
    assert [f for f in report.findings if not f.ok] == []
    assert report.ok
    text = str(report)
    assert text.endswith("All is as expected.")
    assert "NOT bitwise" not in text
    for line in (
        "exponential_(1.5)",
        "bitwise (closed form)",
        "multinomial with replacement",
        "bitwise (drawn whole)",
        "mt19937 words",
        f"share torch {torch.__version__}",
        torch.backends.cpu.get_cpu_capability(),
    ):
        assert line in text
    assert ("CUDA was not looked at" in text) is not torch.cuda.is_available()


@pytest.mark.slow
def test_the_report_goes_through_json(report: Report) -> None:
    read = json.loads(json.dumps(report.to_dict()))
    assert read["ok"] is True
    assert read["fingerprint"] == report.fingerprint.to_dict()
    assert len(read["findings"]) == len(report.findings)
    assert {"section": "cpu", "name": "randperm", "verdict": "drawn whole", "ok": True}.items() <= {
        **next(f for f in read["findings"] if f["name"] == "randperm")
    }.items()
    assert read["summary"] == report.summary()


def test_every_operator_that_the_package_draws_is_tried() -> None:
    assert {case.op for case in cases.FILLS} >= CLOSED_FORM - {"normal", "bernoulli", "randint_like"}
    named = " ".join(call.name for call in cases.CALLS)
    assert [op for op in WHOLE if op not in named] == []
    assert all(scope(case.op) == "local" for case in cases.FILLS)


def test_a_broken_law_is_found_and_named(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(f.ok for f in examine("rand", "geometric_(0.3)", "randn").values())  # the laws are trusted from here on
    monkeypatch.setattr(cpu_sources.Even, "finish", lambda self: self.seek(self.numel * self.words + 1))
    found = examine("rand", "geometric_(0.3)", "randn")
    assert found["rand"].verdict == found["geometric_(0.3)"].verdict == "NOT bitwise"
    assert "leaves the generator in another state than torch does" in found["rand"].why
    assert set(found["rand"].dtypes) == {"float32", "float64", "bfloat16", "float16", "complex64", "complex128"}
    assert found["randn"].ok  # another law


def test_wrong_values_are_found_with_their_place(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert examine("normal_(1, 0.02)")["normal_(1, 0.02)"].ok
    emit = cpu_sources.Blocks.emit

    def wrong(self: Any, out: Tensor, start: int, params: tuple[Any, ...]) -> None:
        emit(self, out, start, params)
        out.neg_()

    monkeypatch.setattr(cpu_sources.Blocks, "emit", wrong)
    (finding,) = examine("normal_(1, 0.02)").values()
    assert finding.verdict == "NOT bitwise"
    assert finding.why.startswith("part 0 of 3 along dim 0 of a tensor of shape (37,) is not the slice")


def forget() -> None:
    """Forget which laws were found to hold."""
    for cached in vars(cpu).values():
        if hasattr(cached, "cache_clear"):
            cached.cache_clear()


def test_a_law_that_the_package_gave_up_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_sources.Even, "finish", lambda self: self.seek(self.numel * self.words + 1))
    forget()  # as in a process that starts with such a torch
    try:
        (finding,) = examine("exponential_(1.5)").values()
    finally:
        forget()
    assert finding.verdict == "drawn whole"
    assert not finding.ok
    assert "torch does not keep the law" in finding.why


def test_another_torch_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.Tensor.exponential_

    def greedy(self: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
        real(self, lambd, generator=generator)
        torch.rand(1, generator=generator)
        return self

    assert examine("exponential_(1.5)")["exponential_(1.5)"].ok
    monkeypatch.setattr(torch.Tensor, "exponential_", greedy)
    (finding,) = examine("exponential_(1.5)").values()
    assert finding.verdict == "NOT bitwise"
    assert "another state than torch does" in finding.why
    assert {f.name: f for f in stream.check_stream()}["order of elements"].ok


def test_another_number_of_words_is_found(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [case for case in cases.FILLS if case.name == "cauchy_(1, 2)"]
    other = dataclasses.replace(case, law=laws.fixed(1))
    monkeypatch.setattr(cases, "FILLS", (other,))
    (finding,) = examine("cauchy_(1, 2)").values()
    assert not finding.ok
    assert finding.why == "torch does not take the 37 words that the model says for a tensor of shape (37,)"


def test_dtypes_that_fail_get_a_line_of_their_own(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def law(numel: int, dtype: torch.dtype, contiguous: bool, waits: bool) -> laws.After:
        return numel + (dtype == torch.float16), waits

    (case,) = [case for case in cases.FILLS if case.name == "rand_like"]
    monkeypatch.setattr(fills, "FILLS", (dataclasses.replace(case, law=law, dtypes=(torch.float16, torch.float32)),))
    bad, good = fills.check_fills(CPU)
    assert (bad.dtypes, good.dtypes) == (("float16",), ("float32",))
    assert (bad.ok, good.ok) == (False, True)


def test_an_exception_is_a_finding(examine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(fills, "fill", fail)
    monkeypatch.setattr(stream, "jump_blocks", fail)
    assert examine("rand")["rand"].why == "RuntimeError: no such kernel"
    assert {f.name: f.why for f in stream.check_stream()}["jump ahead"] == "RuntimeError: no such kernel"


def test_a_wrong_jump_and_a_wrong_word_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.ok for finding in stream.check_stream())
    monkeypatch.setattr(stream, "advance_words", lambda g, words: advance_words(g, words + (words > 1000)))
    monkeypatch.setattr(stream, "_PUBLISHED", {1: 3499211612, 2: 581869302, 10000: 4123659996})
    found = {f.name: f for f in stream.check_stream()}
    assert found["jump ahead"].why == "3000001 words from word 4 lead to another state than drawing them"
    assert found["mt19937 words"].why == "these differ from the published ones: 10000"
    assert found["bytes of the state"].ok


def call(run: Callable[[], Any], words: int | None = None, **options: Any) -> str:
    return calls._differs(cases.Call("a call", run, words, "closed form", **options))


def test_what_a_call_does_otherwise_is_told() -> None:
    x = torch.ones(20, 5)
    threads = torch.get_num_threads()
    try:
        assert call(lambda: torch.dropout(x, 0.3, True), 200, mask=(20, 5)) == ""
        assert "not take the 100 words" in call(lambda: torch.dropout(x, 0.3, True), 100)
        assert call(lambda: x, None) == "it takes no words"
        assert "not bernoulli_(0.7)" in call(lambda: torch.dropout(x, 0.4, True), 200, mask=(20, 5))
        assert call(lambda: torch.empty(9).uniform_(), 9, kernels=("uniform_",)) == ""
        assert "uniform_ of 9 elements instead of normal_ of all 9 elements" in call(
            lambda: torch.empty(9).uniform_(), 9, kernels=("normal_",)
        )
        assert "it runs no random kernel" in call(lambda: x, 0, kernels=("normal_",))
        assert "values differ" in call(lambda: torch.tensor(torch.get_num_threads()), 0)
        assert "state differs" in call(lambda: torch.rand(torch.get_num_threads()), 1)
    finally:
        torch.set_num_threads(threads)


def test_bits_are_compared_not_values() -> None:
    assert stream.same_bits(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    assert not stream.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not stream.same_bits(torch.tensor([1 + 0j]), torch.tensor([1 - 0j]).conj().resolve_conj())
    assert stream.same_bits(torch.tensor(float("nan")), torch.tensor(float("nan")))
    assert not stream.same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.int32))
    assert stream.same_bits(torch.zeros(0, 3), torch.zeros(0, 3))


def test_words_on_cuda_follow_the_grid() -> None:
    # From the published template: blocks of 256, four numbers of 32 bits or two of 64 per thread and round.
    assert laws.cuda_increment(0, 4, 132, 2048) == 0
    assert laws.cuda_increment(10, 4, 132, 2048) == 4
    assert laws.cuda_increment(270_336, 2, 132, 2048) == 4
    assert laws.cuda_increment(1_081_344, 4, 132, 2048) == 4
    assert laws.cuda_increment(1_081_345, 4, 132, 2048) == 8
    assert laws.cuda_increment(1_081_344, 2, 132, 2048) == 8
    assert laws.cuda_unroll("random_", torch.int64, 2) == laws.cuda_unroll("uniform_", torch.float64, 2) == 2
    assert laws.cuda_unroll("random_", torch.int64, 1) == laws.cuda_unroll("bernoulli_", torch.float32, 2) == 4


def test_within_another_sampler_it_refuses() -> None:
    with use_sampler(object()), pytest.raises(RandomError, match="outside of portable"):  # type: ignore[arg-type]
        doctor()
