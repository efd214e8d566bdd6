"""Random operators on plain tensors, drawn by a sampler instead of torch's generators.

A dispatch mode sees every operator that is called below autograd. Those that draw get a result allocated as torch
would, filled from the sampler in the order in which torch's kernels fill it. An operator that draws and has no such
form is an error: nothing is ever drawn from another stream in silence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .._cuda.laws import dropout_scale
from ..errors import UnsupportedRandomOperatorError
from .composite import is_composite
from .forms import Form, real_args, resolve, scale_normal
from .mode import is_default
from .source import Sampler
from .unseen import parts_are_seen

__all__ = ["InterceptRandom", "base_name", "bind_call", "check_call", "device_of", "draws_nothing", "refuse_layouts"]

_FACTORIES = frozenset({"rand", "randn", "randint"})
_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_FILLERS = frozenset("uniform normal random exponential cauchy log_normal geometric bernoulli".split())
# These draw but carry no tag that says so.
_UNTAGGED = frozenset("random random_ normal_functional binomial _sample_dirichlet rand randn randint randperm".split())
_DROPOUT_ARGUMENTS = ("dropout_p", "dropout")


@functools.cache
def base_name(func: Any) -> str:
    """Name without namespace of an operator that may draw, or "" for any other."""
    namespace, name = func._schema.name.split("::")
    if namespace == "aten" and (name in _UNTAGGED or torch.Tag.nondeterministic_seeded in func.tags):
        return str(name)
    return ""


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in func._schema.arguments)


def bind_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call by name, defaults included."""
    parameters = _parameters(func)
    bound = dict(parameters)
    bound.update(zip((name for name, _ in parameters), args, strict=False))
    bound.update(kwargs)
    return bound


def draws_nothing(bound: dict[str, Any]) -> bool:
    """Whether this call of an operator that may draw takes no number: no training, or no dropout."""
    if bound.get("train", True) is False or bound.get("training", True) is False:
        return True
    return any(bound.get(name, 1.0) == 0.0 for name in _DROPOUT_ARGUMENTS)


@functools.lru_cache(maxsize=1024)
def check_call(kernel: str, dtype: torch.dtype, args: tuple[Any, ...]) -> None:
    """Let torch itself check the parameters: its kernels do so on an empty tensor too, and draw nothing for it."""
    getattr(torch.empty(0, dtype=dtype), kernel)(*args)


_Mode: Any = TorchDispatchMode  # torch has no types for it
_broadcast: Any = torch.broadcast_shapes


