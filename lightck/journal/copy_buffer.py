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
_ASIDE = 2


@dataclass(eq=False)
class CopyBuffer:
    """Copies small tensors into two buffers in turn: step end's copies outlive forward start's.

    A third buffer, aside, is for copies that are only written to the journal. Dense tensors in CPU
    memory are copied together, by one call; others are cloned one by one: those that a device holds
    are cloned on it, and nobody waits for that.
    """

    lives: Sequence[StateTensor]
    _together: list[int] = field(default_factory=list)
    _alone: list[int] = field(default_factory=list)
    _sources: list[torch.Tensor] = field(default_factory=list)
    """The tensors that are copied together."""
    _flats: list[torch.Tensor] = field(default_factory=list)
    """The memory of each buffer. Below: each buffer's views into it, in order and by name, and the
    views by name of the tensors that change inside the window."""
    _places: list[list[torch.Tensor]] = field(default_factory=list)
    _named: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _changing: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _filled: int = 1
    """The number of the buffer filled last, of the two that are filled in turn."""
    _last: int = 0
    _said: dict[str, Any] = field(default_factory=dict)
    """The description, for a blob, of each tensor that is copied together. Below: where the bytes
    of each are, and both as text."""
    _rows: list[list[Any]] = field(default_factory=list)
    _text: bytes = b""

    def __post_init__(self) -> None:
        """Make the buffers."""
        tensors = [live.tensor for live in self.lives]
        for i, tensor in enumerate(tensors):
            (self._together if _is_plain(tensor) else self._alone).append(i)
        self._sources = [tensors[i] for i in self._together]
        end, begins = 0, []
        for source in self._sources:
            begins.append(end)
            end += -(-source.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        lives = [self.lives[i] for i in self._together]
        for _ in range(_ASIDE + 1):
            flat = torch.empty(end, dtype=torch.uint8, device="cpu")
            places = list(map(_place, [flat] * len(begins), begins, self._sources))
            pairs = list(zip(lives, places, strict=True))
            self._flats.append(flat)
            self._places.append(places)
            self._named.append({live.name: place for live, place in pairs})
            self._changing.append({live.name: place for live, place in pairs if live.sync})
        writer = PartWriter(rows=self._rows, size=end)
        self._said = {
            live.name: _said(live, writer.describe(place, begin))
            for live, place, begin in zip(lives, self._places[0], begins, strict=True)
            if live.span is None
        }
        self._text = writer.finish(self._said).text

    def fits(self, lives: Sequence[StateTensor]) -> bool:
        """Tell whether the buffers have the names and forms of these tensors; then serve these."""
        if len(lives) != len(self.lives):
            return False
        if not lives:
            return True
        if not all(map(operator.is_, lives, self.lives)):
            plain = [i for i, live in enumerate(lives) if _is_plain(live.tensor)]
            if list(lives) != list(self.lives) or plain != self._together:
                return False
        sources = [lives[i].tensor for i in self._together]
        if _forms(sources) != _forms(self._places[0]):
            return False
        self.lives, self._sources = lives, sources
        return True

    def fill(self, *, aside: bool = False) -> dict[str, torch.Tensor]:
        """Copy everything now; return the copies by name, for `changing` to pick from.

        They stay until the next but one call; those aside, without what a device holds, until the
        next call aside.
        """
        if not self.lives:
            return {}
        if not aside:
            self._filled ^= 1
        self._last = turn = _ASIDE if aside else self._filled
        with torch.no_grad():
            if self._sources:
                torch._foreach_copy_(self._places[turn], self._sources)
            if not self._alone:
                return self._named[turn]
            lives = [self.lives[i] for i in self._alone]
            kept = [live for live in lives if not aside or is_readable(live.local)]
            alone = {live.name: tensor_layout.private(live.tensor) for live in kept}
        return {**self._named[turn], **alone}

    def changing(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of the copies that `fill` has just made which change inside the window."""
        if not self.lives:
            return {}
        if not self._alone:
            return self._changing[self._last]
        return {live.name: copies[live.name] for live in self.lives if live.sync}

    def part(self, copies: Mapping[str, torch.Tensor]) -> Part:
        """Return the copies that `fill` has just made, with their descriptions, for a blob.

        Left out are shares, which others hold, too, shards, which are nothing without their mesh,
        and what a device holds: it would be waited for at every instant.
        """
        flat = (raw(self._flats[self._last]),)
        alone = [live for live in map(self.lives.__getitem__, self._alone) if _is_own(live)]
        if not alone:
            return Part(self._text, flat)
        writer = PartWriter(rows=[*self._rows], data=[*flat], size=len(flat[0]))
        said = {live.name: _said(live, writer.put(_dense(copies[live.name]))) for live in alone}
        return writer.finish({**self._said, **said})


def _is_own(live: StateTensor) -> bool:
    whole = live.span is None and not tensor_support.is_dtensor(live.tensor)
    return whole and is_readable(live.local)


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    shapes = list(map(operator.attrgetter("shape"), tensors))
    return [shapes, list(map(torch.Tensor.stride, tensors)), [each.dtype for each in tensors]]


def _said(live: StateTensor, tensor: dict[str, Any]) -> dict[str, Any]:
    holders = sorted(live.holders)
    return {"role": live.role, "layer": live.layer, "holders": holders, "tensor": tensor}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain if tensor_layout.is_dense(plain) else plain.contiguous()


def _place(flat: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    part = flat[begin : begin + tensor.nbytes].view(tensor.dtype)
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
