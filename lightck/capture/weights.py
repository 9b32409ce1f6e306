"""The weights as an instant had them, told by counters, addresses and a few bytes of some.

Between a step's end and the next forward a loop may let others stand in for them: an average, for
validation. Counters prove a change, never its absence: what is written through `p.data`, as
averages often are, moves none. Weights that stand in differ nearly everywhere, so a few bytes tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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


_IN_MEMORY: tuple[Callable[[torch.UntypedStorage], int], ...] = (
    torch.UntypedStorage.data_ptr,
    torch.UntypedStorage.nbytes,
)


@dataclass(frozen=True, slots=True)
class _Spot:
    """Some bytes of one of the weights."""

    index: int
    offset: int
    kind: Any
    """Of the array that they are."""
    form: tuple[Any, ...]
    """Of a tensor that has that memory."""


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the spots' tensors are, all of them in memory that can be read, and the bytes there.

    Memory of a storage that is held here is given to nobody else. So while none was resized, what
    was at an address is there yet, and need not be looked for tensor by tensor. A weight that is
    sent elsewhere leaves its memory when it is looked at next.
    """

    pointers: list[int]
    storages: list[torch.UntypedStorage]
    stored: list[list[int]]
    """Address and size of each."""
    views: list[memoryview]

    def serves(self, tensors: list[torch.Tensor]) -> bool:
        """Whether they are where they were; no Python code runs per tensor."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self.pointers
            and [list(map(said, self.storages)) for said in _IN_MEMORY] == self.stored
        )


@dataclass(eq=False)
class Held:
    """Which tensors are weights that an optimizer changes, and where their bytes are looked at."""

    lives: Sequence[Live]
    """Of model and optimizers."""
    names: list[str] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    _spots: list[_Spot] = field(init=False)
    _looked_at: list[torch.Tensor] = field(init=False)
    """The tensors of the spots."""
    _place: _Place | None = field(default=None, init=False)
    """None: some of the bytes cannot be read, or nobody has looked yet."""

    def __post_init__(self) -> None:
        """Sort them out."""
        held = [live for live in self.lives if _is_held(live)]
        self.names = [live.name for live in held]
        self.tensors = [live.tensor for live in held]
        every = max(1, len(held) / MOST_SPOTS)
        chosen = sorted({int(i * every) for i in range(min(len(held), MOST_SPOTS))})
        spots = (_spot(i, held[i].local) for i in chosen)
        self._spots = [spot for spot in spots if spot is not None]
        self._looked_at = [self.tensors[spot.index] for spot in self._spots]

    def by_name(self) -> dict[str, torch.Tensor]:
        """All of them."""
        return dict(zip(self.names, self.tensors, strict=True))

    def seen(self) -> list[bytes]:
        """The bytes that are looked at, as they are now. Of memory of the CPU only."""
        at = dtensor.locals_of(self._looked_at)
        if self._place is not None and self._place.serves(at):
            return list(map(memoryview.tobytes, self._place.views))
        self._place = None  # before what was held for it is asked for
        found = list(map(_view, self._spots, at))
        views = [view for view in found if view is not None]
        if len(views) == len(found):
            self._place = _place(at, views)
        return [b"" if view is None else view.tobytes() for view in found]

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

    @property
    def at_end(self) -> Sources | None:
        """What is known of them where the last step ended."""
        return None if self._ended is None else self._ended[0]

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
        held = self._held
        self._ended = Sources(held.tensors, *read(held.tensors), []), held.seen()
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


def _view(spot: _Spot, tensor: torch.Tensor) -> memoryview | None:
    """`p.data = ...` may have made it anything: what is elsewhere, or smaller, is not read."""
    if _form(tensor) != spot.form or not _is_there(tensor):
        return None
    return memoryview(spot.kind.from_address(tensor.data_ptr() + spot.offset))


def _place(tensors: list[torch.Tensor], views: list[memoryview]) -> _Place:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return _Place(
        list(map(torch.Tensor.data_ptr, tensors)),
        storages,
        [list(map(said, storages)) for said in _IN_MEMORY],
        views,
    )


def _is_there(tensor: torch.Tensor) -> bool:
    """Its storage has its bytes: offloading loops take them away for a while."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin + tensor.nbytes <= tensor.untyped_storage().nbytes()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.is_cpu, tensor.dtype, tensor.shape, tensor.stride()
