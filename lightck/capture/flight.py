"""A snapshot on its way: what it copies, who waits for it, and what became of those before it.

A *flight* is a snapshot between its opening at forward start and its fate. Its copies form groups,
one per set of optimizers that change them, so that each optimizer's step waits for its own tensors
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from lightck.capture.arrange import Sources
from lightck.capture.transfer import Transfer
from lightck.errors import TornSnapshotError
from lightck.region.native import HOLDS_ALL, RECORD_EARLY
from lightck.region.writer import Batch, SlotWriter


@dataclass(eq=False)
class Group:
    """Copies whose sources the same optimizers change."""

    holders: frozenset[int]
    batch: Batch
    sources: Sources | None
    """Keeps the memory that is copied alive; None once it is captured."""
    owned: bool
    """Nothing can tear them: private copies, or made before the opening returned."""
    transfer: Transfer | None = None
    """Of what a device holds: how it comes here."""

    @property
    def is_held(self) -> bool:
        """Its copies run when they are released."""
        return not self.owned and self.transfer is None

    @property
    def captured(self) -> bool:
        """Every copy has left its source; of a device's, has before what the device does next."""
        return self.sources is None


@dataclass(eq=False)
class Flight:
    """Follows one snapshot from forward start to its fate."""

    step: int
    writer: SlotWriter
    at_step: bytes
    at_forward: bytes
    flags: int
    share_digest: bytes = HOLDS_ALL
    form: bytes = b""
    """See `state.Shared`."""
    local: bool = False
    """No other rank was asked: what all of them hold decides at restore."""
    groups: list[Group] = field(default_factory=list)
    held_bytes: int = 0
    """Of copies that run when they are released."""
    released_bytes: int = 0
    opened_s: float = field(default_factory=time.monotonic)
    captured_s: float = 0.0
    durable_s: float = 0.0
    sealed: bool = False
    """False behind the fence: copies are on their way from a device."""
    waited_s: float = 0.0
    """Seconds at fences so far."""
    torn: tuple[str, ...] = ()
    """What changed while it was copied; it was dropped for that."""
    moved: Callable[[], str] = lambda: ""
    """Name of a tensor that is not what it was at an instant before the opening, see `Weights`."""
    futures: list[Future[int]] = field(default_factory=list)
    """Whoever waits for this very snapshot."""

    @property
    def counted_form(self) -> bytes:
        """What must be the same on every rank: of those that share, the instant, too."""
        return bytes([self.form[0] ^ 1]) + self.form[1:] if self.is_early_share else self.form

    @property
    def is_early_share(self) -> bool:
        """It goes with other ranks' early shares only."""
        return self.share_digest != HOLDS_ALL and bool(self.flags & RECORD_EARLY)

    @property
    def transfers(self) -> list[Transfer]:
        """Of its groups."""
        return [group.transfer for group in self.groups if group.transfer is not None]

    def fail(self, error: BaseException) -> None:
        """Tell those who wait that it will not come."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


@dataclass(eq=False)
class Counters:
    """What happened, for `handle.stats()`."""

    captured: int = 0
    durable: int = 0
    """On this rank."""
    committed: int = 0
    """On every rank."""
    slipped: int = 0
    torn: int = 0
    failed: int = 0
    dead: int = 0
    commit_s: float = 0.0
    whole_s: float = 0.0
    persist_s: float | None = None
    """Opening to commit of the last snapshot."""
    last_captured_step: int | None = None
    last_exact_step: int | None = None
    """The last that was captured and is not early."""
    last_committed_step: int | None = None


class Slip(StrEnum):
    """Why a due snapshot cannot be opened now."""

    SLOTS = "every slot is busy"
    DRAM = "the DRAM for staging still holds the last snapshot"
    COPY = "the device's own copy still holds the last snapshot"
    GRAPH = "the device records a graph"


def torn_error(names: Sequence[str], step: int) -> TornSnapshotError:
    """The error that reports a torn snapshot."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return TornSnapshotError(
        f"snapshot of step {step} was dropped: {names[0]}{more} changed between the forward and the"
        " next optimizer step. The next snapshot is copied at once; a tensor that changes there"
        " again is copied at the start of the forward from then on",
        names=names,
    )
