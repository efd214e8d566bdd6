"""Streams of CPU generators against numpy's words, of counted ones against Philox on Python ints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_rng import DeviceProfile, EmulatedGenerator, PortableGenerator, emulate_cuda, portable
from vescale_rng._streams import Stream
from vescale_rng.errors import RandomError

Words = Callable[[int, int], torch.Tensor]
Step = Callable[[torch.Generator, int], None]
MASK = 0xFFFFFFFF


@pytest.mark.parametrize("seed", [0, 77, 2**32 - 1])
@pytest.mark.parametrize(("used", "count"), [(0, 0), (0, 1), (0, 5), (3, 7), (623, 2), (624, 1300), (5000, 641)])
def test_peek(numpy_words: Words, step: Step, seed: int, used: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    step(generator, used)
    before = generator.get_state()
    words = Stream(generator).peek(count)
    assert words.dtype == torch.int64
    assert torch.equal(words, numpy_words(seed, used + count)[used:])
    assert torch.equal(generator.get_state(), before)


def test_peek_of_high_seeds(numpy_words: Words) -> None:
    for seed in (-1, -(2**63), 7 + (5 << 32)):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(Stream(generator).peek(9), numpy_words(seed & MASK, 9))
        assert Stream(generator).seed == seed % 2**64


@pytest.mark.parametrize("words", [0, 1, 624, 3_000_000])
def test_position_and_jump(step: Step, words: int) -> None:
    generator, stepped = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    stream = Stream(generator)
    stream.jump(words)
    step(stepped, words)
    assert torch.equal(generator.get_state(), stepped.get_state())
    assert stream.position == words
    stream.jump(10)
    assert stream.position == words + 10


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**8), st.integers(-(2**63), 2**64 - 1))
def test_round_trip(words: int, seed: int) -> None:
    stream = Stream(torch.Generator().manual_seed(seed))
    stream.jump(words)
    again = Stream(torch.Generator().manual_seed(stream.seed))
    again.jump(stream.position)
    # The low 32 bits of the seed make the stream, all 64 are in the state.
    assert torch.equal(again.generator.get_state(), stream.generator.get_state())


def test_search_limit() -> None:
    generator = torch.Generator().manual_seed(3)
    Stream(generator).jump(1001)
    assert Stream(generator, search_limit=1001).position == 1001
    with pytest.raises(RandomError, match="search_limit"):
        _ = Stream(generator, search_limit=1000).position


def test_default_generator() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        stream = Stream()
        torch.rand(5)
        assert (stream.seed, stream.position) == (12, 5)
        stream.jump(2)
        after = torch.rand(1)
        torch.manual_seed(12)
        assert torch.equal(torch.rand(8)[7:], after)


def test_wrong_arguments() -> None:
    stream = Stream(torch.Generator())
    before = stream.generator.get_state()
    with pytest.raises(ValueError, match="words"):
        stream.jump(-4)
    with pytest.raises(ValueError, match="words"):
        stream.peek(-1)
    with pytest.raises(ValueError, match="subsequence"):
        stream.peek(1, subsequence=1)
    assert torch.equal(stream.generator.get_state(), before)
    with pytest.raises(TypeError, match="get_offset"):
        Stream(type("Odd", (), {"device": torch.device("cuda", 0)})())


def test_repr() -> None:
    assert repr(Stream(torch.Generator().manual_seed(4))) == "Stream(device='cpu', seed=4)"
    assert repr(Stream(Counted(-1, 8))) == f"Stream(device='cuda:0', seed={2**64 - 1}, offset=8)"


class Counted:
    """What a CUDA generator offers: a seed and an offset, in a state of 16 bytes."""

    device = torch.device("cuda", 0)

    def __init__(self, seed: int, offset: int) -> None:
        self._seed, self._offset = seed, offset

    def initial_seed(self) -> int:
        return self._seed

    def get_offset(self) -> int:
        return self._offset

    def set_offset(self, offset: int) -> None:
        if offset % 4:
            raise RuntimeError("offset must be a multiple of 4")
        self._offset = offset


def _philox(seed: int, subsequence: int, counter: int) -> list[int]:
    """Philox4x32-10 on Python ints."""
    c = [counter & MASK, counter >> 32, subsequence & MASK, subsequence >> 32]
    key = [seed & MASK, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [second >> 32 ^ c[1] ^ key[0], second & MASK, first >> 32 ^ c[3] ^ key[1], first & MASK]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return c


def test_oracle_is_philox() -> None:
    """Known answers of Random123 (kat_vectors)."""
    assert _philox(0, 0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert _philox(2**64 - 1, 2**64 - 1, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert _philox(0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 9, 2**64 - 1, -1])
@pytest.mark.parametrize("offset", [0, 4, 40, 2**34, 2**40 + 8, 6])
@pytest.mark.parametrize("count", [0, 1, 4, 7, 33])
def test_peek_of_counted(seed: int, offset: int, count: int) -> None:
    generator = Counted(seed, offset)
    for subsequence in (0, 5, 2**33 + 1):
        words = Stream(generator).peek(count, subsequence=subsequence)
        blocks = [_philox(seed % 2**64, subsequence, offset // 4 + i) for i in range(count // 4 + 2)]
        flat = [word for block in blocks for word in block]
        assert words.tolist() == flat[offset % 4 : offset % 4 + count]
    assert generator.get_offset() == offset


def test_position_and_jump_of_counted() -> None:
    generator = Counted(1, 8)
    stream = Stream(generator)
    assert (stream.seed, stream.position) == (1, 8)
    ahead = stream.peek(20)
    stream.jump(12)
    assert stream.position == generator.get_offset() == 20
    assert torch.equal(stream.peek(8), ahead[12:])
    stream.jump(-20)
    assert stream.position == 0
    for words in (1, 2, -3, -4):
        with pytest.raises(ValueError, match="multiple of 4"):
            stream.jump(words)
    assert stream.position == 0


@pytest.mark.parametrize("count", [0, 5])
def test_peek_under_modes(count: int) -> None:
    streams = [Stream(torch.Generator().manual_seed(1)), Stream(Counted(1, 8))]
    expected = [stream.peek(count) for stream in streams]
    with torch.device("meta"):
        under = [stream.peek(count) for stream in streams]
    for got, want in zip(under, expected, strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, want)
    with torch.inference_mode():
        plain = streams[0].peek(count)
    assert not plain.is_inference()


def test_waiting_tells_what_the_next_normals_take() -> None:
    generator = torch.Generator().manual_seed(1)
    stream = Stream(generator)
    for n in (3, 4, 5, 1, 1):
        torch.rand(2, generator=generator)
        waits = stream.waiting
        other = torch.Generator()
        other.set_state(generator.get_state())
        at = stream.position
        torch.randn(1, generator=other)
        assert waits == (Stream(other).position == at)  # the number that waits costs no word
        torch.randn(n, generator=generator)
    assert not Stream(Counted(1, 8)).waiting


@pytest.mark.parametrize("wrong", [1.5, "a", None, torch.tensor(1.5)])
def test_counts_have_to_be_integers(wrong: Any) -> None:
    for stream in (Stream(torch.Generator()), Stream(Counted(1, 8))):
        before = repr(stream)
        for call in (stream.jump, stream.peek, lambda n, s=stream: s.peek(1, subsequence=n)):
            with pytest.raises(TypeError, match=r"(words|subsequence): expected an integer"):
                call(wrong)
        assert repr(stream) == before


@pytest.mark.parametrize("wrong", [3, "cpu", torch.Generator, object(), torch.tensor(3)])
def test_what_is_no_generator(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"generator: expected a torch.Generator, or one with initial_seed"):
        Stream(wrong)


def test_an_emulated_generator_is_a_stream_and_a_portable_one_is_not() -> None:
    generator = EmulatedGenerator(DeviceProfile.of("A100"), 5)
    stream = Stream(generator)
    u = torch.empty(1)
    source = generator.source("uniform_", torch.float32, torch.device("cpu"), (1,), (1,), ())
    source.emit(u, 0, ())
    source.finish()
    assert (stream.seed, stream.position) == (5, 4)
    stream.jump(-4)
    assert int(stream.peek(1)) == _philox(5, 0, 0)[0]
    assert float(u) == pytest.approx(_philox(5, 0, 0)[0] / 2**32, abs=1e-7)
    stream.jump(8)
    assert generator.get_offset() == 8
    assert repr(stream) == "Stream(EmulatedGenerator, seed=5, offset=8)"
    with pytest.raises(TypeError, match=r"got PortableGenerator\(5, counter=0\).*see its counter"):
        Stream(PortableGenerator(5))


@pytest.mark.parametrize("name", ["portable", "emulate_cuda"])
def test_the_default_generator_within_a_block_is_no_stream(name: str) -> None:
    outside = Stream(torch.Generator().manual_seed(2))
    with portable(5) if name == "portable" else emulate_cuda("A100", seed=5):
        for stream in (Stream(), Stream(torch.default_generator)):
            before = torch.get_rng_state()
            for ask in (
                lambda s: s.position,
                lambda s: s.waiting,
                lambda s: s.jump(1),
                lambda s: s.peek(1),
            ):
                with pytest.raises(RandomError, match=rf"within {name}\(\) torch's default generator"):
                    ask(stream)
            assert torch.equal(torch.get_rng_state(), before)
        outside.jump(3)
        assert outside.position == 3
    assert Stream().position >= 0
