"""Run torch operators on private buffers while the caller's modes look away.

A generator must move on the same way inside a dispatch mode, a function mode, ``torch.func`` or inference mode; none of
them may see, fake or keep the buffers that the words are drawn into.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = ["modes_active", "plain_torch"]

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def modes_active() -> bool:
    """Whether a mode or a ``torch.func`` transform would see the operators that run now (0.2 us)."""
    return bool(_dispatch_modes() or _function_modes()) or _transform() is not None


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run the block as plain torch on plain tensors, whatever modes are active around it."""
    with ExitStack() as stack:
        if _transform() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._DisableTorchDispatch())
        # A buffer made in inference mode could not be written to outside of it.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield
