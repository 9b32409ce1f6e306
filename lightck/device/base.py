"""Define what transfers need of a device whose memory the workers cannot read.

A device runs what is queued to a *stream* in order, and streams beside each other; an *event* is a
place in a stream's order that others can wait for. Each thread of the training computes
on its own current stream. lightck copies on one more stream of each device, which computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    """Event: a place in a stream's order. Any thread."""

    def query(self) -> bool:
        """Tell whether everything before it is done.

        Raises:
            DeviceError: the device has failed.
        """

    def synchronize(self) -> None:
        """Wait until it has passed; other threads run meanwhile. Raises as `passed`."""


class Device(Protocol):
    """One device. Any thread; a method only queues work, unless it says otherwise."""

    name: str

    def stream(self) -> Any:
        """Return the calling thread's current stream."""

    def record_event(self, stream: Any = None) -> DeviceEvent:
        """Record an event behind what a stream, by default the calling thread's, has to do."""

    def side_stream(self, event: DeviceEvent) -> AbstractContextManager[object]:
        """Give the calling thread its own stream in the block, which begins behind the event."""

    def make_stream_wait(self, event: DeviceEvent) -> None:
        """Make the calling thread's stream wait for the event before it does anything more."""

    def copy_stream_wait(self, event: DeviceEvent) -> None:
        """Make the copying stream wait for the event before it does anything more."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> DeviceEvent:
        """Copy bytes on the copying stream; return an event behind the last of them.

        Args:
            targets: uint8, on the device, or pinned or registered memory.
            sources: uint8, in memory as above, of the same lengths; one of each pair is on the
                device. Both must live, and keep their memory, until the event has passed.
        """

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> DeviceEvent:
        """Copy a small tensor into pinned DRAM, on the calling thread's stream.

        Returns an event behind the copy; the source may be overwritten or freed at once.
        """

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
    ) -> torch.Tensor:
        """Make a tensor of any content on the device, for the calling thread's stream."""

    def private(
        self, source: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """Copy a tensor densely into the device's memory, on the calling thread's stream."""

    def allocate_spare(self, size: int) -> torch.Tensor | None:
        """Return `size` bytes for the copying stream if they fit beside training, else None."""

    def is_low_on_memory(self) -> bool:
        """Tell whether training has grown so that what `spare` gave no longer fits beside it."""

    def reserve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Allocate memory that, freed, a thread in `side_stream` can have without the driver.

        Asking the driver for more may wait for what hangs.
        """

    def pinned(self, size: int) -> torch.Tensor:
        """Allocate DRAM that the device reads and writes itself. May block."""

    def register(self, address: int, length: int) -> str:
        """Make existing memory such that the device reads and writes it itself. May block for long.

        Returns why it cannot be; empty if it is.
        """

    def unregister(self, address: int) -> None:
        """Undo `register` of this memory; no copy may be under way. May block."""

    def preload(self) -> None:
        """Load now what the methods above would load at their first call.

        May block, but does not wait for what computes.
        """

    def enter_thread(self) -> None:
        """Keep later calls of this thread from ending another's graph recording. At once."""

    def recording(self) -> bool:
        """Tell whether the calling thread's stream records a graph, and runs nothing now."""
