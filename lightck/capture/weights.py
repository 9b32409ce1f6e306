"""The weights as an instant had them, told by counters, addresses and a few bytes of some.

Between a step's end and the next forward a loop may let others stand in for them: an average, for
validation. Counters prove a change, never its absence: what is written through `p.data`, as
averages often are, moves none. Weights that stand in differ nearly everywhere, so a few bytes tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.capture import dtensor, staging
from lightck.capture.arrange import Sources, read
from lightck.capture.holders import holder
from lightck.capture.live import Live

MOST_SPOTS = 32
SPOT_BYTES = 64
_GOLDEN = 0.6180339887
_kinds: dict[int, Any] = {}  # of arrays, by length


@dataclass(frozen=True, slots=True)
class _Spot:
    """Some bytes of one of the weights."""

    index: int
    offset: int
    kind: Any
    """Of the array that they are."""
    form: tuple[Any, ...]
    """Of a tensor that has that memory."""


@dataclass(eq=False)
class Held:
    """Which tensors are weights that an optimizer changes, and where their bytes are looked at."""

    lives: Sequence[Live]
    """Of model and optimizers."""
    names: list[str] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    _spots: list[_Spot] = field(init=False)

    def __post_init__(self) -> None:
        """Sort them out."""
        held = [live for live in self.lives if _is_held(live)]
        self.names = [live.name for live in held]
        self.tensors = [live.tensor for live in held]
        every = max(1, len(held) / MOST_SPOTS)
        chosen = sorted({int(i * every) for i in range(min(len(held), MOST_SPOTS))})
        spots = (_spot(i, held[i].local) for i in chosen)
        self._spots = [spot for spot in spots if spot is not None]

    def by_name(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return dict(zip(self.names, self.tensors, strict=True))

    def seen(self) -> list[bytes]:
        """The bytes that are looked at, as they are now. Of memory of the CPU only."""
        at = dtensor.locals_of([self.tensors[spot.index] for spot in self._spots])
        return list(map(_seen, self._spots, at))

    def changed(self, seen: list[bytes]) -> str:
        """Name of one whose bytes are others than they were seen; empty: none is."""
        for spot, then, now in zip(self._spots, seen, self.seen(), strict=True):
            if then != now:
                return self.names[spot.index]
        return ""


@dataclass(eq=False)
class Weights:
    """What they were when the last step ended, and when the forward after it began."""

    _held: Held = field(default_factory=lambda: Held(()))
    _ended: tuple[Sources, list[bytes]] | None = None
    _begun: list[bytes] | None = None
    """Counters and addresses of that instant are kept with everything else of it."""

    def forget(self) -> None:
        """A step has ended: what is known is of an older one."""
        self._ended = self._begun = None

    def step_ended(self, lives: Sequence[Live]) -> bool:
        """Take them, once for each step; False: others stand in for them by now.

        Args:
            lives: of model and optimizers; likewise below.
        """
        if self._ended is not None:
            return not self.moved(lives, early=True)
        if lives is not self._held.lives:
            self._held = Held(lives)
        tensors = self._held.tensors
        self._ended = Sources(tensors, *read(tensors), []), self._held.seen()
        return True

    def forward(self) -> None:
        """Take them, where the forward begins."""
        self._begun = self._held.seen()

    def moved(self, lives: Sequence[Live], *, early: bool) -> str:
        """Name of one that is not what it was, as far as can be seen; empty: all are.

        Args:
            lives: just looked up.
            early: since the step ended, else since the forward began, and by their bytes only.
        """
        if early and self._ended is not None:
            sources, seen = self._ended
            return self._replaced(lives) or self._touched(sources) or self._held.changed(seen)
        if not early and self._begun is not None:
            return self._held.changed(self._begun)
        return "a weight, for all that is known,"

    def _replaced(self, lives: Sequence[Live]) -> str:
        """Name of one that is another object now, or of one that is new or gone."""
        if lives is self._held.lives:
            return ""
        now, then = Held(lives).by_name(), self._held.by_name()
        names = [*then, *(name for name in now if name not in then)]
        return next((name for name in names if now.get(name) is not then.get(name)), "")

    def _touched(self, sources: Sources) -> str:
        moved = sources.changed()
        return self._held.names[moved[0]] if moved else ""


def _is_held(live: Live) -> bool:
    return live.role == "parameter" and bool(live.holders) and live.alias_of is None


def _spot(index: int, tensor: torch.Tensor) -> _Spot | None:
    """Somewhere in it, elsewhere in each; None where it cannot be looked at."""
    length = min(SPOT_BYTES, tensor.nbytes)
    readable = tensor.is_cpu and holder(tensor) is None
    if not (length and readable and staging.is_dense(tensor) and _is_there(tensor)):
        return None
    kind = _kinds.setdefault(length, ctypes.c_char * length)
    offset = int((index * _GOLDEN % 1.0) * (tensor.nbytes - length))
    return _Spot(index, offset, kind, _form(tensor))


def _seen(spot: _Spot, tensor: torch.Tensor) -> bytes:
    """`p.data = ...` may have made it anything: what is elsewhere, or smaller, is not read."""
    if _form(tensor) != spot.form or not _is_there(tensor):
        return b""
    found: bytes = spot.kind.from_address(tensor.data_ptr() + spot.offset).raw
    return found


def _is_there(tensor: torch.Tensor) -> bool:
    """Its storage has its bytes: offloading loops take them away for a while."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin + tensor.nbytes <= tensor.untyped_storage().nbytes()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.is_cpu, tensor.dtype, tensor.shape, tensor.stride()
