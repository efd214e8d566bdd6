"""Guards at the paths into torch that do not dispatch, where a DTensor would pass for its local part.

Two kinds. Functions that do dispatch but cannot be done get a handler that says so. Those that never
ask the class are wrapped, once, at import; the wrappers look at the class of one argument and call
the original. All changes that this package makes to torch:

==============================================  ======================================================
changed                                         because
==============================================  ======================================================
``autograd.Function.apply``                     does not dispatch; backward would get local parts
``utils.hooks.BackwardHook._apply_on_tensors``  module hooks would get local gradients
``optim.<elementwise>.step`` (11 classes)       step hooks do not run on errors (see `_optim`)
``_foreach_supported_types`` (two lists)        foreach kernels are chosen by exact class
``nn.utils.clip_grad._get_total_norm``          without foreach it reduces once per gradient
``_functorch`` wrap and unwrap functions        vmap and func.* work on the storage
``torch.tensor``, ``as_tensor``, ``asarray``    read elements of lists in C++
``Tensor.new_tensor``, ``new``, ``set_``        alias or copy the storage
``autograd.Variable(...)``                      aliases the storage
``torch.sparse_*_tensor``, ``nested_tensor``    take the storage of their values
``to_dlpack``                                   exports the storage
``jit.trace``, ``jit.trace_module``             trace local sizes
``torch.compile``                               must hear that the class is not traceable
``nn.init.sparse_``                             makes plain indices, which are alike on all ranks
==============================================  ======================================================

What stays open, because wrapping it would break or slow more than it guards: `torch.Tensor(x)` and the
other legacy constructors, `plain.data = x` and `plain.grad = x` (setters of a plain tensor),
`as_subclass`, storages (`untyped_storage`, `data_ptr`), and methods of a `ProcessGroup` object. They
give the local part.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from ._autograd import install as install_autograd
from ._comm.move import strip
from ._dispatch import policy
from ._dispatch.table import lookup, register
from ._spec import Spec
from ._tensor import TABLE, DTensor
from .errors import UnsupportedOperationError
from .placements import P

_on = torch._C._is_torch_function_enabled


def _refuse(what: str, instead: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(
        f"{what} would see only this rank's part of a DTensor, as if it were the whole. {instead}"
    )


# ------------------------------------------------------------------ what does not dispatch


def _holds(value: Any) -> bool:
    """Whether nested lists hold a DTensor; looks at classes only, at the speed of C for flat lists."""
    kinds = set(map(type, value))
    return DTensor in kinds or (
        (list in kinds or tuple in kinds) and any(_holds(v) for v in value if isinstance(v, list | tuple))
    )


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a wrapper in place of `owner.name`, once."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_vescale_wrapped"):
        return
    wrapper = make(original)
    wrapper._vescale_wrapped = original
    setattr(owner, name, wrapper)
    if owner is Tensor:  # methods in C++ look their own name up here when they dispatch
        TABLE[wrapper] = lambda _, args, kwargs: lookup(original)(original, args, kwargs)


def _guard_data(name: str, *, position: int, conversion: bool = False) -> Callable[[Any], Any]:
    """Wrap a function that makes a tensor of its argument at `position`; a bare `conversion` is let through."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            data = args[position] if len(args) > position else kwargs.get("obj", kwargs.get("data"))
            cls = data.__class__
            if cls is DTensor:
                if _on() and not (conversion and len(args) + len(kwargs) == 1):
                    raise _refuse(
                        f"{name} of a DTensor",
                        "Use x.detach().clone() for a copy, x.to(...) to convert, or x.full_tensor() for the whole",
                    )
            elif (cls is list or cls is tuple) and _holds(data) and _on():
                raise _refuse(
                    f"{name} of a list of DTensors",
                    "Use torch.stack(list), or [x.item() for x in list] for Python numbers",
                )
            return original(*args, **kwargs)

        return wrapper

    return make


