"""Follow snapshots in flight: what each copies, who waits for it, what became of earlier ones.

An *inflight snapshot* is one between its opening at forward start and the moment its fate is known.
Its copies form groups, one per set of optimizers that update the tensors, so that each optimizer's
step waits for its own tensors only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from lightck.errors import TornSnapshotError
from lightck.pipeline.copy_plan import CopySources
from lightck.pipeline.device_transfer import DeviceTransfer
from lightck.region.native_region import HOLDS_ALL, RECORD_EARLY
from lightck.region.slot_writer import Batch, SlotWriter


@dataclass(eq=False)
class CopyGroup:
    """One group of copies, whose sources the same optimizers update."""

    holders: frozenset[int]
    batch: Batch
    sources: CopySources | None
    """Tensors that are copied, which keeps their memory alive; None once they are captured."""
    is_private: bool
    """True if no copy can be torn: of private copies, or made before the opening returned."""
    transfer: DeviceTransfer | None = None
    """Transfer from the device that holds the sources; None: none does."""

    @property
    def is_held(self) -> bool:
        """Tell whether its copies run only when they are released."""
        return not self.is_private and self.transfer is None

    @property
    def captured(self) -> bool:
        """Tell whether every copy has left its source.

        A device's copies may still run, but before whatever the device does next.
        """
        return self.sources is None


@dataclass(eq=False)
class InflightSnapshot:
    """One snapshot, from its opening at forward start until its fate is known."""

    step: int
    writer: SlotWriter
    at_step: bytes
    at_forward: bytes
    flags: int
    share_digest: bytes = HOLDS_ALL
    state_fingerprint: bytes = b""
    """Fingerprint of state that all ranks hold alike, see `inventory.RankShare`."""
    rank_local: bool = False
    """True if no other rank was asked: at restore, what all of them hold decides."""
    groups: list[CopyGroup] = field(default_factory=list)
    held_bytes: int = 0
    """Bytes of all copies that run only when they are released."""
    released_bytes: int = 0
    opened_s: float = field(default_factory=time.monotonic)
    captured_s: float = 0.0
    durable_s: float = 0.0
    sealed: bool = False
    """True once sealed; False behind the fence while copies are on their way from a device."""
    waited_s: float = 0.0
    """Seconds at fences so far."""
    torn: tuple[str, ...] = ()
    """Names of what changed while it was copied, for which the snapshot was dropped."""
    moved: Callable[[], str] = lambda: ""
    """Names a tensor that has changed since an instant before the opening, see `WeightGuard`."""
    futures: list[Future[int]] = field(default_factory=list)
    """Futures of those who wait for this very snapshot."""

    @property
    def agreed_fingerprint(self) -> bytes:
        """Fingerprint that must agree on all ranks; if they share, it has the instant, too."""
        agreed = self.state_fingerprint
        return bytes([agreed[0] ^ 1]) + agreed[1:] if self.is_early_share else agreed

    @property
    def is_early_share(self) -> bool:
        """Tell whether it goes together with other ranks' early shares only."""
        return self.share_digest != HOLDS_ALL and bool(self.flags & RECORD_EARLY)

    @property
    def transfers(self) -> list[DeviceTransfer]:
        """Transfers of its groups."""
        return [group.transfer for group in self.groups if group.transfer is not None]

    def fail(self, error: BaseException) -> None:
        """Tell those who wait that the snapshot will not come."""
        for future in self.futures:
            if not future.done():
                future.set_exception(error)


@dataclass(eq=False)
class Counters:
    """Counts of what happened, for `handle.stats()`."""

    captured: int = 0
    durable: int = 0
    """Number of snapshots that are durable on this rank."""
    committed: int = 0
    """Number of snapshots that are committed on every rank."""
    slipped: int = 0
    torn: int = 0
    failed: int = 0
    dead: int = 0
    commit_s: float = 0.0
    whole_s: float = 0.0
    persist_s: float | None = None
    """Seconds from opening to commit of the last snapshot; None before the first."""
    last_captured_step: int | None = None
    last_exact_step: int | None = None
    """Step of the last snapshot that was captured and is not early."""
    last_committed_step: int | None = None

    def count_slipped(self) -> None:
        """Count a due snapshot that was not opened."""
        self.slipped += 1

    def count_torn(self) -> None:
        """Count a snapshot that was dropped because its sources changed."""
        self.torn += 1

    def count_failed(self) -> None:
        """Count a snapshot that an error has cost."""
        self.failed += 1

    def forget_steps(self) -> None:
        """Forget the last steps: a timeline begins behind which none is captured yet."""
        self.last_captured_step = self.last_exact_step = self.last_committed_step = None


class SlipReason(StrEnum):
    """Why a due snapshot cannot be opened now."""

    SLOTS = "every slot is busy"
    DRAM = "the DRAM for staging still holds the last snapshot"
    COPY = "the device's own copy still holds the last snapshot"
    GRAPH = "the device records a graph"


def torn_error(names: Sequence[str], step: int) -> TornSnapshotError:
    """Make the error that reports a torn snapshot."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return TornSnapshotError(
        f"snapshot of step {step} was dropped: {names[0]}{more} changed between the forward and the"
        " next optimizer step. The next snapshot is copied at once; a tensor that changes there"
        " again is copied at the start of the forward from then on",
        names=names,
    )
