"""Detects weights that were swapped for others, by counters, addresses and some of the bytes.

Between a step's end and the next forward a loop may put other weights in their place: an average,
for validation. Counters prove a change, never its absence: what is written through `p.data`, as
averages often are, moves none. Other weights differ nearly everywhere, so a few bytes tell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightck.device.lookup import holder
from lightck.pipeline.copy_plan import CopySources, read
from lightck.state import tensor_layout, tensor_support
from lightck.state.inventory import StateTensor

MOST_SPOTS = 32
SPOT_BYTES = 64
_GOLDEN = 0.6180339887
_kinds: dict[int, Any] = {}  # ctypes array types, by length


_IN_MEMORY: tuple[Callable[[torch.UntypedStorage], int], ...] = (
    torch.UntypedStorage.data_ptr,
    torch.UntypedStorage.nbytes,
)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Some bytes of one weight, which are compared."""

    index: int
    offset: int
    kind: Any
    """The ctypes type of the array of these bytes."""
    form: tuple[Any, ...]
    """Device kind, dtype, shape and strides that the tensor must have for its bytes to be read."""


@dataclass(frozen=True, eq=False)
class _Place:
    """The memory of the tensors whose bytes are compared, all of it readable, and the bytes there.

    Memory of a storage that is held here is given to nobody else. So while none was resized, what
    was at an address is there yet, and need not be looked for tensor by tensor. A weight that is
    sent elsewhere leaves its memory when it is looked at next.
    """

    pointers: list[int]
    storages: list[torch.UntypedStorage]
    stored: list[list[int]]
    """The addresses and the sizes of the storages."""
    views: list[memoryview]

    def serves(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether tensors are where they were; no Python code runs per tensor."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self.pointers
            and [list(map(said, self.storages)) for said in _IN_MEMORY] == self.stored
        )


@dataclass(eq=False)
class WatchedWeights:
    """Picks the weights that an optimizer changes, and the bytes of them that are compared."""

    lives: Sequence[StateTensor]
    """The tensors of model and optimizers."""
    names: list[str] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    _spots: list[_Probe] = field(init=False)
    _looked_at: list[torch.Tensor] = field(init=False)
    """The tensors that have the bytes in `_spots`."""
    _place: _Place | None = field(default=None, init=False)
    """The memory of those bytes; None: some cannot be read, or nobody has looked yet."""

    def __post_init__(self) -> None:
        """Pick the weights and the bytes."""
        held = [live for live in self.lives if _is_held(live)]
        self.names = [live.name for live in held]
        self.tensors = [live.tensor for live in held]
        every = max(1, len(held) / MOST_SPOTS)
        chosen = sorted({int(i * every) for i in range(min(len(held), MOST_SPOTS))})
        spots = (_spot(i, held[i].local) for i in chosen)
        self._spots = [spot for spot in spots if spot is not None]
        self._looked_at = [self.tensors[spot.index] for spot in self._spots]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return all weights by name."""
        return dict(zip(self.names, self.tensors, strict=True))

    def seen(self) -> list[bytes]:
        """Return the bytes that are compared, as they are now; empty where they cannot be read."""
        at = tensor_support.locals_of(self._looked_at)
        if self._place is not None and self._place.serves(at):
            return list(map(memoryview.tobytes, self._place.views))
        self._place = None  # before what was held for it is asked for
        found = list(map(_view, self._spots, at))
        views = [view for view in found if view is not None]
        if len(views) == len(found):
            self._place = _place(at, views)
        return [b"" if view is None else view.tobytes() for view in found]

    def changed(self, seen: list[bytes]) -> str:
        """Return the name of a weight whose bytes differ from those seen; empty: none does."""
        for spot, then, now in zip(self._spots, seen, self.seen(), strict=True):
            if then != now:
                return self.names[spot.index]
        return ""


@dataclass(eq=False)
class WeightGuard:
    """Remembers the weights as the last step ended, and as the forward after it began."""

    _held: WatchedWeights = field(default_factory=lambda: WatchedWeights(()))
    _ended: tuple[CopySources, list[bytes]] | None = None
    _begun: list[bytes] | None = None
    """The bytes as the forward began; counters and addresses of then are kept elsewhere."""

    @property
    def at_end(self) -> CopySources | None:
        """The counters and addresses of the weights as the last step ended; None: not taken yet."""
        return None if self._ended is None else self._ended[0]

    def forget(self) -> None:
        """Forget both instants: a step has ended, and what is known is of an older one."""
        self._ended = self._begun = None

    def step_ended(self, lives: Sequence[StateTensor]) -> bool:
        """Take the weights, once for each step; False: they have been swapped since.

        Args:
            lives: the tensors of model and optimizers; the same below.
        """
        if self._ended is not None:
            return not self.moved(lives, early=True)
        if lives is not self._held.lives:
            self._held = WatchedWeights(lives)
        held = self._held
        self._ended = CopySources(held.tensors, *read(held.tensors), []), held.seen()
        return True

    def forward(self) -> None:
        """Take the weights' bytes, where the forward begins."""
        self._begun = self._held.seen()

    def moved(self, lives: Sequence[StateTensor], *, early: bool) -> str:
        """Return the name of a weight that has visibly changed; empty: none has.

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

    def _replaced(self, lives: Sequence[StateTensor]) -> str:
        """Return the name of a weight that is another object, new or gone; empty: none is."""
        if lives is self._held.lives:
            return ""
        now, then = WatchedWeights(lives).by_name(), self._held.by_name()
        names = [*then, *(name for name in now if name not in then)]
        return next((name for name in names if now.get(name) is not then.get(name)), "")

    def _touched(self, sources: CopySources) -> str:
        moved = sources.changed()
        return self._held.names[moved[0]] if moved else ""


def _is_held(live: StateTensor) -> bool:
    return live.role == "parameter" and bool(live.holders) and live.alias_of is None


def _spot(index: int, tensor: torch.Tensor) -> _Probe | None:
    """Pick bytes in a weight, at another place in each; None if they cannot be read."""
    length = min(SPOT_BYTES, tensor.nbytes)
    readable = tensor.is_cpu and holder(tensor) is None
    if not (length and readable and tensor_layout.is_dense(tensor) and _is_there(tensor)):
        return None
    kind = _kinds.setdefault(length, ctypes.c_char * length)
    offset = int((index * _GOLDEN % 1.0) * (tensor.nbytes - length))
    return _Probe(index, offset, kind, _form(tensor))


def _view(spot: _Probe, tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes' memory; None if the tensor has another form now, or no storage.

    `p.data = ...` may have made it anything: what is elsewhere, or smaller, is not read.
    """
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
    """Tell whether its storage has its bytes: offloading loops take them away for a while."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin + tensor.nbytes <= tensor.untyped_storage().nbytes()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.is_cpu, tensor.dtype, tensor.shape, tensor.stride()
