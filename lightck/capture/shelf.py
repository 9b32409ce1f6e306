"""Private memory for small tensors that are copied at every instant of every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.capture import dtensor, staging
from lightck.capture.holders import holder
from lightck.capture.live import Live
from lightck.capture.parcel import Parcel, form, raw

_ALIGNED_BYTES = 16
"""As the widest dtype wants it."""
_ASIDE = 2


@dataclass(eq=False)
class Shelf:
    """Keeps two places, filled in turn: step end's copies stay while forward start's are made.

    A third one, aside, is for what is only written. Dense tensors in CPU memory go together, by
    one call; others are cloned one by one: those that a device holds on it, which nobody waits for.
    """

    lives: Sequence[Live]
    _together: list[int] = field(default_factory=list)
    _alone: list[int] = field(default_factory=list)
    _sources: list[torch.Tensor] = field(default_factory=list)
    """What goes together."""
    _flats: list[torch.Tensor] = field(default_factory=list)
    """The memory of each place, and views into it: in order, by name, of what changes by name."""
    _places: list[list[torch.Tensor]] = field(default_factory=list)
    _named: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _changing: list[dict[str, torch.Tensor]] = field(default_factory=list)
    _filled: int = 1
    """In turn."""
    _last: int = 0
    _said: dict[str, Any] = field(default_factory=dict)
    """What a parcel says of those that go together."""

    def __post_init__(self) -> None:
        """Make the places."""
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
        self._said = {
            live.name: _said(live, form(place, int(place.storage_offset()) * place.itemsize))
            for live, place in zip(lives, self._places[0], strict=True)
            if live.span is None
        }

    def fits(self, lives: Sequence[Live]) -> bool:
        """Whether the places are for tensors of these names and forms; they serve these then."""
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
        """Copy everything now; by name, as `changing` picks from it.

        The copies stay until the second time after this; those aside, which lack what a device
        holds, until the next time there.
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
            alone = {live.name: staging.private(live.tensor) for live in kept}
        return {**self._named[turn], **alone}

    def changing(self, copies: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of what `fill` has just copied, what changes in the window."""
        if not self.lives:
            return {}
        if not self._alone:
            return self._changing[self._last]
        return {live.name: copies[live.name] for live in self.lives if live.sync}

    def packed(self, parcel: Parcel, copies: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Put what `fill` has just copied into an empty parcel; returns what is said of it there.

        Neither shares, which others hold, too, nor shards, which are nothing without their mesh,
        nor what a device holds: it would be waited for at every instant.
        """
        if not self.lives:
            return self._said
        parcel.add(raw(self._flats[self._last]))
        if not self._alone:
            return self._said
        said = dict(self._said)
        for live in (self.lives[i] for i in self._alone):
            whole = live.span is None and not dtensor.is_dtensor(live.tensor)
            if whole and is_readable(live.local):
                said[live.name] = _said(live, parcel.put(_dense(copies[live.name])))
        return said


def _forms(tensors: Sequence[torch.Tensor]) -> list[Any]:
    shapes = list(map(operator.attrgetter("shape"), tensors))
    return [shapes, list(map(torch.Tensor.stride, tensors)), [each.dtype for each in tensors]]


def _said(live: Live, tensor: dict[str, Any]) -> dict[str, Any]:
    holders = sorted(live.holders)
    return {"role": live.role, "layer": live.layer, "holders": holders, "tensor": tensor}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.resolve_conj().resolve_neg()
    return plain if staging.is_dense(plain) else plain.contiguous()


def _place(flat: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    part = flat[begin : begin + tensor.nbytes].view(tensor.dtype)
    return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether the calling thread can read it where it is. No DTensor."""
    return tensor.is_cpu and holder(tensor) is None


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        not dtensor.is_dtensor(tensor)
        and is_readable(tensor)
        and not tensor.is_inference()
        and staging.is_dense(tensor)
    )