class InterceptRandom(_Mode):  # type: ignore[misc]
    """Draw the random operators on plain tensors from a sampler, within a ``with`` block and on this thread.

    Tensors on the meta device, tensor subclasses (such as DTensor, whose own dispatch then asks the active sampler) and
    calls with a ``torch.Generator`` other than the default one are left to torch.

    Args:
        sampler: makes the sources.
    """

    way_out = "Call it outside of the block"
    """What to do about an operator that the sampler does not know."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    # ------------------------------------------------------------------ what subclasses may change

    def wants(self, device: torch.device) -> bool:
        """Whether draws on a device are the sampler's."""
        return device.type != "meta"

    def explicit_generator(self, name: str) -> None:
        """Called where an operator is given a ``torch.Generator``; returning leaves the call to torch."""

    def order(self, kernel: str, out: Tensor, args: tuple[Any, ...]) -> Sequence[int]:
        """Dims of a result from the slowest to the fastest, in the order in which it is filled: by strides."""
        strides = out.stride()
        return sorted(range(out.dim()), key=lambda d: -strides[d])

    def keep_mask(self, x: Tensor, p: float) -> Tensor:
        """Ones and zeros of `native_dropout`, in the dtype and with the strides of its input."""
        mask = torch.empty_like(x)
        self.draw("dropout", mask, (p,))
        return mask

    def composite(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that is made of others, so that those are seen. Only inference mode shows such ones whole."""
        with self:
            return func.decompose(*args, **kwargs)

    # ------------------------------------------------------------------ the draw

    def draw(
        self,
        kernel: str,
        out: Tensor,
        args: tuple[Any, ...],
        order: Sequence[int] | None = None,
        layout: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        """Fill a tensor from the sampler; on an error the sampler is as it was.

        Args:
            kernel: in-place method of `torch.Tensor`, or "dropout".
            out: tensor to fill, any strides.
            args: of the kernel; tensors among them broadcast to `out`.
            order: dims from the slowest to the fastest; None asks `self.order`.
            layout: shape and strides to tell the sampler; None for those of `out`.
        """
        if out.numel() == 0:
            return
        if torch._debug_has_internal_overlap(out) == 1:
            raise RuntimeError(
                f"{kernel}: unsupported operation: more than one element of the written-to tensor refers to a single "
                "memory location. Please clone() the tensor before performing the operation."
            )
        dims = self.order(kernel, out, args) if order is None else order
        args = tuple(a.expand(out.shape) if isinstance(a, Tensor) else a for a in args)
        shape, stride = layout or (out.shape, out.stride())
        target = out.permute(*dims) if out.dim() else out
        flat = (
            target.view(-1) if target.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
        )
        params = tuple(
            (a.permute(*dims) if a.dim() else a).reshape(-1).contiguous() if isinstance(a, Tensor) else a for a in args
        )
        before = self.sampler.save()
        try:
            source = self.sampler.source(kernel, out.dtype, out.device, tuple(shape), tuple(stride), args)
            source.emit(flat, 0, params)
            source.finish()
        except BaseException:
            self.sampler.restore(before)
            raise
        if not target.is_contiguous():
            target.copy_(flat.view(target.shape))

    def _fill(self, form: Form, out: Tensor) -> Tensor:
        args = form.args
        if not any(isinstance(a, Tensor) for a in args):
            check_call(form.kernel, out.dtype, args)
        elif form.kernel == "bernoulli_":
            _check_chances(args[0])
        if out.is_complex():
            self.draw(form.kernel, torch.view_as_real(out), real_args(form).args)
        else:
            self.draw(form.kernel, out, args)
        if form.after is not None:
            scale_normal(out, *form.after)
        return out

    # ------------------------------------------------------------------ dispatch

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one operator; those that draw nothing pass."""
        kwargs = kwargs or {}
        for kind in types:
            if issubclass(kind, FakeTensor):  # has no data; its own mode asks for this answer
                return func(*args, **kwargs)
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
                return NotImplemented
        if is_composite(func):
            return self.composite(func, args, kwargs)
        name = base_name(func)
        if not name:
            return func(*args, **kwargs)
        bound = bind_call(func, args, kwargs)
        if draws_nothing(bound) or not self.wants(device_of(bound)):
            return func(*args, **kwargs)
        if parts_are_seen():
            return func(*args, **kwargs)  # a block of `local_parts` around this one draws by the active sampler
        if bound.get("generator") is not None and not is_default(bound["generator"]):
            self.explicit_generator(name)
            return func(*args, **kwargs)
        refuse_layouts(name, bound)
        handler = self.handler(name)
        if handler is not None and func._overloadname in handler[0]:
            return handler[1](bound)
        raise UnsupportedRandomOperatorError(
            f"aten::{name} (overload {func._overloadname!r}) draws random numbers, but {type(self.sampler).__name__} "
            f"does not know how; nothing was drawn. {self.way_out}"
        )

    def handler(self, name: str) -> tuple[frozenset[str], Callable[[dict[str, Any]], Any]] | None:
        """Overloads of an operator that can be drawn, and what draws them."""
        base = name.removesuffix("_functional")
        if name in _FACTORIES:
            return _FACTORY_OVERLOADS, functools.partial(self._factory, name)
        if name in _LIKE:
            return _LIKE_OVERLOADS, functools.partial(self._like, name)
        if name == "native_dropout":
            return frozenset({"default"}), self._native_dropout
        if name == "bernoulli":
            return _BERNOULLI_OVERLOADS, self._bernoulli
        if name == "normal":
            return _NORMAL_OVERLOADS, self._normal
        if name.endswith("_") and name[:-1] in _FILLERS:
            return _FILL_OVERLOADS, functools.partial(self._in_place, name)
        if base in _FILLERS:
            return _FILL_OVERLOADS, functools.partial(self._functional, base)
        return None

    def _factory(self, name: str, bound: dict[str, Any]) -> Tensor:
        integers = name == "randint"
        out = bound.get("out")
        if out is None:
            dtype = bound["dtype"]
            if integers and not isinstance(dtype, torch.dtype):  # the schema's default is a number
                dtype = torch.int64
            options = {k: bound[k] for k in ("layout", "device", "pin_memory")}
            out = torch.empty(bound["size"], dtype=dtype, **options)
        else:
            out.resize_(bound["size"])
        args = (bound.get("low", 0), bound["high"]) if integers else ()
        return self._fill(resolve(name, args, None), out)

    def _like(self, name: str, bound: dict[str, Any]) -> Tensor:
        kept = ("dtype", "layout", "device", "pin_memory", "memory_format")
        result = torch.empty_like(bound["self"], **{k: bound[k] for k in kept if k in bound})
        args: tuple[Any, ...] = ()
        if name == "randint_like":
            args = tuple(int(x) for x in (bound.get("low", 0), bound["high"]))
        return _into(bound.get("out"), self._fill(resolve(name, args, None), result))

    def _in_place(self, name: str, bound: dict[str, Any]) -> Tensor:
        out: Tensor = bound["self"]
        args = tuple(v for k, v in bound.items() if k not in ("self", "generator", "out"))
        self._fill(resolve(name, args, None), out)
        return out

    def _functional(self, name: str, bound: dict[str, Any]) -> Tensor:
        return _into(bound.get("out"), self._in_place(name + "_", {**bound, "self": bound["self"].clone()}))

    def _bernoulli(self, bound: dict[str, Any]) -> Tensor:
        source, out = bound["self"], bound.get("out")
        chances = bound.get("p", source)
        if "p" in bound and isinstance(chances, Tensor):
            return self._functional("bernoulli", bound)
        if out is None:
            out = torch.empty_like(source, memory_format=torch.contiguous_format)
        else:
            out.resize_(source.shape)
        return self._fill(resolve("bernoulli_", (chances,), None), out)

    def _normal(self, bound: dict[str, Any]) -> Tensor:
        mean, std, out = bound["mean"], bound["std"], bound.get("out")
        given = [v for v in (mean, std) if isinstance(v, Tensor)]
        shape = _broadcast(*(v.shape for v in given)) if given else bound.get("size")
        if shape is None:  # normal.out(self, mean, std): the shape is that of self
            shape = bound["self"].shape
        if isinstance(std, Tensor) and std.numel() and not bool((std >= 0).all()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        if isinstance(mean, Tensor) and not isinstance(std, Tensor) and std < 0.0:
            raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
        if out is not None:
            out.resize_(shape)
        elif given:
            out = torch.empty(shape, dtype=given[0].dtype, device=given[0].device)
        else:
            options = {k: bound[k] for k in ("dtype", "layout", "device", "pin_memory")}
            out = torch.empty(shape, **options)
        return self._fill(resolve("normal", (mean, std), None), out)

    def _native_dropout(self, bound: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x, p = bound["input"], bound["p"]
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
        if p == 1.0 or x.numel() == 0:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        mask = self.keep_mask(x, p)
        return _apply_mask(x, mask, p), mask.to(torch.bool)


def refuse_layouts(name: str, bound: dict[str, Any]) -> None:
    """Refuse tensors without strides: there is no order of their elements to draw in."""
    for argument, value in bound.items():
        if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
            kind = "nested tensor" if value.is_nested else f"tensor of layout {value.layout}"
            raise UnsupportedRandomOperatorError(
                f"aten::{name}: {argument} is a {kind} and has no strides, so the order of its elements in a draw is "
                "not known; nothing was drawn. Draw on its values (for nested tensors: layout=torch.jagged does), or "
                "outside of the block"
            )


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    """Copy a result to where it was asked for: torch runs these operators as new tensors first."""
    return result if out is None else out.resize_(result.shape).copy_(result)


def _apply_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return x * mask / (1 - p), by the operations of the fused kernel, in the type that it accumulates in."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(acc).mul(mask).mul_(dropout_scale(p, x.dtype)).to(x.dtype)


def _check_chances(p: Tensor) -> None:
    if not p.is_floating_point():
        raise RuntimeError(f"expected probabilities tensor to have floating type, got {p.dtype}")
    if not bool(((p >= 0) & (p <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def device_of(bound: dict[str, Any]) -> torch.device:
    """Where the result of a call lies."""
    if bound.get("device") is not None:
        return torch.device(bound["device"])
    for value in bound.values():
        if isinstance(value, Tensor):
            return value.device
    return torch.get_default_device()


_FACTORY_OVERLOADS = frozenset(
    "default generator out generator_out low low_generator low_out low_generator_out".split()
)
_LIKE_OVERLOADS = frozenset(
    "default generator Tensor low_dtype Tensor_generator low_generator_dtype out generator_out Tensor_out "
    "Tensor_generator_out low_dtype_out low_generator_dtype_out".split()
)
_FILL_OVERLOADS = frozenset("default float Tensor from to out from_out to_out".split())
_BERNOULLI_OVERLOADS = frozenset("default p Tensor out Tensor_out float_out".split())
_NORMAL_OVERLOADS = frozenset(
    "Tensor_float float_Tensor Tensor_Tensor float_float Tensor_float_out float_Tensor_out Tensor_Tensor_out "
    "float_float_out out".split()
)
