"""Fingerprints: what they hold, what a difference is said to change, and their comparison over ranks."""

import dataclasses
import json
import os
import platform
import subprocess
import sys

import pytest
import torch

import vescale_rng
from vescale_rng import _fingerprint
from vescale_rng._fingerprint import Fingerprint, check_fingerprints, fingerprint
from vescale_rng.errors import AgreementError
from vescale_testing import fake_ranks

CPU = Fingerprint("2.13.0+cpu", "AVX512", "x86_64", None, None, None, "0.1.0", 1)
GPU = dataclasses.replace(CPU, gpu="NVIDIA H200", sm_count=132, threads_per_sm=2048)


def test_it_describes_this_machine() -> None:
    here = fingerprint("cpu")
    assert here.torch == str(torch.__version__)
    assert here.cpu_capability == torch.backends.cpu.get_cpu_capability()
    assert here.machine == platform.machine()
    assert here.vescale_rng == vescale_rng.__version__
    assert (here.gpu, here.sm_count, here.threads_per_sm) == (None, None, None)


def test_the_gpu_is_that_of_the_device() -> None:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        assert fingerprint("cuda:0").gpu == properties.name
        assert fingerprint("cuda:0").sm_count == properties.multi_processor_count
        assert fingerprint() == fingerprint(torch.device("cuda"))
    else:
        assert fingerprint() == fingerprint("cpu")
        with pytest.raises(ValueError, match="device = 'cuda': this torch sees no GPU"):
            fingerprint("cuda")


def test_it_goes_through_json_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    for one in (CPU, GPU, fingerprint()):
        assert Fingerprint.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dict_may_know_more_but_not_less() -> None:
    fields = CPU.to_dict()
    assert Fingerprint.from_dict({**fields, "later": 1}) == CPU
    del fields["gpu"], fields["torch"]
    with pytest.raises(ValueError, match="it lacks torch, gpu "):
        Fingerprint.from_dict(fields)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"torch": "2.12.1+cpu"}, ["torch 2.13.0+cpu and 2.12.1+cpu", "may change values and draw counts"]),
        ({"torch": "2.13.0+cu126"}, ["two builds of one release", "on GPUs last bits may differ"]),
        ({"cpu_capability": "DEFAULT"}, ["AVX512 and DEFAULT", "last bits differ", "normals", "ATEN_CPU_CAPABILITY"]),
        ({"machine": "aarch64", "cpu_capability": "SVE256"}, ["architecture x86_64 and aarch64"]),
        ({"stream_law": 2}, ["stream law 1 and 2", "other numbers"]),
        ({"vescale_rng": "0.2.0", "stream_law": 3}, ["stream law 1 and 3 (vescale_rng 0.1.0 and 0.2.0)"]),
        ({"gpu": None, "sm_count": None, "threads_per_sm": None}, ["GPU NVIDIA H200 (132 SMs", "and none"]),
        ({"gpu": "NVIDIA H100"}, ["270336 threads", "last bits of normals"]),
        (
            {"gpu": "NVIDIA A100", "sm_count": 108},
            ["NVIDIA A100 (108 SMs of 2048 threads)", "tensors of more than 221184 elements"],
        ),
    ],
)
def test_each_difference_says_what_it_changes(change: dict[str, object], texts: list[str]) -> None:
    other = dataclasses.replace(GPU, **change)  # type: ignore[arg-type]
    (sentence,) = GPU.compare(other)
    for text in texts:
        assert text in sentence
    assert len(other.compare(GPU)) == 1
    with pytest.raises(AgreementError) as caught:
        GPU.check(other)
    assert sentence in str(caught.value)
    with pytest.warns(RuntimeWarning) as warned:
        GPU.check(other, on_mismatch="warn")
    assert sentence in str(warned[0].message)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"torch": "2.13.0"}, ["two builds of one release; the same numbers are expected on the CPU"]),
        ({"cpu_capability": "AVX2"}, ["AVX512 and AVX2", "equal bits for every random operator", "gumbel_softmax"]),
        ({"vescale_rng": "0.2.0"}, ["vescale_rng 0.1.0 and 0.2.0", "the same numbers by design"]),
    ],
)
def test_harmless_differences_are_told_and_never_raise(change: dict[str, object], texts: list[str]) -> None:
    other = dataclasses.replace(CPU, **change)  # type: ignore[arg-type]
    (sentence,) = CPU.compare(other)
    for text in texts:
        assert text in sentence
    with pytest.warns(RuntimeWarning, match="though they should not") as warned:
        CPU.check(other)
    assert sentence in str(warned[0].message)
    with pytest.raises(AgreementError, match="stream law"):  # beside a harmful one it is told, too
        CPU.check(dataclasses.replace(other, stream_law=7))


