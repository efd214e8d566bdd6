"""Guards at the paths into torch that do not dispatch, where a DTensor would pass for its local part.

Two kinds. Functions that do dispatch but cannot be done get a handler that says so. Those that never
ask the class are wrapped, once, at import; the wrappers look at the class of one argument and call
the original. All changes that this package makes to torch:

==============================================  ======================================================
changed                                         because
==============================================  ======================================================
``autograd.Function.apply``                     does not dispatch; backward would get local parts
``autograd._engine_run_backward``               dispatch modes would get saved leaves as DTensors
``autograd.graph.get_gradient_edge``            the engine knows an edge's local part only
``utils.checkpoint._CheckpointFrame``           recomputation would get local arguments
``utils.hooks.BackwardHook._apply_on_tensors``  module hooks would get local gradients
``Module._maybe_warn_non_full_backward_hook``   refuses hooks that would get local gradients
``optim.<elementwise>.step`` (11 classes)       step hooks do not run on errors (see `_optim`)
``_foreach_supported_types`` (two lists)        foreach kernels are chosen by exact class
``nn.utils.clip_grad._get_total_norm``          without foreach it reduces once per gradient
``_functorch`` wrap and nesting functions       vmap and func.* work on the storage
``forward_ad.enter_dual_level``, ``exit_...``   tangents are lost where data move
``torch.tensor``, ``as_tensor``, ``asarray``    read elements of lists in C++
``Tensor.new_tensor``, ``new``, ``set_``        alias or copy the storage
``autograd.Variable(...)``                      aliases the storage
``torch.sparse_*_tensor``, ``nested_tensor``    take the storage of their values
``to_dlpack``                                   exports the storage
``jit.trace``, ``jit.script``, ``export``       record local sizes, or run in C++ on the storage
``jit.ScriptFunction.__call__``                 runs in C++ on the storage
``fx.experimental.proxy_tensor.make_fx``        its graph would lack all communication
``torch.compile``                               must hear that the class is not traceable
``torch.cond``, ``torch.while_loop``            compile, which cannot trace the class
``nn.attention._utils._validate_sdpa_input``    flex_attention compiles as well
``autograd.gradcheck``, ``gradgradcheck``       change elements of the storage
``Tensor.data_ptr``                             safetensors reads as many bytes there as the whole has
``nn.init.sparse_``                             makes plain indices, which are alike on all ranks
``nn.parallel.DistributedDataParallel``         takes the shards of its ranks for copies of one tensor
==============================================  ======================================================

What stays open, because wrapping it would break or slow more than it guards: `torch.Tensor(x)` and the
other legacy constructors, `plain.data = x` and `plain.grad = x` (setters of a plain tensor),
`as_subclass`, storages (`untyped_storage`), and methods of a `ProcessGroup` object. They
give the local part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from ._autograd import install as install_autograd
from ._comm.move import strip
from ._dispatch import policy
from ._dispatch.table import register
from ._irregular import is_cut
from ._patching import guard_argument, holds_dtensor, refusal, replace_once
from ._spec import Spec
from ._tensor import TABLE, DTensor
from .errors import UnsupportedOperationError
from .placements import P

_on = torch._C._is_torch_function_enabled


def _guard_data(name: str, *, position: int, conversion: bool = False) -> Callable[[Any], Any]:
    """Wrap a function that makes a tensor of its argument at `position`; a bare `conversion` is let through."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            data = args[position] if len(args) > position else kwargs.get("obj", kwargs.get("data"))
            cls = data.__class__
            if cls is DTensor:
                if _on() and not (conversion and len(args) + len(kwargs) == 1):
                    raise refusal(
                        f"{name} of a DTensor",
                        "Use x.detach().clone() for a copy, x.to(...) to convert, or x.full_tensor() for the whole",
                    )
            elif (cls is list or cls is tuple) and holds_dtensor(data) and _on():
                raise refusal(
                    f"{name} of a list of DTensors",
                    "Use torch.stack(list), or [x.item() for x in list] for Python numbers",
                )
            return original(*args, **kwargs)

        return wrapper

    return make


def _guard_set(original: Any) -> Any:
    """Wrap `set_`, which only two DTensors or two plain tensors may share memory by."""
    refuse = guard_argument("Tensor.set_", "Assign x.data = y between DTensors, or copy with x.copy_(y)")(original)

    @functools.wraps(original)
    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        both = self.__class__ is DTensor and len(args) == 1 and args[0].__class__ is DTensor
        return (original if both else refuse)(self, *args, **kwargs)

    return set_


