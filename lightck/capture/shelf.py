"""Private memory for small tensors that are copied at both instants of every step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.capture import dtensor, staging
from lightck.capture.parcel import Parcel, form, raw
from lightck.capture.state import Live

_ALIGNED_BYTES = 16
"""As the widest dtype wants it."""


@dataclass(eq=False)
class Shelf:
    """Two places, filled in turn: the copies of (a) stay while those of (b) are made.

    Dense tensors in CPU memory go together, by one call; others are cloned one by one.
    """

    lives: Sequence[Live]
    _tensors: list[torch.Tensor] = field(default_factory=list)
    """Of `lives`."""
    _together: list[int] = field(default_factory=list)
    _flats: list[torch.Tensor] = field(default_factory=list)
    """The memory of each place, and views into it."""
    _places: list[list[torch.Tensor]] = field(default_factory=list)
    _turn: int = 0
    _said: dict[str, Any] | None = None
    """What a parcel says of those that go together."""

    def __post_init__(self) -> None:
        """Make the places."""
        self._tensors = [live.tensor for live in self.lives]
        self._together = [i for i, tensor in enumerate(self._tensors) if _is_plain(tensor)]
        end, begins = 0, []
        for i in self._together:
            begins.append(end)
            end += -(-self._tensors[i].nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        for _ in range(2):
            flat = torch.empty(end, dtype=torch.uint8)
            self._flats.append(flat)
            self._places.append([
                _place(flat, begin, self._tensors[i])
                for i, begin in zip(self._together, begins, strict=True)
            ])  # fmt: skip

    def fits(self, lives: Sequence[Live]) -> bool:
        """Whether the places are for these very tensors, as they are formed now."""
        tensors = [live.tensor for live in lives]
        return (
            len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
            and [live.name for live in lives] == [live.name for live in self.lives]
            and all(
                place.shape == tensors[i].shape
                and place.stride() == tensors[i].stride()
                and place.dtype == tensors[i].dtype
                for place, i in zip(self._places[0], self._together, strict=True)
            )
        )

    def fill(self) -> dict[str, torch.Tensor]:
        """Copy everything now; by name. They stay until `fill` is called for the second time."""
        if not self.lives:
            return {}
        self._turn ^= 1
        places, tensors = self._places[self._turn], self._tensors
        with torch.no_grad():
            if places:
                torch._foreach_copy_(places, [tensors[i] for i in self._together])
            found = {self.lives[i].name: p for i, p in zip(self._together, places, strict=True)}
            for live in self.lives:
                if live.name not in found:
                    found[live.name] = live.tensor.detach().clone()
        return found

    def packed(self, parcel: Parcel, copies: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Put what `fill` has just copied into an empty parcel; returns what is said of it there.

        Neither shares, which others hold, too, nor shards, which are nothing without their mesh.
        """
        if not self.lives:
            return {}
        places = self._places[self._turn]
        if self._said is None:
            pairs = [(self.lives[i], p) for i, p in zip(self._together, places, strict=True)]
            self._said = {
                live.name: _said(live, form(place, int(place.storage_offset()) * place.itemsize))
                for live, place in pairs
                if live.span is None
            }
        parcel.add(raw(self._flats[self._turn]))
        said = dict(self._said)
        together = {*self._together}
        for i, live in enumerate(self.lives):
            if i not in together and live.span is None and not dtensor.is_dtensor(live.tensor):
                said[live.name] = _said(live, parcel.put(_dense(copies[live.name])))
        return said


def _said(live: Live, tensor: dict[str, Any]) -> dict[str, Any]:
    holders = sorted(live.holders)
    return {"role": live.role, "layer": live.layer, "holders": holders, "tensor": tensor}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.cpu().resolve_conj().resolve_neg()
    return plain if staging.is_dense(plain) else plain.contiguous()


def _place(flat: torch.Tensor, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    part = flat[begin : begin + tensor.nbytes].view(tensor.dtype)
    return part.as_strided(tensor.shape, tensor.stride(), part.storage_offset())


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and not dtensor.is_dtensor(tensor)
        and not tensor.is_inference()
        and staging.is_dense(tensor)
    )