def _guard_argument(name: str, instead: str) -> Callable[[Any], Any]:
    """Wrap a function that must not meet a DTensor in any position."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            for value in args:
                if value.__class__ is DTensor and _on():
                    raise _refuse(name, instead)
            return original(*args, **kwargs)

        return wrapper

    return make


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
        _replace(torch, name, _guard_data(f"torch.{name}", position=0, conversion=name != "tensor"))
        _announce(before, getattr(torch, name))
    for name in _SPARSE_CONSTRUCTORS:
        before = getattr(torch, name)
        _replace(torch, name, _guard_argument(f"torch.{name}", "Use full_tensor() for the whole as a plain tensor"))
        _announce(before, getattr(torch, name))
    _replace(torch.nested, "nested_tensor", _guard_data("torch.nested.nested_tensor", position=0))
    for name in ("new_tensor", "new"):
        _replace(Tensor, name, _guard_data(f"Tensor.{name}", position=1))
    _replace(
        Tensor, "set_", _guard_argument("Tensor.set_", "Assign x.data = y between DTensors, or copy with x.copy_(y)")
    )
    _guard_variable()


def _guard_variable() -> None:
    from torch.autograd.variable import VariableMeta

    if "__call__" in vars(VariableMeta):
        return

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if args and args[0].__class__ is DTensor and _on():
            raise _refuse("Variable(DTensor)", "Leave Variable out: a DTensor takes part in autograd as it is")
        return type.__call__(cls, *args, **kwargs)

    VariableMeta.__call__ = __call__  # type: ignore[method-assign, assignment]


def _guard_functorch() -> None:
    from torch._functorch import eager_transforms, vmap

    instead = (
        "Write the batch dim out (operators broadcast over it), or use torch.autograd.grad; for a local computation "
        "use local_map or to_local()"
    )
    for name in ("_add_batch_dim", "_remove_batch_dim"):
        _replace(vmap, name, _guard_argument("torch.vmap", instead))
    for name in ("_wrap_for_grad", "_unwrap_for_grad", "_wrap_functional_tensor"):
        _replace(eager_transforms, name, _guard_argument("a torch.func transform", instead))


def _guard_export() -> None:
    instead = "Use full_tensor() for the whole, or to_local() if the part is what you mean"
    for owner in (torch, torch.utils.dlpack):
        _replace(owner, "to_dlpack", _guard_argument("to_dlpack", instead))
    for owner in (torch.jit, torch.jit._trace):
        for name in ("trace", "trace_module"):
            _replace(owner, name, _guard_trace)


def _guard_trace(original: Any) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get("func", kwargs.get("mod"))
        inputs = (*args[1:2], *kwargs.values())
        held = [*module.parameters(), *module.buffers()] if isinstance(module, torch.nn.Module) else []
        if (
            any(t.__class__ is DTensor for t in held)
            or _holds([inputs])
            or any(isinstance(i, dict) and _holds(i.values()) for i in inputs)
        ):
            raise _refuse("torch.jit.trace", "Trace the single-device module before it is parallelized")
        return original(*args, **kwargs)

    return wrapper


@functools.cache
def _not_traceable() -> None:
    """Tell Dynamo to leave DTensors to the interpreter; cheap only once Dynamo is loaded, hence not at import."""
    from torch._dynamo import config, trace_rules

    config.nontraceable_tensor_subclasses.add(DTensor)
    trace_rules.add(__package__)  # frames of ours that see no DTensor, such as moves


def _guard_compile() -> None:
    if "torch._dynamo" in sys.modules:
        _not_traceable()

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            _not_traceable()
            return original(*args, **kwargs)

        return wrapper

    _replace(torch, "compile", make)


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


def _refusal(what: str, instead: str) -> Callable[..., Any]:
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise UnsupportedOperationError(f"{what} is not supported for DTensors. {instead}")

    return handler


def _is_whole(spec: Spec) -> bool:
    return all((t < 0 and t != P) or size == 1 for t, size in zip(spec.types, spec.mesh.sizes, strict=True))


def _local_or_refuse(what: str) -> Callable[..., Any]:
    """Handler of an export: allowed where the local part is the whole."""

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if not (isinstance(x, DTensor) and _is_whole(x._spec)):
            raise _refuse(what, "Use full_tensor() for the whole, or to_local() if the part is what you mean")
        return func(strip(x).detach(), *args[1:], **kwargs)

    return handler


_SPARSE_CONSTRUCTORS = (
    "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor", "sparse_bsc_tensor",
    "sparse_compressed_tensor",
)  # fmt: skip
_SPARSE = "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc to_mkldnn"


def _register_refusals() -> None:
    whole = "Use full_tensor() for the whole as a plain tensor"
    register(_SPARSE, _refusal("conversion to a sparse or MKLDNN layout", whole))
    register(
        "quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic",
        _refusal("quantization to a quantized dtype", whole),
    )
    nested = torch._C._nested.nested_tensor  # type: ignore[attr-defined]
    TABLE[nested] = _refusal("a nested tensor of DTensors", whole)
    register("_nested_tensor_from_tensor_list _nested_view_from_buffer _nested_from_padded", TABLE[nested])
    TABLE[Tensor.__dlpack__] = _local_or_refuse("DLPack export")
    register("set_", _refusal("set_", "Assign x.data = y, or copy with x.copy_(y)"))
    register("rename rename_ align_to align_as refine_names", _refusal("a named tensor", "Name the mesh axes instead"))
    register("_make_dual _fw_primal", _refusal("forward-mode differentiation", "Use backward or torch.autograd.grad"))


def install() -> None:
    """Put all guards in place; may be called again."""
    from . import _clip, _dcp, _optim

    install_autograd()
    _optim.install()
    _clip.install()
    _dcp.install()
    _register_refusals()
    _guard_constructors()
    _guard_functorch()
    _guard_export()
    _guard_compile()
    _replace(torch.nn.init, "sparse_", _let_sparse_init)
