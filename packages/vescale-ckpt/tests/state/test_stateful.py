"""Tensors that an object does not have yet when a state is loaded into it."""

import torch

from vescale_ckpt._state import missing_like


class Sharded:
    """Allocates what it is to hold of a tensor by itself."""

    def allocate_state(self, path: tuple[object, ...], shape: tuple[int, ...], dtype: torch.dtype) -> object:
        return torch.zeros(shape[0] // 2, dtype=dtype) if path[-1] == "momentum" else None


def test_an_object_may_allocate_what_is_missing_itself() -> None:
    made = missing_like(Sharded(), ("state", "w", "momentum"), (4,), torch.bfloat16)
    assert made is not None
    assert (made.shape, made.dtype) == ((2,), torch.bfloat16)
    assert missing_like(Sharded(), ("state", "w", "step"), (), torch.float32) is None
    assert missing_like(object(), ("state", "w", "momentum"), (4,), torch.float32) is None
