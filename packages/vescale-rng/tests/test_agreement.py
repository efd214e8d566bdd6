"""`check_agreement` on real ranks: who differs is named on every rank, and no generator moves."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_rng import DeviceProfile, EmulatedGenerator, PortableGenerator
from vescale_rng._agreement import check_agreement, compare_rows, gather_rows, name_ranks, state_hash
from vescale_rng.errors import AgreementError
from vescale_testing import fake_ranks


def refusal(mesh: object = None, generator: Any = None, **options: str) -> str:
    """The message that *this* rank gets; its generators stay where they were."""
    generator_before = generator.get_state() if generator else None
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(AgreementError) as caught:
        check_agreement(mesh, generator, **options)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before[0])
    if generator is not None and generator_before is not None:
        assert torch.equal(generator.get_state(), generator_before)
    assert random.getstate() == before[1]
    return str(caught.value)


@pytest.mark.ranks(2)
def test_equal_states_agree_and_stay(rank: int) -> None:
    torch.manual_seed(2**63 + 11)
    torch.randn(3)  # leaves a cached normal
    before = torch.get_rng_state()
    check_agreement()
    check_agreement(dist.group.WORLD)
    check_agreement(init_device_mesh("cpu", (2,)))
    check_agreement(device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.ranks(2)
def test_of_two_ranks_the_lower_one_counts(rank: int) -> None:
    torch.manual_seed(5 + rank)
    said = refusal()
    assert "generator of cpu" in said
    assert "all 2 ranks of the world: rank 1 differs from rank 0." in said
    assert "Seeds differ: 5 on rank 0, 6 on rank 1." in said
    assert "torch.manual_seed(seed)" in said


@pytest.mark.ranks(4)
def test_on_a_mesh_coordinates_are_named(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check_agreement(mesh)
    if rank == 2:
        torch.rand(1)
    said = refusal(mesh)
    assert (
        "mesh(dp=2, tp=2): rank 2 (dp=1, tp=0) differs from ranks 0 (dp=0, tp=0), 1 (dp=0, tp=1), 3 (dp=1, tp=1)."
        in said
    )
    assert "The seed is 0 on all of them, so some drew more" in said

    if rank < 2:  # sub-meshes: ranks 0 and 1 agree with each other, 2 and 3 do not
        check_agreement(mesh["tp"])
    else:
        assert "mesh(tp=2): rank 3 (tp=1) differs from rank 2 (tp=0)." in refusal(mesh["tp"])


@pytest.mark.ranks(4)
def test_without_names_and_with_ranks_in_any_order(rank: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]))
    torch.manual_seed(100 if rank in (1, 2) else rank)
    said = refusal(mesh)
    assert "mesh(0=2, 1=2): ranks 0 (0=1, 1=0), 3 (0=0, 1=0) differ from ranks 1 (0=0, 1=1), 2 (0=1, 1=1)." in said


@pytest.mark.ranks(4)
def test_ranks_outside_have_nothing_to_agree_with(rank: int) -> None:
    torch.manual_seed(rank)
    group = dist.new_group([1, 3])
    mesh = DeviceMesh("cpu", [1, 3])
    if rank in (1, 3):
        assert "the process group: rank 3 differs from rank 1." in refusal(group)
        assert "mesh(0=2): rank 3 (0=1) differs from rank 1 (0=0)." in refusal(mesh)
    else:
        check_agreement(group)
        check_agreement(mesh)


@pytest.mark.ranks(2)
def test_a_generator_of_the_user_is_compared(rank: int) -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(rank)  # the default one is not asked
    check_agreement(None, generator)
    torch.randn(1, generator=generator)
    check_agreement(None, generator)
    # The same raw position, but one rank holds a cached normal and the other does not.
    torch.randn(1, generator=generator) if rank else torch.randn(2, generator=generator)
    torch.rand(4, generator=generator) if rank else None
    assert "rank 1 differs from rank 0" in refusal(None, generator)


@pytest.mark.ranks(2)
def test_meta_device_and_other_default_dtype_do_not_disturb(rank: int) -> None:
    with torch.device("meta"):
        check_agreement()
        torch.manual_seed(rank)
        assert "rank 1 differs" in refusal()


def test_one_process_and_a_fake_group_agree() -> None:
    check_agreement()
    check_agreement(generator=torch.Generator())
    with fake_ranks(8, rank=3):
        check_agreement()
        check_agreement(init_device_mesh("cpu", (2, 4)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["portable", "emulated"])
def test_generators_of_this_package_are_compared(rank: int, kind: str) -> None:
    def made(seed: int) -> Any:
        return PortableGenerator(seed) if kind == "portable" else EmulatedGenerator(DeviceProfile.of("H100"), seed)

    check_agreement(None, made(5))
    said = refusal(None, made(rank))
    assert f"the {type(made(0)).__name__} is not in the same state on all 2 ranks" in said
    assert "Seeds differ: 0 on rank 0, 1 on rank 1" in said


def test_arguments_are_checked() -> None:
    """Also where there is nobody to agree with."""
    for mesh in (5, [0, 1], "cpu"):
        with pytest.raises(TypeError, match=f"mesh must be a DeviceMesh, .* got {type(mesh).__name__}"):
            check_agreement(mesh)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"generator: expected a random generator, got 5 \(int\)"):
        check_agreement(None, 5)  # type: ignore[arg-type]
    for device in ("foo", [1]):
        with pytest.raises(TypeError, match=r"device = .*: expected a device of torch"):
            check_agreement(device=device)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device = 'cuda': this torch sees no such device"):
            check_agreement(device="cuda")
    check_agreement(device="cpu")
    check_agreement(None, PortableGenerator(1))
    with pytest.raises(ValueError, match="device = meta; give one of them"):
        check_agreement(None, torch.Generator(), device="meta")
    with fake_ranks(2), pytest.raises(TypeError, match="got list"):
        check_agreement([0, 1])  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_a_device_without_a_generator_is_named(rank: int) -> None:
    with pytest.raises(ValueError, match=r"device = 'meta' has no random generator"):
        check_agreement(device="meta")


@pytest.mark.ranks(4)
def test_rows_are_gathered_over_every_dim(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2))
    assert gather_rows([rank * 10, -(2**63)], mesh) == {r: [r * 10, -(2**63)] for r in range(4)}


def test_the_majority_counts() -> None:
    assert compare_rows({0: [1, 2], 1: [1, 2]}) is None
    assert compare_rows({0: [9], 1: [4], 2: [4], 3: [5]}) == ([0, 3], [1, 2])
    assert compare_rows({4: [1], 2: [2]}) == ([4], [2])


def test_many_ranks_are_counted() -> None:
    assert name_ranks([7], None) == "rank 7"
    assert name_ranks(range(20), None).endswith("14, 15 and 4 more")


def test_the_hash_sees_the_cached_normal() -> None:
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.randn(1, generator=one)
    torch.rand(4, generator=other)
    assert one.get_state()[16:5016].equal(other.get_state()[16:5016])
    assert state_hash(one) != state_hash(other)
