"""Private memory for small tensors that are copied at every instant of every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.device.lookup import holder
from lightck.state import tensor_layout, tensor_support
from lightck.state.boundary_blob import Part, PartWriter, raw
from lightck.state.inventory import StateTensor

_ALIGNED_BYTES = 16
"""The alignment of each tensor's copy, which suits the widest dtype."""
_JOURNAL = 2


@dataclass(eq=False)
class CopyBuffer:
    """Copies small tensors into two buffers in turn: step end's copies outlive forward start's.

    A third buffer, aside, is for copies that are only written to the journal. Dense tensors in CPU
    memory are copied together, by one call; others are cloned one by one: those that a device holds
    are cloned on it, and nobody waits for that.
    """

    lives: Sequence[StateTensor]
    _batched: list[int] = field(default_factory=list)
    _cloned: list[int] = field(default_factory=list)
    _sources: list[torch.Tensor] = field(default_factory=list)
    """The tensors that are copied together."""
    _memory: list[torch.Tensor] = field(default_factory=list)
    """The memory of each buffer. Below: each buffer's views into it, in order and by name, and the
    views by name of the tensors that change inside the window."""
    _views: list[list[torch.Tensor]] = field(default_factory=list)
    _named_views: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _changing_views: list[dict[str, torch.Tensor]] = field(default_factory=list)
    options: tuple[str, ...] = ()
    """The names of the tensors that no forward changes."""
    _filled: int = 1
    """The number of the buffer filled last, of the two that are filled in turn."""
    _last: int = 0
    _descriptions: dict[str, Any] = field(default_factory=dict)
    """The description, for a blob, of each tensor that is copied together. Below: where the bytes
    of each are, and both as text."""
    _rows: list[list[Any]] = field(default_factory=list)
    _text: bytes = b""

    def __post_init__(self) -> None:
        """Make the buffers."""
        self.options = tuple(live.name for live in self.lives if not live.sync)
        tensors = [live.tensor for live in self.lives]
        for i, tensor in enumerate(tensors):
            (self._batched if _is_plain(tensor) else self._cloned).append(i)
        self._sources = [tensors[i] for i in self._batched]
        end, offsets = 0, []
        for source in self._sources:
            offsets.append(end)
            end += -(-source.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        lives = [self.lives[i] for i in self._batched]
        for _ in range(_JOURNAL + 1):
            flat = torch.empty(end, dtype=torch.uint8, device="cpu")
            places = list(map(_view, [flat] * len(offsets), offsets, self._sources))
            pairs = list(zip(lives, places, strict=True))
            self._memory.append(flat)
            self._views.append(places)
            self._named_views.append({live.name: place for live, place in pairs})
            self._changing_views.append({live.name: place for live, place in pairs if live.sync})
        writer = PartWriter(rows=self._rows, size=end)
        self._descriptions = {
            live.name: _described(live, writer.describe(place, offset))
            for live, place, offset in zip(lives, self._views[0], offsets, strict=True)
            if live.span is None
        }
        self._text = writer.finish(self._descriptions).text

    def fits(self, lives: Sequence[StateTensor]) -> bool:
        """Tell whether the buffers have the names and forms of these tensors; then serve these."""
        if len(lives) != len(self.lives):
            return False
        if not lives:
            return True
        if not all(map(operator.is_, lives, self.lives)):
            plain = [i for i, live in enumerate(lives) if _is_plain(live.tensor)]
            if list(lives) != list(self.lives) or plain != self._batched:
                return False
        sources = [lives[i].tensor for i in self._batched]
        if _forms(sources) != _forms(self._views[0]):
            return False
        self.lives, self._sources = lives, sources
        return True

    def fill(self, *, journal_only: bool = False) -> dict[str, torch.Tensor]:
        """Copy everything now; return the copies by name, for `changing` to pick from.

        They stay until the next but one call; those aside, without what a device holds, until the
        next call aside.
        """
        if not self.lives:
            return {}
        if not journal_only:
            self._filled ^= 1
        self._last = buffer = _JOURNAL if journal_only else self._filled
        with torch.no_grad():
            if self._sources:
                torch._foreach_copy_(self._views[buffer], self._sources)
            if not self._cloned:
                return self._named_views[buffer]
            lives = [self.lives[i] for i in self._cloned]
            readable = [live for live in lives if not journal_only or is_readable(live.local)]
            cloned = {live.name: tensor_layout.private(live.tensor) for live in readable}
        return {**self._named_views[buffer], **cloned}

    def changing(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of the copies that `fill` has just made which change inside the window."""
        if not self.lives:
            return {}
        if not self._cloned:
            return self._changing_views[self._last]
        return {live.name: copies[live.name] for live in self.lives if live.sync}

    def part(self, copies: Mapping[str, torch.Tensor]) -> Part:
        """Return the copies that `fill` has just made, with their descriptions, for a blob.

        Left out are shares, which others hold, too, shards, which are nothing without their mesh,
        and what a device holds: it would be waited for at every instant.
        """
        flat = (raw(self._memory[self._last]),)
        cloned = [
            live for live in map(self.lives.__getitem__, self._cloned) if _is_rank_local(live)
        ]
        if not cloned:
            return Part(self._text, flat)
        writer = PartWriter(rows=[*self._rows], data=[*flat], size=len(flat[0]))
        descriptions = {
            live.name: _described(live, writer.put(_dense(copies[live.name]))) for live in cloned
        }
        return writer.finish({**self._descriptions, **descriptions})


def _is_rank_local(live: StateTensor) -> bool:
    whole = live.span is None and not tensor_support.is_dtensor(live.tensor)
    return whole and is_readable(live.local)


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    shapes = list(map(operator.attrgetter("shape"), tensors))
    return [shapes, list(map(torch.Tensor.stride, tensors)), [each.dtype for each in tensors]]


def _described(live: StateTensor, tensor: dict[str, Any]) -> dict[str, Any]:
    holders = sorted(live.holders)
    return {"role": live.role, "layer": live.layer, "holders": holders, "tensor": tensor}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain if tensor_layout.is_dense(plain) else plain.contiguous()


def _view(flat: torch.Tensor, offset: int, tensor: torch.Tensor) -> torch.Tensor:
    part = flat[offset : offset + tensor.nbytes].view(tensor.dtype)
    return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether the calling thread can read a tensor where it is. Not for a DTensor."""
    return tensor.is_cpu and holder(tensor) is None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        not tensor_support.is_dtensor(tensor)
        and is_readable(tensor)
        and not tensor.is_inference()
        and tensor_layout.is_dense(tensor)
    )