def _announce(original: Any, wrapper: Any) -> None:
    """Tell the parts of torch that know a factory by identity: `with torch.device(...)` and TorchScript."""
    from torch.jit import _builtins
    from torch.utils import _device

    _device._device_constructors().update((original, wrapper))
    operator = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator is not None:
        _builtins._register_builtin(wrapper, operator)


def _guard_constructors() -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        before = getattr(torch, name)
        replace_once(torch, name, _guard_data(f"torch.{name}", position=0, conversion=name != "tensor"))
        _announce(before, getattr(torch, name))
    for name in _SPARSE_CONSTRUCTORS:
        before = getattr(torch, name)
        replace_once(torch, name, guard_argument(f"torch.{name}", "Use full_tensor() for the whole as a plain tensor"))
        _announce(before, getattr(torch, name))
    replace_once(torch.nested, "nested_tensor", _guard_data("torch.nested.nested_tensor", position=0))
    for name in ("new_tensor", "new"):
        replace_once(Tensor, name, _guard_data(f"Tensor.{name}", position=1))
    replace_once(Tensor, "set_", _guard_set)
    _guard_variable()


def _guard_variable() -> None:
    from torch.autograd.variable import VariableMeta

    if "__call__" in vars(VariableMeta):
        return

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0].__class__ is DTensor and _on():
            raise refusal("Variable(DTensor)", "Leave Variable out: a DTensor takes part in autograd as it is")
        return type.__call__(cls, *args, **kwargs)

    VariableMeta.__call__ = __call__  # type: ignore[method-assign, assignment]


def _guard_export() -> None:
    instead = "Use full_tensor() for the whole, or to_local() if the part is what you mean"
    for owner in (torch, torch.utils.dlpack):
        replace_once(owner, "to_dlpack", guard_argument("to_dlpack", instead))


def _let_sparse_init(original: Any) -> Any:
    """Take the random rows that `sparse_` picks for the same on every rank, since generators are in step."""

    @functools.wraps(original)
    def wrapper(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.__class__ is not DTensor:
            return original(tensor, *args, **kwargs)
        policy.state.inside_modules += 1
        try:
            return original(tensor, *args, **kwargs)
        finally:
            policy.state.inside_modules -= 1

    return wrapper


# ------------------------------------------------------------------ what dispatches but cannot be done


def _unsupported(what: str, instead: str) -> Callable[..., Any]:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise UnsupportedOperationError(f"{what} is not supported for DTensors. {instead}")

    return handler


def _is_whole(spec: Spec) -> bool:
    return all(not (t == P or is_cut(t)) or size == 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True))


def _local_or_refuse(what: str) -> Callable[..., Any]:
    """Handler of an export: allowed where the local part is the whole."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if not (isinstance(x, DTensor) and _is_whole(x._spec)):
            raise refusal(what, "Use full_tensor() for the whole, or to_local() if the part is what you mean")
        return func(strip(x).detach(), *args[1:], **kwargs)

    return handler


_SPARSE_CONSTRUCTORS = (
    "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
    "sparse_compressed_tensor",
)  # fmt: skip
_SPARSE = "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_mkldnn"


def _register_refusals() -> None:
    whole = "Use full_tensor() for the whole as a plain tensor"
    register(_SPARSE, _unsupported("conversion to a sparse or MKLDNN layout", whole))
    register(
        "quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic",
        _unsupported("quantization to a quantized dtype", whole),
    )
    nested = torch._C._nested.nested_tensor  # type: ignore[attr-defined]
    TABLE[nested] = _unsupported("a nested tensor of DTensors", whole)
    register("_nested_tensor_from_tensor_list _nested_view_from_buffer _nested_from_padded", TABLE[nested])
    TABLE[Tensor.__dlpack__] = _local_or_refuse("DLPack export")
    TABLE[Tensor.data_ptr] = _local_or_refuse("data_ptr(), asked by a kernel or by a file format such as safetensors,")
    register(
        "rename rename_ align_to align_as refine_names", _unsupported("a named tensor", "Name the mesh axes instead")
    )
    register(
        "_make_dual _fw_primal", _unsupported("forward-mode differentiation", "Use backward or torch.autograd.grad")
    )


def install() -> None:
    """Put all guards in place; may be called again."""
    from . import _clip, _dcp, _ddp, _gradcheck, _optim, _tracers, _transforms

    install_autograd()
    _optim.install()
    _clip.install()
    _dcp.install()
    _ddp.install()
    _register_refusals()
    _guard_constructors()
    _transforms.install()
    _guard_export()
    _tracers.install()
    _gradcheck.install()
    replace_once(torch.nn.init, "sparse_", _let_sparse_init)
