"""Inference of the state at step end that a rank killed inside its update would have had.

Such a rank leaves the journal's entry of the fence, of the very step that the update was to
complete, and none of that step's end. A survivor has both, and an update changes the same on every
rank. A value that the update left alone on the survivor is, on the dead rank, as it was at its
fence. A value that it changed there, and that was alike on both ranks before, is now alike, too.
Any other value is unknown, and is named.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from lightck.state import boundary_blob
from lightck.state.boundary_codec import TAG, join
from lightck.state.inventory import StateTensor


@dataclass(frozen=True, slots=True)
class RankLocalState:
    """The rank-local state of a rank at one instant, as its journal keeps it."""

    at_step: bytes
    """The blob of the step end, as in a manifest; `at_forward` is that of the forward start."""
    at_forward: bytes
    lives: tuple[StateTensor, ...]
    """Every tensor that is not in a share: buffers, and tensors of extras and options."""


class CannotInfer(Exception):  # noqa: N818 - no error
    """The value that the update gave to something cannot be inferred; its path is named."""

    def __init__(self, path: str) -> None:
        super().__init__(f"the update changes {path}, which was not alike on both ranks before it")


_MISSING = object()
"""A marker for a missing value: one that was made or removed in the update."""


def infer_step_end(
    dead: RankLocalState, before: RankLocalState, after: RankLocalState
) -> RankLocalState:
    """Return the dead rank's own state at step end.

    Args:
        dead: its entry of the fence.
        before: this rank's entry of the fence of the same step.
        after: this rank's entry of the end of that step.

    Raises:
        Unknown: a value cannot be inferred; names it.
        CorruptSnapshotError: an entry does not decode.
    """
    found = _infer(_tree(dead), _tree(before), _tree(after), "")
    blobs = boundary_blob.closed(found["at_step"]), boundary_blob.closed(found["at_forward"])
    return RankLocalState(*blobs, tuple(found["tensors"].values()))


def _tree(state: RankLocalState) -> dict[str, Any]:
    return {
        "at_step": boundary_blob.opened(state.at_step, context="journal"),
        "at_forward": boundary_blob.opened(state.at_forward, context="journal"),
        "tensors": {live.name: live for live in state.lives},
    }


def _infer(dead: Any, before: Any, after: Any, path: str) -> Any:
    """Apply the rule to a whole tree where that decides, else to its parts."""
    if _same(before, after):
        return dead
    if _same(dead, before):
        return after
    kinds = {type(dead), type(before), type(after)}
    if kinds <= {dict, OrderedDict} and len(kinds) == 1:
        if not any(TAG in tree for tree in (dead, before, after)):  # else it encodes one value
            return _infer_dict(dead, before, after, path)
    elif kinds in ({list}, {tuple}) and len({len(dead), len(before), len(after)}) == 1:
        rows = enumerate(zip(dead, before, after, strict=True))
        return type(after)(_infer(d, b, a, join(path, i)) for i, (d, b, a) in rows)
    lives = (each.name for each in (dead, before, after) if isinstance(each, StateTensor))
    raise CannotInfer(next(lives, path))


def _infer_dict(
    dead: dict[Any, Any], before: dict[Any, Any], after: dict[Any, Any], path: str
) -> dict[Any, Any]:
    """Apply the rule to each key of dicts, in the dead rank's order if the update changes none."""
    keys = [*dead, *after] if [*before] == [*after] else [*after, *dead]
    found = {
        key: _infer(
            dead.get(key, _MISSING),
            before.get(key, _MISSING),
            after.get(key, _MISSING),
            join(path, key),
        )
        for key in dict.fromkeys([*keys, *before])
    }
    return type(after)((key, value) for key, value in found.items() if value is not _MISSING)


def _same(a: Any, b: Any) -> bool:
    """Tell whether two values are the same, bit for bit."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        layouts = [(each.dtype, each.shape, each.stride()) for each in (a, b)]
        return layouts[0] == layouts[1] and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, StateTensor):
        return bool(a == b) and _same(a.tensor, b.tensor)
    if isinstance(a, dict):
        return _same([*a], [*b]) and _same([*a.values()], [*b.values()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return _same((a.real, a.imag), (b.real, b.imag))
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
