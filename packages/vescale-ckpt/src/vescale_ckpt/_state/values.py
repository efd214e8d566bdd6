"""Python values that hold no tensors <-> JSON nodes.

What JSON has no word for becomes an object with one key that begins with "$". There is no general form: a class that
is not listed here is refused, so that reading never needs to know, import or call a class.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from ..errors import FormatError, StateError
from .dtypes import NUMPY_SCALARS, dtype_name, dtype_of
from .names import Path, spell
from .refusal import refusal

__all__ = [
    "PRIMITIVE",
    "NumpyScalar",
    "decode",
    "decode_key",
    "encode",
    "encode_key",
    "is_primitive",
    "levels",
]

INT_BITS: Final = 4096
"""Integers of more bits are refused: Python reads no longer ones from text."""
NESTING: Final = 16
"""Tuples in tuples, in keys and sets."""
PRIMITIVE: Final = frozenset({type(None), bool, int, float, str})
"""Classes whose values are JSON as they are, up to infinities, nan and endless integers."""
_DEVICE: Final = re.compile(r"[a-z_]{1,32}(?::\d{1,6})?", re.ASCII)
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class NumpyScalar:
    """A checked numpy scalar of a file, which takes numpy to become one."""

    dtype: str
    """numpy's name of the dtype."""
    data: bytes
    """The number in memory, little-endian."""

    def make(self, where: str) -> Any:
        """Return the scalar."""
        try:
            import numpy
        except ImportError:
            raise StateError(f"{where}: a numpy scalar was saved here; install numpy to load it.") from None
        little = numpy.dtype(self.dtype).newbyteorder("<")
        return numpy.frombuffer(self.data, little)[0].astype(self.dtype)


def is_primitive(value: Any) -> bool:
    """Tell whether a value is JSON as it is.

    Example:
        >>> [is_primitive(x) for x in (1, 1.5, "a", None, math.nan, b"a")]
        [True, True, True, True, False, False]
    """
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(value.bit_length() <= INT_BITS)
    if kind is str:
        return value.isascii() or _is_text(value)
    return kind in PRIMITIVE


def encode(value: Any, path: Path) -> Any:
    """Return the JSON node of a value that is no container of tensors.

    Args:
        value: None, bool, int, float, complex, str, bytes, a set of those, Counter, torch.Size, dtype, device, or a
            numpy scalar.
        path: where it stands, for messages.

    Raises:
        StateError: another class.

    Example:
        >>> encode(math.inf, ("best",))
        {'$float': 'inf'}
    """
    if is_primitive(value):
        return value
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, path)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.name in NUMPY_SCALARS:
        data = numpy.array(value, value.dtype.newbyteorder("<")).tobytes()
        return {"$numpy_scalar": [value.dtype.name, base64.b64encode(data).decode()]}
    raise refusal(value, path)


def levels(node: Any) -> int:
    """Return how deeply JSON is nested.

    Example:
        >>> levels({"$tuple": [1, "a"]})
        2
    """
    if isinstance(node, dict):
        return 1 + max(map(levels, node.values()), default=0)
    return 1 + max(map(levels, node), default=0) if isinstance(node, list) else 0


def encode_key(key: Any, path: Path, depth: int = 0) -> Any:
    """Return the JSON node of a dict key: str, int, bool, None, float, and tuples of those.

    Args:
        key: the key.
        path: where the dict stands, for messages.
        depth: how many tuples the key lies in.

    Raises:
        StateError: another class, nan, or tuples in tuples without end.

    Example:
        >>> encode_key((1, "a"), ())
        {'$tuple': [1, 'a']}
    """
    if is_primitive(key):
        return key
    if type(key) is tuple and depth < NESTING:
        return {"$tuple": [encode_key(item, path, depth + 1) for item in key]}
    if type(key) is float and not math.isnan(key):
        return {"$float": "inf" if key > 0 else "-inf"}
    raise StateError(
        f"state: the dict at {spell(path)} has the key {ascii(key)[:100]} of class {type(key).__qualname__}. "
        f"Keys can be str (that UTF-8 can say), int (of up to {INT_BITS} bits), float (not nan), bool, None and tuples "
        f"of those, {NESTING} deep; choose such a key."
    )


