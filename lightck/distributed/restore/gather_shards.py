"""Sharded tensors of a snapshot, put together from the parts of every rank that wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from lightck.distributed.restore.protocol import ChosenSnapshot
from lightck.errors import CorruptSnapshotError, StateError
from lightck.reader.assembly import AssembledSnapshot
from lightck.reader.fill import fresh
from lightck.region.layout import Entry

_Parts = dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor]
"""Parts by offset and shape.

Ranks that hold the same part (replicated groups) hold the same bytes.
"""


def gather(found: ChosenSnapshot) -> dict[str, torch.Tensor]:
    """Return every sharded tensor of this rank by name, whole, in memory of its own.

    Raises:
        CorruptSnapshotError: a rank's part is missing or damaged.
        StateError: the rows of one part lie between those of another, which is not supported yet.
    """
    wanted = {e.name: e for e in found.snapshot.entries if e.shard is not None}
    if not wanted:
        return {}
    found.holdings.widen()
    parts: dict[str, _Parts] = {name: {} for name, e in wanted.items() if e.alias_of is None}
    for rank in range(found.key.world):
        state = found.holdings.assembled(found.key, rank)
        if not isinstance(state, AssembledSnapshot):
            why = state or "nothing of it is there"
            raise CorruptSnapshotError(f"step {found.key.step}: the parts of rank {rank}: {why}")
        state.trees()  # checks the layout before memory is allocated from it
        for entry, part in _read(state, {name: wanted[name] for name in parts}):
            assert entry.shard is not None
            parts[entry.name][entry.shard.offset, entry.shape] = part
    wholes = {name: _tiled(wanted[name], held) for name, held in parts.items()}
    return {name: wholes[e.alias_of or name] for name, e in wanted.items()}


def _read(
    state: AssembledSnapshot, wanted: Mapping[str, Entry]
) -> list[tuple[Entry, torch.Tensor]]:
    """Read the parts that one rank has; each is verified against its checksum as it is read."""
    addresses = np.zeros(len(state.entries), np.uint64)
    found = []
    for i, entry in enumerate(state.entries):
        if entry.shard is not None and entry.name in wanted:
            of, expected = _whole(entry), _whole(wanted[entry.name])
            if of != expected:
                raise CorruptSnapshotError(
                    f"{state.label}: {entry.name} is a part of {of}, on another rank of {expected}"
                )
            part = fresh(entry)
            addresses[i] = part.data_ptr()
            found.append((entry, part))
    with state.leased():
        state.read(addresses)
    return found


def _whole(entry: Entry) -> str:
    """Describe the whole tensor that a part belongs to; the text is the same on every rank."""
    assert entry.shard is not None
    tied = f" tied to {entry.alias_of}" if entry.alias_of else ""
    return f"{entry.dtype}{list(entry.shard.shape)}{tied}"


def _tiled(entry: Entry, parts: _Parts) -> torch.Tensor:
    assert entry.shard is not None
    # Compared before memory is allocated for the size that a layout states.
    if sum(part.numel() for part in parts.values()) != math.prod(entry.shard.shape):
        raise _untiled(entry, len(parts))
    whole = torch.empty(entry.shard.shape, dtype=getattr(torch, entry.dtype))
    times = torch.zeros(entry.shard.shape, dtype=torch.uint8)
    for (offset, shape), part in parts.items():
        at = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        whole[at] = part
        times[at] += 1
    if not bool((times == 1).all()):
        raise _untiled(entry, len(parts))
    return whole


def _untiled(entry: Entry, parts: int) -> StateError:
    assert entry.shard is not None
    return StateError(
        f"{entry.name}: {parts} parts do not tile {list(entry.shard.shape)}"
        f" ({entry.shard.placements}): putting such together is not supported yet",
        path=entry.name,
    )
