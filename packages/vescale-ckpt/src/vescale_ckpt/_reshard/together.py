"""What all ranks have to know before the first byte is sent: the same tensors and layouts, all boxes, the loads."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from .. import _state
from .._coordination import Coordinator
from .._geometry import Explicit, Rule
from .._state import Held
from .._state.agree import layout_words
from ..errors import RanksError
from .exchange import Move

__all__ = ["agree_on_layouts", "agree_on_loads", "buffer_device"]


def agree_on_layouts(session: Coordinator, moves: Sequence[Move]) -> tuple[list[Move], str]:
    """Return the moves with the boxes of all ranks, and the type of device of the tensors on any rank.

    Raises:
        RanksError: the ranks have other keys, shapes or layouts; names a tensor and both ranks.
        LayoutError: boxes of a tensor without a rule do not make it up.
    """
    old, new = [move.old for move in moves], [move.new for move in moves]
    small, answer = _ask(session, "layouts", old, new)
    if "listed" in answer:  # tensors that have a rule on some ranks only
        old, new = (
            _listed(side, set(names), session.rank) for side, names in zip((old, new), answer["listed"], strict=True)
        )
        small, answer = _ask(session, "layouts in boxes", old, new)
    if "boxes" not in answer:
        words = [[a.spec.name, b.spec.name, _words(a, b, small)] for a, b in zip(old, new, strict=True)]
        session.agree("differences", json.dumps(words).encode(), lambda texts: _differ(texts, session.ranks))
    old, new = (_joined(side, boxes) for side, boxes in zip((old, new), answer["boxes"], strict=True))
    return [Move(a, b) for a, b in zip(old, new, strict=True)], answer["device"]


def _ask(session: Coordinator, name: str, old: list[Held], new: list[Held]) -> tuple[dict[str, str], dict[str, Any]]:
    """Return hashes of this rank's small replicated tensors, and what comes of what all ranks say."""
    # Replicas of small tensors that differ, such as random states, would else be mixed without a word.
    small = _state.small_values([held for held in old if len(held.spec.layout.ranks()) == session.world])
    said = {
        "digest": [_digest(old, small), _digest(new, {})],
        "device": _device_type(old + new),
        "boxes": [_state.own_boxes([held.spec for held in side], session.rank) for side in (old, new)],
    }
    return small, json.loads(session.agree(name, json.dumps(said).encode(), _decide))


def _listed(helds: list[Held], names: Collection[str], rank: int) -> list[Held]:
    """Return tensors of which those with these names have boxes instead of a rule."""
    found = []
    for held in helds:
        spec = held.spec
        if spec.name in names and isinstance(spec.layout, Rule):
            spec = replace(spec, layout=Explicit(((rank, spec.layout.boxes(spec.shape, rank)),)))
        found.append(replace(held, spec=spec))
    return found


def agree_on_loads(session: Coordinator, loads: Sequence[int]) -> list[int]:
    """Return for each tensor the bytes that the busiest rank sends or gets."""

    def decide(messages: list[bytes]) -> bytes:
        return array("q", map(max, zip(*(array("q", message) for message in messages), strict=True))).tobytes()

    return list(array("q", session.agree("loads", array("q", loads).tobytes(), decide)))


def buffer_device(moves: Iterable[Move], kind: str, group: dist.ProcessGroup | None) -> torch.device:
    """Return where buffers must be, so that the group's backend takes them, and near the tensors if it can.

    Args:
        moves: what this rank moves.
        kind: type of device of the tensors on any rank.
        group: the ranks that take part; None: all.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    config = dist.get_backend_config(group)
    backends = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    if kind not in backends or backends[kind] == "gloo":  # which takes tensors on other devices by way of the host
        kind = "cpu" if "cpu" in backends or not backends else next(iter(backends))
    for move in moves:
        for _, view in (*move.old.parts, *move.new.parts):
            if view.device.type == kind:
                return view.device
    return torch.device(kind)


def _digest(helds: Sequence[Held], small: Mapping[str, str]) -> str:
    # The names once more as they stand: their order is that of the bytes that are sent.
    return _state.digest([held.spec for held in helds], [held.spec.name for held in helds], small).hex()


def _device_type(helds: Iterable[Held]) -> str:
    types = (view.device.type for held in helds for _, view in held.parts)
    return next((kind for kind in types if kind != "cpu"), "cpu")


def _decide(messages: list[bytes]) -> bytes:
    said = list(map(json.loads, messages))
    if any(one["digest"] != said[0]["digest"] for one in said):
        listed = [sorted({name for one in said for name in one["boxes"][side]}) for side in (0, 1)]
        return json.dumps({"listed": listed} if any(listed) else {}).encode()
    boxes = [[one["boxes"][side] for one in said] if any(o["boxes"][side] for o in said) else None for side in (0, 1)]
    kind = next((one["device"] for one in said if one["device"] != "cpu"), "cpu")
    return json.dumps({"device": kind, "boxes": boxes}).encode()


def _joined(helds: list[Held], boxes: Any) -> list[Held]:
    if boxes is None:
        return helds
    specs = _state.join_boxes([held.spec for held in helds], boxes)
    return [replace(held, spec=spec) for held, spec in zip(helds, specs, strict=True)]


def _words(before: Held, after: Held, small: Mapping[str, str]) -> str:
    old, new = before.spec, after.spec
    words = f"{old.dtype} {list(old.shape)}, {layout_words(old.layout)} to {layout_words(new.layout)}"
    return words + f", sha256 of its values {small[old.name][:12]}" if old.name in small else words


def _differ(texts: list[bytes], ranks: Sequence[int]) -> bytes:
    said = [{(old, new): words for old, new, words in json.loads(text)} for text in texts]
    advice = "All ranks have to pass the same; mark values of single ranks with local(...)."
    for rank, theirs in enumerate(said):
        for key in [*said[0], *theirs]:
            one, other = (words.get(key, "not there") for words in (said[0], theirs))
            if one != other:
                raise RanksError(
                    f"reshard: {key[0]} is {one} on rank {ranks[0]}, but {other} on rank {ranks[rank]}. {advice}"
                )
    raise RanksError(f"reshard: the ranks have other layouts, whose meshes have other ranks. {advice}")