def decode_key(node: Any, where: str, depth: int = 0) -> Any:
    """Return the dict key of a node.

    Raises:
        FormatError: the node is none.
    """
    if is_primitive(node):
        return node
    if type(node) is dict and len(node) == 1 and depth < NESTING:
        tag, payload = next(iter(node.items()))
        if tag == "$tuple" and type(payload) is list:
            return tuple(decode_key(item, where, depth + 1) for item in payload)
        if tag == "$float" and type(payload) is str and payload in ("inf", "-inf"):
            return _FLOATS[payload]
    raise FormatError(f"{where}: {_short(node)} is no key of a dict.")


def decode(tag: str, payload: Any, where: str) -> Any:
    """Return the value of a node `{tag: payload}` that holds no tensors.

    Args:
        tag: what begins with "$".
        payload: JSON.
        where: the place, for messages.

    Raises:
        FormatError: an unknown tag, or a payload that does not go with it.

    Example:
        >>> decode("$size", [2, 3], "tree")
        torch.Size([2, 3])
    """
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise FormatError(f"{where}: {ascii(tag)[:60]} is no kind of value; a newer version may have written it.")
    try:
        return decoder(payload, where)
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"{where}: {_short(payload)} is no value of kind {tag}.") from None


def _short(node: Any) -> str:
    text = ascii(node[:40] if isinstance(node, (str, list)) else node if not isinstance(node, dict) else list(node)[:4])
    return text if len(text) <= 100 else text[:97] + "..."


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _encode_text(value: str, path: Path) -> Any:
    raise StateError(
        f"state: {spell(path)} is a str with half of a surrogate pair, which UTF-8 cannot say. Save its bytes."
    )


def _encode_int(value: int, path: Path) -> Any:
    raise StateError(
        f"state: {spell(path)} is an int of {value.bit_length()} bits; up to {INT_BITS} are saved. Save its bytes."
    )


