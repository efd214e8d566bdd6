"""Attributes and flags that are the same for the whole as for the local part: passed through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.engine import label_one
from .._dispatch.table import register
from .._tensor import TABLE

_run = torch._C._disabled_torch_function_impl

_GETTERS = """
requires_grad is_leaf grad_fn dtype device layout is_cuda is_cpu is_meta is_sparse is_quantized is_nested
is_mkldnn is_mps is_xla is_xpu is_vulkan is_ipu is_maia is_mtia is_sparse_csr _version output_nr name
retains_grad itemsize _backward_hooks _post_accumulate_grad_hooks _cdata grad_dtype volatile _grad_fn
_has_symbolic_sizes_strides names
"""

_METHODS = """
requires_grad_ retain_grad is_floating_point is_complex is_contiguous storage_offset untyped_storage
_storage element_size get_device is_inference is_pinned is_signed __hash__ register_post_accumulate_grad_hook
has_names is_shared share_memory_ is_conj is_neg __dlpack_device__ dim_order _is_view detach_ is_coalesced type_
is_set_to
"""


def local_attribute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer from the local part."""
    return _run(func, (), args, kwargs)


def same_spec(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An alias of the local part that keeps its spec: detach, data, alias."""
    return label_one(_run(func, (), args, kwargs), args[0]._spec)


for _name in _GETTERS.split():
    _descriptor: Any = getattr(Tensor, _name, None)
    if hasattr(_descriptor, "__get__") and not callable(_descriptor):
        TABLE[_descriptor.__get__] = local_attribute
        TABLE[_descriptor.__set__] = local_attribute
register(_METHODS, local_attribute)
register("get:_base", local_attribute)
register("detach alias get:data pin_memory", same_spec)