def test_what_a_checkpoint_carries_can_be_given() -> None:
    saved = json.loads(json.dumps(CPU.to_dict()))
    CPU.check(saved)
    with pytest.raises(AgreementError, match=r"torch 2.13.0.cpu and 2.12.1"):
        CPU.check({**saved, "torch": "2.12.1"})
    with pytest.raises(ValueError, match="it lacks torch"):
        CPU.check({name: value for name, value in saved.items() if name != "torch"})
    for other in (None, "2.13", 5):
        with pytest.raises(TypeError, match="other: expected a Fingerprint, or what its to_dict"):
            CPU.check(other)  # type: ignore[arg-type]


def test_equal_ones_pass_and_several_differences_are_all_told() -> None:
    GPU.check(GPU)
    assert GPU.compare(dataclasses.replace(GPU)) == []
    assert len(GPU.compare(dataclasses.replace(CPU, torch="2.11.0", cpu_capability="AVX2", stream_law=2))) == 4
    with pytest.raises(ValueError, match='expected "raise" or "warn"'):
        GPU.check(GPU, on_mismatch="ignore")  # type: ignore[arg-type]


def test_every_field_is_compared() -> None:
    for field in dataclasses.fields(Fingerprint):
        value = getattr(GPU, field.name)
        changed = value + 1 if isinstance(value, int) else "other"
        assert GPU.compare(Fingerprint.from_dict({**GPU.to_dict(), field.name: changed})), field.name


def test_the_kernels_of_a_process_are_seen() -> None:
    script = "from vescale_rng._fingerprint import fingerprint; print(fingerprint('cpu').cpu_capability)"
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "DEFAULT"


@pytest.mark.ranks(4)
def test_ranks_that_differ_are_named_on_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    before = torch.get_rng_state()
    check_fingerprints()
    check_fingerprints(mesh)
    mine = CPU if rank != 3 else dataclasses.replace(CPU, cpu_capability="DEFAULT", torch="2.12.1")
    monkeypatch.setattr(_fingerprint, "fingerprint", lambda: mine)
    with pytest.raises(AgreementError) as caught:
        check_fingerprints(mesh)
    said = str(caught.value)
    mine = CPU if rank != 3 else dataclasses.replace(CPU, cpu_capability="AVX2")
    with pytest.warns(
        RuntimeWarning, match="(?s)ranks differ, though they should draw the same numbers.*AVX2 and AVX512"
    ):
        check_fingerprints(mesh)
    assert "compared with ranks 0 (dp=0, tp=0), 1 (dp=0, tp=1), 2 (dp=1, tp=0):" in said
    assert "- rank 3 (dp=1, tp=1): torch 2.12.1 and 2.13.0+cpu" in said
    assert "- rank 3 (dp=1, tp=1): CPU kernels DEFAULT and AVX512" in said
    assert torch.equal(torch.get_rng_state(), before)


def test_one_process_and_a_fake_group_have_one_fingerprint() -> None:
    check_fingerprints()
    with fake_ranks(4):
        check_fingerprints()
