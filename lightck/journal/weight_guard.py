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
from lightck.pipeline.copy_plan import TensorReading
from lightck.state import tensor_layout, tensor_support
from lightck.state.inventory import StateTensor

MAX_PROBES = 32
PROBE_BYTES = 64
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
class _ProbeMemory:
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

    def is_unmoved(self, tensors: list[torch.Tensor]) -> bool:
        """Tell whether tensors are where they were; no Python code runs per tensor."""
        return (
            list(map(torch.Tensor.data_ptr, tensors)) == self.pointers
            and [list(map(measure, self.storages)) for measure in _IN_MEMORY] == self.stored
        )


@dataclass(eq=False)
class WatchedWeights:
    """Picks the weights that an optimizer changes, and the bytes of them that are compared."""

    lives: Sequence[StateTensor]
    """The tensors of model and optimizers."""
    names: list[str] = field(init=False)
    tensors: list[torch.Tensor] = field(init=False)
    _probes: list[_Probe] = field(init=False)
    _probed: list[torch.Tensor] = field(init=False)
    """The tensors that have the bytes in `_probes`."""
    _memory: _ProbeMemory | None = field(default=None, init=False)
    """The memory of those bytes; None: some cannot be read, or nobody has looked yet."""

    def __post_init__(self) -> None:
        """Pick the weights and the bytes."""
        weights = [live for live in self.lives if _is_watched(live)]
        self.names = [live.name for live in weights]
        self.tensors = [live.tensor for live in weights]
        every = max(1, len(weights) / MAX_PROBES)
        chosen = sorted({int(i * every) for i in range(min(len(weights), MAX_PROBES))})
        probes = (_probe_of(i, weights[i].local) for i in chosen)
        self._probes = [probe for probe in probes if probe is not None]
        self._probed = [self.tensors[probe.index] for probe in self._probes]

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return all weights by name."""
        return dict(zip(self.names, self.tensors, strict=True))

    def probe_values(self) -> list[bytes]:
        """Return the bytes that are compared, as they are now; empty where they cannot be read."""
        at = tensor_support.locals_of(self._probed)
        if self._memory is not None and self._memory.is_unmoved(at):
            return list(map(memoryview.tobytes, self._memory.views))
        self._memory = None  # before what was held for it is asked for
        found = list(map(_view, self._probes, at))
        views = [view for view in found if view is not None]
        if len(views) == len(found):
            self._memory = _memory(at, views)
        return [b"" if view is None else view.tobytes() for view in found]

    def changed_since(self, probe_values: list[bytes]) -> str:
        """Return the name of a weight whose bytes differ from those seen; empty: none does."""
        for probe, before, now in zip(self._probes, probe_values, self.probe_values(), strict=True):
            if before != now:
                return self.names[probe.index]
        return ""


@dataclass(eq=False)
class WeightGuard:
    """Remembers the weights as the last step ended, and as the forward after it began."""

    _weights: WatchedWeights = field(default_factory=lambda: WatchedWeights(()))
    _step_end: tuple[TensorReading, list[bytes]] | None = None
    _forward_start: list[bytes] | None = None
    """The bytes as the forward began; counters and addresses of then are kept elsewhere."""

    @property
    def reading_at_step_end(self) -> TensorReading | None:
        """The counters and addresses of the weights as the last step ended; None: not taken yet."""
        return None if self._step_end is None else self._step_end[0]

    def forget(self) -> None:
        """Forget both instants: a step has ended, and what is known is of an older one."""
        self._step_end = self._forward_start = None

    def step_ended(self, lives: Sequence[StateTensor]) -> bool:
        """Take the weights, once for each step; False: they have been swapped since.

        Args:
            lives: the tensors of model and optimizers; the same below.
        """
        if self._step_end is not None:
            return not self.changed_weight(lives, early=True)
        if lives is not self._weights.lives:
            self._weights = WatchedWeights(lives)
        weights = self._weights
        self._step_end = TensorReading.of(weights.tensors), weights.probe_values()
        return True

    def forward_started(self) -> None:
        """Take the weights' bytes, where the forward begins."""
        self._forward_start = self._weights.probe_values()

    def changed_weight(self, lives: Sequence[StateTensor], *, early: bool) -> str:
        """Return the name of a weight that has visibly changed; empty: none has.

        Args:
            lives: just looked up.
            early: since the step ended, else since the forward began, and by their bytes only.
        """
        if early and self._step_end is not None:
            reading, probe_values = self._step_end
            return (
                self._replaced(lives)
                or self._touched(reading)
                or self._weights.changed_since(probe_values)
            )
        if not early and self._forward_start is not None:
            return self._weights.changed_since(self._forward_start)
        return "a weight, for all that is known,"

    def _replaced(self, lives: Sequence[StateTensor]) -> str:
        """Return the name of a weight that is another object, new or gone; empty: none is."""
        if lives is self._weights.lives:
            return ""
        now, before = WatchedWeights(lives).by_name(), self._weights.by_name()
        names = [*before, *(name for name in now if name not in before)]
        return next((name for name in names if now.get(name) is not before.get(name)), "")

    def _touched(self, reading: TensorReading) -> str:
        changed = reading.changed()
        return self._weights.names[changed[0]] if changed else ""


def _is_watched(live: StateTensor) -> bool:
    return live.role == "parameter" and bool(live.holders) and live.alias_of is None


def _probe_of(index: int, tensor: torch.Tensor) -> _Probe | None:
    """Pick bytes in a weight, at another place in each; None if they cannot be read."""
    length = min(PROBE_BYTES, tensor.nbytes)
    readable = tensor.is_cpu and holder(tensor) is None
    if not (length and readable and tensor_layout.is_dense(tensor) and _has_memory(tensor)):
        return None
    kind = _kinds.setdefault(length, ctypes.c_char * length)
    offset = int((index * _GOLDEN % 1.0) * (tensor.nbytes - length))
    return _Probe(index, offset, kind, _form(tensor))


def _view(probe: _Probe, tensor: torch.Tensor) -> memoryview | None:
    """Return the bytes' memory; None if the tensor has another form now, or no storage.

    `p.data = ...` may have made it anything: what is elsewhere, or smaller, is not read.
    """
    if _form(tensor) != probe.form or not _has_memory(tensor):
        return None
    return memoryview(probe.kind.from_address(tensor.data_ptr() + probe.offset))


def _memory(tensors: list[torch.Tensor], views: list[memoryview]) -> _ProbeMemory:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return _ProbeMemory(
        list(map(torch.Tensor.data_ptr, tensors)),
        storages,
        [list(map(measure, storages)) for measure in _IN_MEMORY],
        views,
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Tell whether its storage has its bytes: offloading loops take them away for a while."""
    begin = tensor.storage_offset() * tensor.element_size()
    return begin + tensor.nbytes <= tensor.untyped_storage().nbytes()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.is_cpu, tensor.dtype, tensor.shape, tensor.stride()
