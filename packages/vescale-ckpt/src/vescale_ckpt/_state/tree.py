"""State <-> JSON tree and a list of tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..errors import FormatError, StateError
from .dtypes import NUMPY_SCALARS
from .items import Item, leaf_names, leaves_of
from .names import NAME_CHARS, NAMES_CHARS, Path, escaped, named, spell
from .nodes import parse
from .scan import as_tensor, dict_tag, scan
from .tensors import memory
from .values import NumpyScalar, encode_key

__all__ = ["Packed", "Row", "build", "node_of", "pack", "pack_items", "row_of", "unpack"]


@dataclass(slots=True)
class Packed:
    """A state, taken apart for saving."""

    tree: Any
    """JSON: containers, keys and plain values, with numbers in the place of tensors."""
    tensors: list[tuple[str, Tensor]]
    """(name, tensor), by name; one entry for all places where the same elements in the same memory stand."""
    local: list[Any] = field(default_factory=list)
    """JSON of each value that is this rank's own, by name."""
    local_tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    """The tensors in those, which their JSON counts from 0."""
    local_names: list[str] = field(default_factory=list)
    """Name of each of those values."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Name of a tensor -> the keys on the way to its first place."""


@dataclass(slots=True)
class Row:
    """The distinct tensors of a state."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    """(name, tensor), by name."""
    number: dict[int, int] = field(default_factory=dict)
    """Id of a leaf item -> its place in `tensors`."""
    paths: dict[str, Path] = field(default_factory=dict)
    """Name -> path of the first place."""


def pack(state: Any) -> Packed:
    """Take a state apart.

    Args:
        state: nested dicts, lists and tuples of tensors, numpy arrays, plain values, `Stateful` objects and `local`s.

    Returns:
        JSON and tensors; the tensors share memory with the state.

    Raises:
        StateError: a value that cannot be saved; the message names its key, its class and what to do.

    Example:
        >>> import torch
        >>> packed = pack({"step": 3, "w": torch.zeros(2)})
        >>> packed.tree, [name for name, _ in packed.tensors]
        ({'step': 3, 'w': {'$tensor': 0}}, ['w'])
    """
    return pack_items(scan(state))


def pack_items(root: Item) -> Packed:
    """Take a state apart that has been scanned."""
    names = leaf_names(root)
    _check_names(root, names)
    row = row_of(root, names)
    locals_ = sorted((leaf for leaf in leaves_of(root) if leaf.kind == "local"), key=lambda leaf: names[id(leaf)])
    slots = {id(leaf): number for number, leaf in enumerate(locals_)}
    tree = node_of(root, row.number, slots)
    inner = [item for leaf in locals_ for item in leaves_of(leaf.children[0][1]) if item.kind != "value"]
    inner_names = {id(item): name for item, name in zip(inner, named([item.path for item in inner]), strict=True)}
    for leaf in locals_:
        _check_names(leaf.children[0][1], {})
    own = _row(inner, inner_names)
    local = [node_of(leaf.children[0][1], own.number, {}) for leaf in locals_]
    return Packed(tree, row.tensors, local, own.tensors, [names[id(leaf)] for leaf in locals_], row.paths)


def node_of(item: Item, number: dict[int, int], slots: dict[int, int]) -> Any:
    """Return the JSON of an item, given the numbers of its tensors and local values."""
    if item.kind == "value":
        return item.node
    if item.kind in ("tensor", "numpy"):
        return {f"${item.kind}": number[id(item)]}
    if item.kind == "local":
        return {"$local": slots[id(item)]}
    if item.kind == "stateful":
        return node_of(item.children[0][1], number, slots)
    nodes = [(key, node_of(child, number, slots)) for key, child in item.children]
    if item.kind == "list":
        return [node for _, node in nodes]
    if item.kind == "tuple":
        return {"$tuple": [node for _, node in nodes]}
    tag = "$ordered" if item.kind == "ordered" else dict_tag(dict(item.children))
    return dict(nodes) if tag is None else {tag: [[encode_key(key, item.path), node] for key, node in nodes]}


def unpack(
    node: Any,
    tensor: Callable[[int], Any],
    local: Callable[[int], Any],
    *,
    tensors: int | None = None,
    locals: int | None = None,
) -> Any:
    """Build the state that a JSON tree stands for. Trusts nothing.

    Args:
        node: JSON, as `Packed.tree`.
        tensor: called once for each number that occurs; its answer stands in all places with that number.
        local: called for each local value with its number.
        tensors: how many tensors there are.
        locals: how many local values there are.

    Raises:
        FormatError: the tree is none; the message names the place.
        StateError: a numpy array, where numpy is not installed.

    Example:
        >>> unpack({"a": {"$tuple": [1, {"$tensor": 0}]}}, lambda i: f"tensor {i}", lambda i: None, tensors=1)
        {'a': (1, 'tensor 0')}
    """
    made: dict[int, Any] = {}

    def once(number: int) -> Any:
        if number not in made:
            made[number] = tensor(number)
        return made[number]

    return build(parse(node, tensors, locals), once, local)


def build(item: Item, tensor: Callable[[int], Any], local: Callable[[int], Any]) -> Any:
    """Build the state of parsed items."""
    if item.kind == "value":
        if type(item.value) is NumpyScalar:
            return item.value.make(f"state: {spell(item.path)}")
        # Each place gets a list or set of its own, however often it is built.
        return type(item.value)(item.value) if type(item.value) in (list, set, Counter) else item.value
    if item.kind == "tensor":
        return tensor(item.number)
    if item.kind == "numpy":
        return as_array(tensor(item.number), item.path)
    if item.kind == "local":
        return local(item.number)
    pairs = [(key, build(child, tensor, local)) for key, child in item.children]
    if item.kind in ("list", "tuple"):
        values = [value for _, value in pairs]
        return values if item.kind == "list" else tuple(values)
    return OrderedDict(pairs) if item.kind == "ordered" else dict(pairs)


def as_array(tensor: Any, path: Path) -> Any:
    """Return the numpy array in the memory of a tensor; what is no tensor as it is."""
    if not isinstance(tensor, Tensor):
        return tensor
    try:
        import numpy  # noqa: F401
    except ImportError:
        raise StateError(
            f"state: {spell(path)} was saved as a numpy array; install numpy to load it, or load other keys only."
        ) from None
    if str(tensor.dtype).removeprefix("torch.") not in NUMPY_SCALARS:
        raise FormatError(f"tree: {spell(path)}: $numpy counts a tensor of {tensor.dtype}, which numpy does not have.")
    return tensor.detach().cpu().resolve_conj().resolve_neg().numpy()


def _check_names(root: Item, names: dict[int, str]) -> None:
    """Raise StateError for a name that a reader would refuse; leaves without a name are measured by their path."""
    total = 0
    for leaf in leaves_of(root):
        name = names.get(id(leaf)) or escaped(leaf.path)
        total += len(name) + 1
        if total > NAMES_CHARS:
            raise StateError(
                f"state: the names of all leaves have more than {NAMES_CHARS} characters. Use shorter keys."
            )
        if len(name) > NAME_CHARS:
            raise StateError(
                f"state: the name {spell(leaf.path)} has {len(name)} characters, where {NAME_CHARS} are allowed. Use "
                f"shorter keys."
            )


def row_of(root: Item, names: dict[int, str]) -> Row:
    """Return the distinct tensors of a state that has been scanned, given the names of its leaves."""
    return _row([leaf for leaf in leaves_of(root) if leaf.kind in ("tensor", "numpy")], names)


def _row(leaves: list[Item], names: dict[int, str]) -> Row:
    found: dict[Any, list[Item]] = {}
    values: dict[Any, Tensor] = {}
    alive = []  # memory that is freed is used again, and would look like an alias
    for leaf in leaves:
        name = names[id(leaf)]
        tensor = as_tensor(leaf.value, leaf.path) if leaf.kind == "numpy" else leaf.value
        key, local = memory(tensor, name)
        alive.append(local)
        values.setdefault(key, tensor)
        found.setdefault(key, []).append(leaf)
    # The first name of each, so that the numbers do not depend on the order in which dicts were filled.
    first = {key: min(group, key=lambda leaf: names[id(leaf)]) for key, group in found.items()}
    row = Row()
    for key, leaf in sorted(first.items(), key=lambda pair: names[id(pair[1])]):
        for other in found[key]:
            row.number[id(other)] = len(row.tensors)
        row.paths[names[id(leaf)]] = leaf.path
        row.tensors.append((names[id(leaf)], values[key]))
    return row
