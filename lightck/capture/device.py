"""What the transfers need of a device whose memory the workers cannot read.

A device runs what is queued to a *stream* in order, and streams beside each other; a *mark* is a
place in a stream's order that others can wait for. Each thread of the training computes on its own
current stream. lightck copies on one more stream of each device, which computes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Mark(Protocol):
    """A place in a stream's order. Any thread."""

    def passed(self) -> bool:
        """Whether everything before it is done.

        Raises:
            DeviceError: the device has failed.
        """

    def wait(self) -> None:
        """Return when it is; others run meanwhile. Raises as `passed`."""


class Device(Protocol):
    """One device. Any thread; every call only queues, but for those that say otherwise."""

    name: str

    def stream(self) -> Any:
        """That of the calling thread."""

    def mark(self, stream: Any = None) -> Mark:
        """Here, behind what a stream, by default the calling thread's, has to do."""

    def apart(self, mark: Mark) -> AbstractContextManager[object]:
        """Inside, the calling thread has a stream of its own, which begins behind the mark."""

    def hold(self, mark: Mark) -> None:
        """The calling thread's stream does nothing more before the mark is passed."""

    def follow(self, mark: Mark) -> None:
        """The copying stream does nothing more before the mark is passed."""

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Mark:
        """Copy bytes on the copying stream; the mark is behind the last of them.

        Args:
            targets: uint8, on the device, or pinned or registered memory.
            sources: uint8, likewise, of the same lengths; one of each pair is on the device. Both
                must live, and keep their memory, until the mark is passed.
        """

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]
    ) -> torch.Tensor:
        """A tensor in the device's memory, of any content, for the calling thread's stream."""

    def private(
        self, source: torch.Tensor, shape: Sequence[int], strides: Sequence[int]
    ) -> torch.Tensor:
        """A dense copy of a tensor in the device's memory, made by the calling thread's stream."""

    def spare(self, size: int) -> torch.Tensor | None:
        """So many bytes for the copying stream if they fit beside the training, or None."""

    def is_short(self) -> bool:
        """The training has grown so that what `spare` has given does not fit beside it any more."""

    def reserve(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Memory that a thread `apart` finds there when it is let go of.

        To ask a driver for more may wait for what hangs.
        """

    def pinned(self, size: int) -> torch.Tensor:
        """DRAM that the device reads and writes itself. May block."""

    def register(self, address: int, length: int) -> str:
        """Make existing memory such that it does; empty, or why not. May block for long."""

    def unregister(self, address: int) -> None:
        """End that; no copy may be under way. May block."""

    def warm(self) -> None:
        """Load what the calls above load when they are first made.

        May block, but not for what computes.
        """

    def enter_thread(self) -> None:
        """What the calling thread asks from now on ends no recording of another. At once."""

    def recording(self) -> bool:
        """The calling thread's stream records a graph: what it is given does not run now."""
