"""Puts loaded values into the containers of a state, in place wherever that can be."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import CheckpointError, StateError
from .items import Item, leaves_of
from .names import spell
from .scan import is_stateful

__all__ = ["as_saved", "hand_over", "into", "put", "refresh"]

Reader = Callable[[int], Any]
Action = Callable[[Reader], Any]


def refresh(
    mine: Item, actions: Sequence[tuple[Any, Action]], extra: Sequence[tuple[Any, Action]], local: Reader
) -> Any:
    """Put what actions return into a container of the state; a tuple is rebuilt if anything in it is new."""
    container = mine.value
    if mine.kind == "tuple":
        new = tuple(action(local) for _, action in actions)
        return container if all(a is b for a, b in zip(new, container, strict=True)) else new
    for key, action in actions:
        value = action(local)
        if value is not container[key]:
            container[key] = value
    for key, action in extra:
        if mine.kind == "list":
            container.append(action(local))
        else:
            container[key] = action(local)
    return container


def hand_over(mine: Item, new: Any) -> Any:
    """Give an object its new state_dict and return it.

    Raises:
        StateError: it did not take it; names the key.
    """
    # In place changes of tensors that were made in inference mode are not allowed elsewhere.
    frozen = any(leaf.kind == "tensor" and leaf.value.is_inference() for leaf in leaves_of(mine))
    try:
        with torch.inference_mode() if frozen else contextlib.nullcontext():
            mine.value.load_state_dict(new)
    except CheckpointError:
        raise
    except Exception as error:
        raise StateError(
            f"state: {spell(mine.path)}: load_state_dict of this {type(mine.value).__qualname__} failed: "
            f"{type(error).__name__}: {error}. The tensors of the state are loaded already, so the state is partly "
            f"loaded: do not go on with it."
        ) from error
    return mine.value


def put(kind: str, pairs: Sequence[tuple[Any, Any]]) -> Any:
    """Return a new container.

    Example:
        >>> put("tuple", [(0, "a"), (1, "b")])
        ('a', 'b')
    """
    if kind == "list":
        return [value for _, value in pairs]
    if kind == "tuple":
        return tuple(value for _, value in pairs)
    return OrderedDict(pairs) if kind == "ordered" else dict(pairs)


def as_saved(mine: Item, tensor: torch.Tensor | None) -> Any:
    """Return what stands in the state where `tensor` was filled: a numpy array that shares no memory is copied to."""
    if mine.kind != "numpy" or tensor is None:
        return mine.value
    numpy = sys.modules["numpy"]
    loaded = tensor.numpy()
    if loaded.size == 0 or numpy.shares_memory(loaded, mine.value):
        return mine.value
    if not mine.value.flags.writeable:
        return loaded
    mine.value[...] = loaded
    return mine.value


def into(old: Any, new: Any) -> Any:
    """Put a value that was loaded as a whole in the place of another one; containers and tensors stay the same objects.

    Args:
        old: what stands in the state.
        new: what was saved; its structure is the one that remains.

    Returns:
        What is to stand there.

    Example:
        >>> old = {"a": [1], "b": 2}
        >>> into(old, {"a": [3, 4]}) is old, old
        (True, {'a': [3, 4]})
    """
    if is_stateful(old):
        if new is not None:
            old.load_state_dict(new)
        return old
    if isinstance(old, torch.Tensor):
        if isinstance(new, torch.Tensor) and old.shape == new.shape and old.dtype == new.dtype:
            old.detach().copy_(new)
            return old
        return new
    if type(old) in (dict, OrderedDict) and isinstance(new, dict):
        merged = {key: into(old[key], value) if key in old else value for key, value in new.items()}
        old.clear()
        old.update(merged)
        return old
    if type(old) is list and isinstance(new, list):
        old[:] = [into(old[n], value) if n < len(old) else value for n, value in enumerate(new)]
        return old
    numpy = sys.modules.get("numpy")
    both = numpy is not None and isinstance(old, numpy.ndarray) and isinstance(new, numpy.ndarray)
    if both and old.shape == new.shape and old.dtype == new.dtype and old.flags.writeable:
        old[...] = new
        return old
    return new
