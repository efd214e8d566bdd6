"""Self-test: does this machine's torch draw as the package's model of it says, and what is bitwise here?

Everything is compared with plain torch on whole tensors, with published numbers, or with a table of the doctor's own.
"""

from __future__ import annotations

import contextlib
import warnings

import torch

from .._draw.mode import active_sampler
from .._fingerprint import fingerprint
from ..errors import RandomError
from .calls import check_calls
from .fills import check_fills
from .report import Finding, Report, Verdict
from .stream import check_stream

__all__ = ["Finding", "Report", "Verdict", "doctor"]


def doctor() -> Report:
    """Test this machine's torch against the model by which sharded tensors are drawn; takes a few seconds.

    Needs no process group. Generators and the number of threads are afterwards what they were before, and torch's
    default device does not matter.

    Returns:
        A report: `print` shows it, `ok` says whether all is as expected, `to_dict()` is for JSON.

    Raises:
        RandomError: within a block of `portable` or `emulate_cuda`, which replace the generators to be tested.
    """
    if active_sampler() is not None:
        raise RandomError("doctor() tests torch's own generators; call it outside of portable() and emulate_cuda()")
    here = fingerprint()
    threads = torch.get_num_threads()
    devices = [torch.cuda.current_device()] if here.gpu is not None else []
    elsewhere = torch.get_default_device().type != "cpu"
    with contextlib.ExitStack() as block:
        if elsewhere:  # some of torch's own calls, which are tested as users write them, ask for it
            block.enter_context(torch.device("cpu"))
        block.enter_context(torch.random.fork_rng(devices))
        block.enter_context(torch.no_grad())
        block.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", UserWarning)  # float32 cannot hold every integer below 2**28: that is the point
        try:
            findings = [*check_stream(), *check_fills(torch.device("cpu")), *check_calls()]
            for index in devices:
                findings += check_fills(torch.device("cuda", index))
        finally:
            torch.set_num_threads(threads)
    return Report(here, tuple(findings))
