"""The survivor's copy into a dead rank's slot; it overwrites only what that rank might.

The newest whole snapshot there stays, by I6 (old before new).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from lightck.device.base import Device
from lightck.errors import TornSnapshotError, WaitTimeoutError
from lightck.pipeline.copy_plan import Arrangement, Sources, sources
from lightck.region.native_region import Record
from lightck.region.region import Region
from lightck.region.slot import Slot
from lightck.region.slot_writer import SlotWriter

_FETCHED_BYTES = 4 << 20
"""Bytes fetched from a device at once."""
_LOOK_S = 0.001
_under_way: list[tuple[torch.Tensor, Sources]] = []
"""Copies that a device did not finish in time and may still make."""


def of_step(slots: Sequence[Slot], timeline: int, step: int | None) -> list[Record]:
    """Return the committed snapshots of a step, exact ones first."""
    records = [slot.record for slot in slots if slot.record is not None]
    found = [r for r in records if (r.timeline, r.step) == (timeline, step)]
    return sorted(found, key=lambda record: record.early)


def alike(record: Record, ours: Record) -> bool:
    """Tell whether two records are parts of one snapshot."""
    said = [(r.step, r.timeline, r.world, r.share_digest, r.early) for r in (record, ours)]
    return said[0] == said[1]


def shield(region: Region, own: Region) -> None:
    """Protect, in a dead rank's region, the snapshots that this rank's region protects.

    These are the newest whole one, and those of unknown outcome.
    """
    if own.reusable is not None:
        region.reusable = _spare(own, own.reusable)
    newest = own.slots[own.protected].record if own.protected is not None else None
    for slot in region.slots:
        record = slot.record
        if newest and record and (record.timeline, record.step) == (newest.timeline, newest.step):
            region.protected = slot.index


def _spare(own: Region, reusable: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    """Return a predicate that says whether the job can do without a snapshot of the dead rank.

    It can do without one of this timeline, too, if this rank's part of it is missing.
    """
    records = [slot.record for slot in own.slots if slot.record is not None]
    held = {(record.timeline, record.step) for record in records}
    settled = all(slot.writer is None for slot in own.slots)

    def spare(timeline: int, step: int) -> bool:
        lacking = settled and timeline == own.timeline and (timeline, step) not in held
        return lacking or reusable(timeline, step)

    return spare


def copy(writer: SlotWriter, arrangement: Arrangement, deadline: float) -> None:
    """Copy everything; the state must not change meanwhile.

    Raises:
        TornSnapshotError: the state has changed.
        WaitTimeoutError: the copy took longer than until the deadline.
    """
    for part in arrangement.parts:
        chosen = sources(part, arrangement)
        never = np.zeros(len(part.positions), np.bool_)
        pointers = chosen.pointers + part.begins
        if part.device is not None:  # the workers cannot read it
            held = _fetched(part.device, chosen, deadline, made=part.owned)
            pointers = np.array([each.data_ptr() for each in held], np.uint64)
        batch = writer.add(part.positions, pointers, never, never)
        writer.capture(batch, max(0.0, deadline - time.monotonic()))
        if part.owned and not part.at_once:
            continue
        torn = [writer.layout.entries[int(part.positions[i])].name for i in chosen.changed()]
        found = torn[0] if torn else writer.audit(batch, secrets.randbits(63), False)
        if found:
            raise TornSnapshotError(f"{found} changed while it was copied", names=(found,))


def _fetched(device: Device, chosen: Sources, deadline: float, *, made: bool) -> list[torch.Tensor]:
    """Copy a device's tensors to memory of the CPU.

    Computations on the device may hang, and are not waited for: this rank's own snapshot of the
    step is committed, so that the device has got there. Only if the sources are copies that have
    just been `made`, the computation that made them is waited for.
    """
    if made:
        device.follow(device.mark())
    place = device.pinned(_FETCHED_BYTES)
    held = [torch.empty(flat.numel(), dtype=torch.uint8, device="cpu") for flat in chosen.flats]
    for whole, flat in zip(held, chosen.flats, strict=True):
        rows = zip(whole.split(_FETCHED_BYTES), flat.split(_FETCHED_BYTES), strict=True)
        for target, source in rows:
            there = place[: source.numel()]
            copied = device.copy([there], [source])
            while not copied.passed():
                if time.monotonic() > deadline:
                    _under_way.append((place, chosen))
                    raise WaitTimeoutError(f"{device.name} did not copy a part in time")
                time.sleep(_LOOK_S)
            target.copy_(there)
    return held