def _encode_float(value: float, _: Path) -> Any:
    return {"$float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}


def _count(value: Any, path: Path) -> int:
    if type(value) is not int or not is_primitive(value):
        raise StateError(
            f"state: the Counter at {spell(path)} has the count {ascii(value)[:60]}, which is no int; use a dict."
        )
    return value


def _encode_dtype(value: torch.dtype, path: Path) -> Any:
    try:
        return {"$dtype": dtype_name(value)}
    except StateError as error:
        raise StateError(f"state: {spell(path)}: {error}") from None


def _part(value: float) -> Any:
    return value if math.isfinite(value) else _encode_float(value, ())


def _encode_set(value: Any, path: Path) -> Any:
    # Sets of strings have another order in every process, and all ranks must say the same.
    nodes = sorted((_element(item, path, 0) for item in value), key=lambda n: json.dumps(n, sort_keys=True))
    return {"$frozenset" if isinstance(value, frozenset) else "$set": nodes}


def _element(item: Any, path: Path, depth: int) -> Any:
    if depth < NESTING:
        if type(item) is tuple:
            return {"$tuple": [_element(inner, path, depth + 1) for inner in item]}
        if type(item) is frozenset:
            nodes = (_element(inner, path, depth + 1) for inner in item)
            return {"$frozenset": sorted(nodes, key=lambda n: json.dumps(n, sort_keys=True))}
        if is_primitive(item) or type(item) in (float, int, str, bytes, complex, torch.dtype, torch.device):
            return encode(item, path)
    raise StateError(
        f"state: the set at {spell(path)} holds a {type(item).__qualname__}. Sets of numbers, strings, bytes and "
        f"tuples of those are saved; use a list for anything else."
    )


_ENCODERS: dict[type, Callable[[Any, Path], Any]] = {
    str: _encode_text,
    int: _encode_int,
    float: _encode_float,
    complex: lambda value, _: {"$complex": [_part(value.real), _part(value.imag)]},
    bytes: lambda value, _: {"$bytes": base64.b64encode(value).decode()},
    set: _encode_set,
    frozenset: _encode_set,
    Counter: lambda value, path: {"$counter": [[encode_key(key, path), _count(n, path)] for key, n in value.items()]},
    torch.Size: lambda value, _: {"$size": list(value)},
    torch.dtype: _encode_dtype,
    torch.device: lambda value, _: {"$device": str(value)},
}


def _decode_float(payload: Any, _: str) -> float:
    return _FLOATS[payload]


def _decode_part(node: Any) -> float:
    if type(node) is dict and len(node) == 1:
        return _FLOATS[node["$float"]]
    if type(node) not in (int, float):
        raise ValueError
    return float(node)


def _decode_complex(payload: Any, _: str) -> complex:
    if type(payload) is not list:
        raise ValueError
    real, imag = payload
    return complex(_decode_part(real), _decode_part(imag))


def _decode_bytes(payload: Any, _: str) -> bytes:
    if type(payload) is not str:
        raise ValueError
    return base64.b64decode(payload, validate=True)


def _decode_counter(payload: Any, where: str) -> Counter[Any]:
    if type(payload) is not list or any(type(n) is not int or not is_primitive(n) for _, n in payload):
        raise ValueError
    found = Counter({decode_key(key, where): count for key, count in payload})
    if len(found) != len(payload):
        raise ValueError
    return found


def _decode_size(payload: Any, _: str) -> torch.Size:
    if type(payload) is not list or any(type(n) is not int or not 0 <= n < 1 << 63 for n in payload):
        raise ValueError
    return torch.Size(payload)


def _decode_device(payload: Any, _: str) -> torch.device:
    if type(payload) is not str or not _DEVICE.fullmatch(payload):
        raise ValueError
    device = torch.device(payload)
    if str(device) != payload:  # torch wraps large numbers around
        raise ValueError
    return device


def _decode_dtype(payload: Any, where: str) -> torch.dtype:
    try:
        return dtype_of(payload)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None


def _decode_numpy_scalar(payload: Any, where: str) -> NumpyScalar:
    if type(payload) is not list:
        raise ValueError
    name, text = payload
    data = _decode_bytes(text, where)
    if type(name) is not str or len(data) != NUMPY_SCALARS[name] or (name == "bool" and data not in (b"\0", b"\1")):
        raise ValueError
    return NumpyScalar(name, data)


def _elements(payload: Any, where: str, depth: int) -> list[Any]:
    if type(payload) is not list or depth > NESTING:
        raise ValueError
    return [_decode_element(node, where, depth) for node in payload]


def _decode_element(node: Any, where: str, depth: int) -> Any:
    if type(node) is not dict:
        if not is_primitive(node):
            raise ValueError
        return node
    ((tag, payload),) = node.items()
    if tag == "$tuple":
        return tuple(_elements(payload, where, depth + 1))
    if tag == "$frozenset":
        return frozenset(_elements(payload, where, depth + 1))
    if tag not in ("$float", "$bytes", "$complex", "$dtype", "$device"):
        raise ValueError
    return decode(tag, payload, where)


_DECODERS: dict[str, Callable[[Any, str], Any]] = {
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$bytes": _decode_bytes,
    "$set": lambda payload, where: set(_elements(payload, where, 0)),
    "$frozenset": lambda payload, where: frozenset(_elements(payload, where, 0)),
    "$counter": _decode_counter,
    "$size": _decode_size,
    "$dtype": _decode_dtype,
    "$device": _decode_device,
    "$numpy_scalar": _decode_numpy_scalar,
}
